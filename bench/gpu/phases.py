"""A measurement in phases: processes one after the other, each with a time limit.

A phase is a command that writes its results as JSON. The results count even if the phase fails or is cut off.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import IO, Any, Literal

import psutil

OUTPUT = "{output}"

Status = Literal["passed", "failed", "cut off", "skipped"]

_NUM_LAST_LINES = 25
_KILL_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class Phase:
    """A command that this Python runs.

    arguments    arguments of the interpreter; OUTPUT stands for the file of results
    environment  variables in addition to those of this process
    limit_s      time after which the phase is cut off
    is_vital     True if its failure makes the whole check fail
    """

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    is_vital: bool = False


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """The outcome of a phase.

    results     the results that the phase wrote, possibly incomplete
    last_lines  last lines of its output, if it did not pass
    """

    status: Status
    wall_s: float
    limit_s: float
    results: dict[str, Any] | None
    last_lines: tuple[str, ...] = ()


def run_phase(phase: Phase, output: Path, deadline_s: float) -> PhaseResult:
    """Runs a phase until it ends, its limit, or the deadline (a reading of time.monotonic), whichever is first."""
    started_s = time.monotonic()
    limit_s = min(phase.limit_s, deadline_s - started_s)
    if limit_s <= 0:
        return PhaseResult("skipped", 0.0, 0.0, None, ("no time left",))
    output.unlink(missing_ok=True)
    command = [sys.executable, *(str(output) if argument == OUTPUT else argument for argument in phase.arguments)]
    lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
    # The phase leads a session, so that everything it starts can be ended with it.
    process = subprocess.Popen(
        command,
        env=os.environ | dict(phase.environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    reader = Thread(target=_pass_on, args=(process.stdout, phase.name, lines), daemon=True)
    reader.start()
    try:
        return_code = process.wait(limit_s)
        status: Status = "passed" if return_code == 0 else "failed"
    except subprocess.TimeoutExpired:
        status = "cut off"
    finally:
        _end(process)
    reader.join(_KILL_AFTER_S)
    wall_s = time.monotonic() - started_s
    return PhaseResult(status, wall_s, limit_s, _read(output), () if status == "passed" else tuple(lines))


def _pass_on(stream: IO[str] | None, name: str, lines: deque[str]) -> None:
    for line in stream or ():
        lines.append(line.rstrip())
        print(f"{name} | {line.rstrip()}", flush=True)


def _end(process: subprocess.Popen[str]) -> None:
    """Ends the processes that a phase has left behind: SIGTERM, then SIGKILL.

    Descendants may lead sessions of their own, as services do. Waits for them, because the next phase needs the
    device memory that they hold.
    """
    descendants = _descendants(process.pid)
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(_KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
    _, survivors = psutil.wait_procs(descendants, timeout=_KILL_AFTER_S)
    for survivor in survivors:
        survivor.kill()


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _read(output: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(output.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the file is missing or incomplete
        return None
    return values if isinstance(values, dict) else None
