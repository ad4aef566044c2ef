"""Implements `make compose-check`: builds the images, starts compose.yaml, disturbs the services and stops them.

Requires a container engine with compose, and BASE_IMAGE if the default image cannot be pulled. Grafana is not started:
its image cannot be built here, and the tests check its provisioning files.

Exit codes: 0 all checks passed · 1 a check failed · 77 not run, because there is no engine or no base image.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable

import quire
from deploy.engine import Compose, Container, EngineError, docker, found_base_image
from deploy.reference import fetched
from quire.addresses import with_port

EXIT_NOT_RUN = 77
WAIT_S = 300.0
MAX_SCHEDULER_MB = 230
PROMPT = "Once upon a time"
NUM_SAMPLES = 16
NUM_TOKENS = 1500
SERVICES = ("executor", "scheduler", "prometheus")
PORTS = ("GRPC_PORT", "HTTP_PORT", "OPENAI_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT")
NUM_STREAMED = 4
"""Number of completions: one undisturbed, and one for each way to lose an executor."""
_SIGNAL_ALL = "import os; print('armed', flush=True); input(); os.kill(-1, {number})"


class CheckFailed(Exception):
    """A check failed; the message says which."""


def main() -> int:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that `finally` runs
    settings = {name: with_port("127.0.0.1:0").rpartition(":")[2] for name in PORTS} | {"BIND": "127.0.0.1"}
    try:
        compose = Compose.find(f"quire-check-{os.getpid()}", settings)
        base_image = found_base_image()
    except EngineError as error:
        print(f"compose-check: not run: {error}")
        return EXIT_NOT_RUN
    try:
        _check(compose, settings, base_image)
    except (CheckFailed, EngineError, quire.QuireError, TimeoutError) as error:
        print(f"compose-check: FAILED: {error}", flush=True)
        compose.run("logs", "--tail", "40")
        return 1
    finally:
        compose.run("down", "--volumes", "--timeout", "20")
    print("compose-check: passed")
    return 0


def _check(compose: Compose, settings: dict[str, str], base_image: str) -> None:
    compose.run("build", *SERVICES)
    compose.run("up", "--detach", *SERVICES)
    containers = {service: compose.container(service) for service in SERVICES}
    for service, container in containers.items():
        _until_healthy(service, container)
        _check_confinement(service, container)
    _check_images(containers, base_image)
    address = f"127.0.0.1:{settings['GRPC_PORT']}"
    with quire.Client(address, timeout_s=WAIT_S) as client:
        expected = _streamed(client)
        _say(f"a completion of {NUM_SAMPLES} samples of {NUM_TOKENS} tokens through the published port")
        http = f"127.0.0.1:{settings['HTTP_PORT']}"
        killed = _streamed(client, _kill_and_start(compose, http))
        _expect(killed == expected, "the stream whose executor was killed with `compose kill` has other tokens")
        _say("compose kill executor during a stream, then start: the stream is complete, with the same tokens")
        for number, what in ((signal.SIGKILL, "killed"), (signal.SIGSTOP, "stopped, so that it hangs,")):
            disturbed = _streamed(client, _send_signal(containers["executor"], number, http))
            _expect(disturbed == expected, f"the stream whose executor was {what} has other tokens")
            _say(f"the executor's process {what} during a stream: restarted automatically, the stream is complete")
            _until_healthy("executor", containers["executor"])
    _check_prometheus(f"http://127.0.0.1:{settings['PROMETHEUS_PORT']}")
    compose.run("stop")
    for service, container in containers.items():
        _expect(container.exit_code == 0, f"{service} ended with exit code {container.exit_code}")
    _say("stopped: every container ended with exit code 0")


def _until_healthy(service: str, container: Container) -> None:
    _until(lambda: container.health == "healthy", f"{service} is healthy")


def _check_confinement(service: str, container: Container) -> None:
    details = container.details()
    host = details["HostConfig"]
    _expect(details["Config"]["User"].split(":")[0] not in ("", "0", "root"), f"{service} runs as root")
    _expect(host["ReadonlyRootfs"], f"{service} can write to its root file system")
    _expect(host["CapDrop"] == ["ALL"] and not host["CapAdd"], f"{service} has capabilities")
    published = [binding for bindings in (host["PortBindings"] or {}).values() for binding in bindings]
    _expect(all(each["HostIp"] == "127.0.0.1" for each in published), f"{service} is published beyond loopback")
    _expect(bool(published) == (service != "executor"), f"{service} publishes {len(published)} ports")


def _check_images(containers: dict[str, Container], base_image: str) -> None:
    base_mb = _size_mb(base_image)
    size_mb = {service: _size_mb(container.details()["Image"]) for service, container in containers.items()}
    for service, size in size_mb.items():
        _say(f"image of the {service}: {size:.0f} MB, {size - base_mb:.0f} MB more than its base image")
    added_mb = size_mb["scheduler"] - base_mb
    _expect(added_mb <= MAX_SCHEDULER_MB, f"the scheduler adds {added_mb:.0f} MB to its base image")
    has_torch = docker(
        "exec", containers["scheduler"].id, "python", "-c",
        "import importlib.util as u; print(u.find_spec('torch') is not None)",
    )  # fmt: skip
    _expect(has_torch == "False", "the scheduler's image contains torch")


def _size_mb(image: str) -> float:
    return int(docker("image", "inspect", "--format", "{{.Size}}", image)) / 1e6


def _streamed(client: quire.Client, disturb: Callable[[], object] | None = None) -> dict[int, list[int]]:
    """Returns the token ids of each sample of a completion that takes seconds; calls `disturb` during the stream."""
    token_ids: dict[int, list[int]] = {index: [] for index in range(NUM_SAMPLES)}
    num_ended = 0
    for event in client.generate(PROMPT, n=NUM_SAMPLES, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True):
        if isinstance(event, quire.Delta):
            token_ids[event.index] += event.token_ids
            if disturb is not None:
                disturb()
                disturb = None
        num_ended += isinstance(event, quire.Finished)
    _expect(num_ended == NUM_SAMPLES, f"{num_ended} of {NUM_SAMPLES} samples ended")
    lengths = {len(tokens) for tokens in token_ids.values()}
    _expect(lengths == {NUM_TOKENS}, f"the samples ended after {lengths} tokens")
    return token_ids


def _kill_and_start(compose: Compose, http: str) -> Callable[[], None]:
    """Returns a function that kills the executor and starts it again.

    An engine does not restart a container that a user has killed.
    """

    def disturb() -> None:
        compose.run("kill", "executor")
        _expect(not compose.container("executor").is_running, "the executor is still running")
        _expect_open_stream(http)
        compose.run("start", "executor")

    return disturb


def _send_signal(executor: Container, number: signal.Signals, http: str) -> Callable[[], None]:
    """Returns a function that sends a signal to all processes of the container, except its init.

    SIGKILL ends them and then the container, which the restart policy starts again. SIGSTOP makes them hang until the
    health check kills them. The process that sends the signal is started here, because starting it in the container
    takes longer than a stream.
    """
    signaller = subprocess.Popen(
        ["docker", "exec", "--interactive", executor.id, "python", "-c", _SIGNAL_ALL.format(number=int(number))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    if signaller.stdout is None or signaller.stdout.readline() != "armed\n":
        raise EngineError("cannot run a process in the executor's container")

    def disturb() -> None:
        num_restarts = executor.num_restarts
        signaller.communicate("now\n")
        _expect_open_stream(http)
        _until(lambda: executor.num_restarts > num_restarts, "the engine restarts the executor")

    return disturb


def _expect_open_stream(http: str) -> None:
    """Fails unless a request is open, as the disturbance must happen during a stream.

    A request that waits may count once per sample.
    """
    lines = fetched(http).splitlines()
    num_open = sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith(("quire_requests_running{", "quire_queue_requests{"))
    )
    _expect(num_open > 0, "the stream had ended before")


def _check_prometheus(url: str) -> None:
    def value(query: str) -> float:
        with urllib.request.urlopen(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}") as response:
            result = json.load(response)["data"]["result"]
        return float(result[0]["value"][1]) if result else 0.0

    num_tokens = NUM_STREAMED * NUM_SAMPLES * NUM_TOKENS
    _until(lambda: value("sum(up)") == 2, "Prometheus scrapes both services")
    _until(lambda: value("sum(quire_generation_tokens_total)") == num_tokens, "Prometheus has counted every token")
    _say(f"Prometheus scrapes both services, and has counted {num_tokens} tokens, each once")


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {WAIT_S:g} s: {what}")
        time.sleep(0.5)


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise CheckFailed(otherwise)


def _say(line: str) -> None:
    print(f"compose-check: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
