"""A measurement in phases: processes one after the other, each with a limit on its time.

A phase is a command that writes its results as JSON. What it has written counts even where it fails or is cut off.
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
    """A command, run with this Python.

    arguments    of the interpreter; OUTPUT stands for the file that takes the results
    environment  in addition to that of this process
    limit_s      after which it is cut off
    is_vital     whether its failure is the whole's
    """

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    is_vital: bool = False


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """last_lines of its output, where it did not pass. results: what it wrote, maybe only in part."""

    status: Status
    wall_s: float
    limit_s: float
    results: dict[str, Any] | None
    last_lines: tuple[str, ...] = ()


def run_phase(phase: Phase, output: Path, deadline_s: float) -> PhaseResult:
    """Runs it to its end, its limit, or the deadline (a reading of time.monotonic), whichever is first."""
    started_s = time.monotonic()
    limit_s = min(phase.limit_s, deadline_s - started_s)
    if limit_s <= 0:
        return PhaseResult("skipped", 0.0, 0.0, None, ("no time left",))
    output.unlink(missing_ok=True)
    command = [sys.executable, *(str(output) if argument == OUTPUT else argument for argument in phase.arguments)]
    lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
    # A session of its own, so that all it starts can be ended with it.
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
    """Ends what is left of a phase: SIGTERM, and SIGKILL for those that stay.

    Its descendants may lead sessions of their own, as services do; they are waited for, since whoever holds memory of
    the device would be missed by the next phase.
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
    _, staying = psutil.wait_procs(descendants, timeout=_KILL_AFTER_S)
    for one in staying:
        one.kill()


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _read(output: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(output.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # nothing was written, or half of it
        return None
    return values if isinstance(values, dict) else None
