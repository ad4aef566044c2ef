"""`make compose-check`: builds the images, brings compose.yaml up for real, breaks it and takes it down.

Needs a container engine whose command line knows compose, and BASE_IMAGE where the default cannot be pulled. Grafana
stays out: its image cannot be built here, and the tests check what it is provisioned with.

Exit codes: 0 all is well · 1 something is not · 77 not run: there is no engine, or no base image.
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
MAX_SCHEDULER_MB = 200
PROMPT = "Once upon a time"
NUM_SAMPLES = 16
NUM_TOKENS = 1500
SERVICES = ("executor", "scheduler", "prometheus")
PORTS = ("GRPC_PORT", "HTTP_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT")
NUM_STREAMED = 4
"""Completions: one undisturbed, and one for each way to lose an executor."""
_SIGNAL_ALL = "import os; print('armed', flush=True); input(); os.kill(-1, {number})"


class CheckFailed(Exception):
    """What was promised is not so."""


def main() -> int:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and so through `finally`
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
    print("compose-check: all is well")
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
        killed = _streamed(client, _killed_and_started(compose, http))
        _expect(killed == expected, "the stream that lost its executor to `kill` has other tokens")
        _say("compose kill executor in mid-stream, then start: the stream ends complete, with the same tokens")
        for number, what in ((signal.SIGKILL, "killed"), (signal.SIGSTOP, "stopped, so that it hangs,")):
            disturbed = _streamed(client, _signalled(containers["executor"], number, http))
            _expect(disturbed == expected, f"the stream whose executor was {what} has other tokens")
            _say(f"the executor's process {what} in mid-stream: restarted by itself, the stream ends complete")
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
    _expect(has_torch == "False", "the scheduler's image holds torch")


def _size_mb(image: str) -> float:
    return int(docker("image", "inspect", "--format", "{{.Size}}", image)) / 1e6


def _streamed(client: quire.Client, disturb: Callable[[], object] | None = None) -> dict[int, list[int]]:
    """Token ids of a completion by sample, so many that it takes seconds; `disturb` is called once it is under way."""
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


def _killed_and_started(compose: Compose, http: str) -> Callable[[], None]:
    """An engine never restarts by itself what a person has killed."""

    def disturb() -> None:
        compose.run("kill", "executor")
        _expect(not compose.container("executor").is_running, "the executor still runs")
        _expect_open_stream(http)
        compose.run("start", "executor")

    return disturb


def _signalled(executor: Container, number: signal.Signals, http: str) -> Callable[[], None]:
    """Everything in the container but its init dies, which then ends too, and the restart policy does the rest; or it
    stands still, which the health check puts an end to.

    Who is to signal it waits inside for its word: starting a process there takes longer than a stream.
    """
    signaller = subprocess.Popen(
        ["docker", "exec", "--interactive", executor.id, "python", "-c", _SIGNAL_ALL.format(number=int(number))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    if signaller.stdout is None or signaller.stdout.readline() != "armed\n":
        raise EngineError("nothing can be run in the executor's container")

    def disturb() -> None:
        num_restarts = executor.num_restarts
        signaller.communicate("now\n")
        _expect_open_stream(http)
        _until(lambda: executor.num_restarts > num_restarts, "the engine restarts the executor")

    return disturb


def _expect_open_stream(http: str) -> None:
    """Or what has just happened did not happen in mid-stream. A request that waits may count once a sample."""
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
    _say(f"Prometheus scrapes both services, and has counted {num_tokens} tokens: none twice")


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
