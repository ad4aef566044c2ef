"""Checks what happens if scheduler and executor come from two commits: `python -m checks.upgrade [BASE]`.

Builds the wheels of HEAD and of BASE (by default the newest commit that has another version of the plan stream), and
runs the scheduler of each with the executor of the other, under 64 streams of several kinds. Every stream has to give
the same tokens as with both services of the scheduler's commit. If the two cannot work together, the refusal has to
come within 5 s and to name the versions or the missing features, and all streams have to fail. Needs a package index
for the tools that build wheels; what the services import comes from this environment. Exits with status 1 if anything
fails.
"""

import asyncio
import io
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks.steps import CheckFailed, expect
from checks.wheel import ROOT, environment, pip_install, run
from quire import AsyncClient, QuireError

NUM_STREAMS = 64
MAX_REFUSAL_S = 5.0
START_TIMEOUT_S = 120.0
STREAM_TIMEOUT_S = 120.0
REASONS = ("of the plan stream", "it lacks ", "this executor lacks ")
"""A refusal has to have one of these words: the versions differ, or one end lacks a feature that it names."""

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 1.0, "seed": 6, "n": 2, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"temperature": 0.8, "seed": 7, "logprobs": 2},
)

Tokens = list[list[int]]


@dataclass(frozen=True, slots=True)
class Release:
    """A commit, and the folder where its wheel is installed."""

    commit: str
    folder: Path

    def __str__(self) -> str:
        return self.commit[:10]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The tokens of all streams, or the texts with which they were refused, and the seconds until the last had ended.

    reason: what the scheduler says of the refusal, in /readyz or in its log; "": nothing. It came after reason_s.
    """

    tokens: list[Tokens]
    refusals: list[str]
    duration_s: float
    reason: str
    reason_s: float


def main() -> int:
    """Runs the check; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="quire-upgrade-") as folder:
        try:
            check(Path(folder), sys.argv[1] if len(sys.argv) > 1 else other_protocol())
        except CheckFailed as failure:
            print(f"upgrade: {failure}", file=sys.stderr)
            return 1
    return 0


def check(folder: Path, base: str) -> None:
    """Raises CheckFailed at the first problem."""
    tools = environment(folder / "tools")
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    pip_install(tools, *requirements)
    new, old = (installed(git("rev-parse", f"{commit}^{{commit}}").strip(), tools, folder) for commit in ("HEAD", base))
    for scheduler, executor in ((new, old), (old, new)):
        print(f"upgrade: scheduler of {scheduler} with executor of {executor}", flush=True)
        expected = asyncio.run(outcome(scheduler, scheduler))
        expect(not expected.refusals, f"a scheduler refuses its own executor: {expected.refusals[:1]}")
        verdict = judged(asyncio.run(outcome(scheduler, executor)), expected)
        print(f"upgrade: {verdict}", flush=True)


def judged(actual: Outcome, expected: Outcome) -> str:
    """Returns a sentence for a good outcome. Raises CheckFailed for any other."""
    if not actual.refusals:
        differing = sum(one != other for one, other in zip(actual.tokens, expected.tokens, strict=True))
        expect(not differing, f"{differing} of {NUM_STREAMS} streams have other tokens")
        num_tokens = sum(len(ids) for stream in actual.tokens for ids in stream)
        return f"{NUM_STREAMS} of {NUM_STREAMS} streams have the same {num_tokens} tokens"
    expect(len(actual.refusals) == NUM_STREAMS, f"only {len(actual.refusals)} streams were refused")
    expect(bool(actual.reason), f"the scheduler gives no reason: {sorted(set(actual.refusals))}")
    expect(actual.reason_s <= MAX_REFUSAL_S, f"the refusal took {actual.reason_s:.1f} s: {actual.reason}")
    return (
        f"refused after {actual.reason_s:.1f} s, and {NUM_STREAMS} of {NUM_STREAMS} streams have failed after "
        f"{actual.duration_s:.1f} s: {actual.reason}"
    )


async def outcome(scheduler: Release, executor: Release) -> Outcome:
    """Runs the two services under all streams. Raises CheckFailed if one of them does not start."""
    with tempfile.TemporaryDirectory(prefix="quire-upgrade-run-") as home:
        limits = ("--num-threads", "1", "--num-blocks", "1024", "--metrics-address", "")
        with service(executor, home, "executor", "--listen-address", "127.0.0.1:0", *limits) as lines:
            ready = next((line for line in lines if line.startswith("ready ")), "")
            expect(bool(ready), f"the executor of {executor} did not start")
            grpc, http = free_address(), free_address()
            addresses = ("--listen", grpc, "--http-listen", http, "--executor", ready.split()[1])
            with service(scheduler, home, "scheduler", *addresses):
                await connected(grpc)
                return await streams(grpc, http, Path(home) / "scheduler.log")


async def streams(address: str, http: str, log: Path) -> Outcome:
    """Sends all streams once the scheduler is ready or gives a reason not to be, and waits until all have ended."""
    started_s = time.monotonic()
    reasons = asyncio.create_task(refusal(http, log, started_s))
    while await asyncio.to_thread(ready_text, http) and time.monotonic() - started_s < MAX_REFUSAL_S:
        if reasons.done():
            break
        await asyncio.sleep(0.05)
    async with AsyncClient(address, timeout_s=STREAM_TIMEOUT_S) as client:
        results = await asyncio.gather(*(stream(client, index) for index in range(NUM_STREAMS)))
    duration_s = time.monotonic() - started_s
    reason, reason_s = reasons.result() if reasons.done() else ("", duration_s)
    reasons.cancel()
    return Outcome(
        [result for result in results if not isinstance(result, str)],
        [result for result in results if isinstance(result, str)],
        duration_s,
        reason,
        reason_s,
    )


async def refusal(http: str, log: Path, started_s: float) -> tuple[str, float]:
    """Waits until the scheduler gives a reason, in /readyz or in its log; returns it and the seconds that it took."""
    while True:
        logged = await asyncio.to_thread(log.read_text, encoding="utf-8")
        lines = [await asyncio.to_thread(ready_text, http), *logged.splitlines()]
        for line in lines:
            if any(word in line for word in REASONS):
                return line, time.monotonic() - started_s
        await asyncio.sleep(0.05)


async def stream(client: AsyncClient, index: int) -> Tokens | str:
    """Returns the tokens of each sequence, or the text of the refusal."""
    try:
        completion = await client.complete(
            f"Once upon a time, number {index}", max_tokens=24, **KINDS[index % len(KINDS)]
        )
    except QuireError as error:
        return str(error)
    return [list(sequence.token_ids) for sequence in completion.sequences]


@contextmanager
def service(release: Release, home: str, *command: str) -> Iterator[Iterator[str]]:
    """Runs a service of an installed wheel, which logs to SERVICE.log; yields the lines of its standard output."""
    own = {"PYTHONPATH": str(release.folder), "XDG_RUNTIME_DIR": home, "HOME": home}
    words = [sys.executable, "-P", "-m", "quire", *command]
    with (
        (Path(home) / f"{command[0]}.log").open("w", encoding="utf-8") as log,
        subprocess.Popen(
            words, cwd=home, env=os.environ | own, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            yield iter(process.stdout)
        finally:
            process.kill()


async def connected(address: str) -> None:
    """Waits until something listens there."""
    host, port = address.split(":")
    limit_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            expect(time.monotonic() < limit_s, f"nothing listens at {address}")
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return


def ready_text(http: str) -> str:
    """Returns "" for a scheduler that is ready, else why it is not."""
    try:
        with urllib.request.urlopen(f"http://{http}/readyz", timeout=5):
            return ""
    except urllib.error.HTTPError as error:
        return error.read().decode(errors="replace").strip() or str(error)
    except OSError as error:
        return str(error)


def installed(commit: str, tools: Path, folder: Path) -> Release:
    """Builds the wheel of a commit, and installs it without its dependencies."""
    tree, dist, target = (folder / commit / name for name in ("tree", "dist", "target"))
    dist.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(tree, filter="data")
    build = "import sys; from hatchling import build as b; b.build_wheel(sys.argv[1])"
    run(tree, str(tools), "-c", build, str(dist))
    (wheel,) = dist.glob("*.whl")
    run(tree, str(tools), "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel))
    return Release(commit, target)


def other_protocol() -> str:
    """Returns the newest commit that has another version of the plan stream than HEAD."""
    own = protocol("HEAD")
    for commit in git("log", "--format=%H", "HEAD").split():
        if protocol(commit) != own:
            return commit
    raise CheckFailed("no commit has another version of the plan stream")


def protocol(commit: str) -> str:
    """Returns the line that says which version of the plan stream a commit has; "" if it has none."""
    shown = subprocess.run(
        ["git", "show", f"{commit}:quire/plan_stream.py"], cwd=ROOT, check=False, capture_output=True, text=True
    ).stdout
    return next((line for line in shown.splitlines() if line.startswith("PROTOCOL_VERSION")), "")


def git(*words: str) -> str:
    return run(ROOT, "git", *words)


def free_address() -> str:
    """Returns an address of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


if __name__ == "__main__":
    sys.exit(main())
