"""A fleet of real processes on this machine, and clients that compare every text."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import aiohttp

from fleet.client import fleet_client
from fleet.local_control import fleet_directory
from fleet.proc import session_members
from tests.support.e2e.process import ROOT
from tests.support.e2e.stack import QUIRE
from tests.support.e2e.waiting import WAIT_S, until
from tests.support.gateway.rig import content, parsed_events

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

SHORT = ("--num-blocks", "512", "--num-threads", "1")


def quire(*arguments: str, timeout_s: float = 2 * WAIT_S) -> subprocess.CompletedProcess[str]:
    """Runs a command of `quire`."""
    return subprocess.run(
        [*QUIRE, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )


class Fleet:
    """Brings a fleet up with `quire fleet`; a context manager that ends whatever is left of it."""

    executor_flags: ClassVar[Sequence[str]] = SHORT

    def __init__(self, backend: str = "local", address: str = "auto") -> None:
        self.name = f"test-{uuid.uuid4().hex[:8]}"
        self.openai = ""
        self.key = ""
        self.flags: tuple[str, ...] = ()
        self._which = ("--name", self.name, "--backend", backend, "--address", address)
        self._client = fleet_client(backend, self.name, address)  # a command would start an interpreter

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.run("down", "--timeout-s", "0", check=False)
        self.kill_all()

    @property
    def directory(self) -> Path:
        return fleet_directory(self.name)

    def up(self, replicas: int, *flags: str, gateway_listen: str = "127.0.0.1:0") -> str:
        """Starts the fleet, and returns the ready line. Flags of executors come last, if there are any."""
        if "--executor-flags" not in flags:
            flags = (*flags, "--executor-flags", "")
        self.flags = ("--gateway-listen", gateway_listen, *flags[:-1], " ".join((flags[-1], *self.executor_flags)))
        done = self.run("up", "--replicas", str(replicas), *self.flags)
        self.openai = done.stdout.split("openai=")[1].split()[0]
        return done.stdout

    def run(self, verb: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs `quire fleet VERB` for this fleet."""
        done = quire("fleet", verb, *self._which, *arguments)
        assert not check or done.returncode == 0, done.stdout + done.stderr + self.log()
        return done

    def status(self) -> dict[str, Any]:
        return self._client.ask("status", {})

    def parts(self) -> dict[str, dict[str, Any]]:
        """Returns the parts by name."""
        return {each["part"]: each for each in self.status()["parts"]}

    def kill(self, part: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Sends a signal to a part or to the "controller"; returns its process id."""
        report = self.status()
        pid = report["controller_pid"] if part == "controller" else self.parts()[part]["pid"]
        os.kill(pid, number)
        return int(pid)

    async def settled(self, replicas: int) -> None:
        """Waits until so many replicas and their gateway are ready."""

        async def is_settled() -> bool:
            report = await asyncio.to_thread(self.status)
            states = [each["state"] for each in report["parts"]]
            return states == ["ready"] * (2 * replicas + 1) and not report["wanted"]["draining"]

        await until(is_settled, f"{replicas} replicas are ready")

    def log(self) -> str:
        """Returns all logs."""
        logs = [self.directory / "controller.log", *sorted(self.directory.glob("parts/*/log"))]
        found = []
        for path in logs:
            with suppress(OSError):
                found.append(f"--- {path.parent.name}/{path.name}\n{path.read_text(errors='replace')[-4000:]}")
        return "\n".join(found)

    def kill_all(self) -> None:
        """Kills the processes of a fleet whose controller does not answer any more."""
        for record in self.directory.glob("parts/*/record.json"):
            with suppress(OSError, ValueError):
                for pid in session_members(json.loads(record.read_text())["pid"]):
                    os.kill(pid, signal.SIGKILL)


@dataclass(slots=True)
class Answers:
    """The texts of streams, and the longest time for which one of them was silent."""

    texts: list[str] = field(default_factory=list)
    longest_silence_s: float = 0.0


async def ask(http: aiohttp.ClientSession, body: Mapping[str, Any], address: Callable[[], str]) -> tuple[str, float]:
    """Streams a completion, and returns its text and its longest silence.

    A client whose gateway has died sends its request again, as an OpenAI client does: with the same seed, it gets the
    same text. Any other failure is an error.
    """
    silence_s, until_s = 0.0, time.monotonic() + WAIT_S
    while True:
        last_s, received = time.monotonic(), b""
        try:
            async with http.post(f"http://{address()}/v1/completions", json=dict(body) | {"stream": True}) as response:
                async for chunk in response.content.iter_any():
                    now_s = time.monotonic()
                    silence_s, last_s = max(silence_s, now_s - last_s), now_s
                    received += chunk
                assert response.status == 200, received.decode()
        except aiohttp.ClientConnectionError:
            if time.monotonic() > until_s:
                raise
            await asyncio.sleep(0.1)
            continue
        except aiohttp.ClientPayloadError:
            continue
        events = parsed_events(received.decode())
        assert events[-1] == "[DONE]", events[-1]
        return content(events), silence_s


def request(i: int, num_tokens: int) -> dict[str, Any]:
    """Returns a request whose text is its own."""
    animal = ("cat", "dog", "fox", "owl")[i % 4]
    return {
        "prompt": f"Once upon a time there was a {animal}",
        "max_tokens": num_tokens,
        "seed": 7 + i,
        "ignore_eos": True,
    }


async def answers(fleet: Fleet, num_streams: int, num_tokens: int) -> Answers:
    """Returns the texts of streams that run side by side."""
    timeout = aiohttp.ClientTimeout(total=3 * WAIT_S)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(limit=0), headers=_credentials(fleet.key)
    ) as http:
        asked = (ask(http, request(i, num_tokens), lambda: fleet.openai) for i in range(num_streams))
        found = await asyncio.gather(*asked)
    return Answers([text for text, _ in found], max(silence_s for _, silence_s in found))


def _credentials(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}
