"""Small Python programs as children of a supervisor, and a log of their output."""

import sys
import textwrap
from pathlib import Path

from quire.cli.child import ChildSpec
from tests.support.waiting import until

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"


class Log:
    """Collects the lines that a supervisor logs."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __call__(self, name: str, line: str) -> None:
        self.lines.append((name, line))

    def of(self, name: str) -> list[str]:
        return [line for child, line in self.lines if child == name]

    async def until(self, name: str, line: str, count: int = 1) -> None:
        await until(lambda: self.of(name).count(line) >= count)


def child(name: str, program: str, grace_s: float = 30.0) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-I", "-S", "-c", textwrap.dedent(program)), grace_s)


async def yes() -> bool:
    return True


async def never() -> bool:
    return False


def is_alive(pid: int) -> bool:
    """Returns whether the process runs. A zombie does not: it has ended, and only its exit status is left."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
