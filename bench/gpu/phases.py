"""A measurement in phases: processes one after the other, each with a time limit.

A phase is a command that writes its results as JSON, as it goes. The results count even if the phase fails, is cut off,
or is killed. A phase that finds that it cannot run here writes {"skipped_because": reason} and exits with status 0.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import IO, Any, Literal

import psutil

OUTPUT = "{output}"

Status = Literal["passed", "failed", "killed", "cut off", "skipped", "unfinished"]

_NUM_LAST_LINES = 25
_KILL_AFTER_S = 5.0
_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Phase:
    """A command that this Python runs.

    arguments    arguments of the interpreter; OUTPUT stands for the file of results
    environment  variables in addition to those of this process
    limit_s      time after which the phase is cut off, counted from its start
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

    status      "killed": a signal ended it, for example because the machine had no memory left; "cut off": it reached
                its limit; "unfinished": it still runs, or the check that ran it was killed
    reason      why it did not pass, if its status does not say so
    results     the results that the phase wrote
    is_partial  True if there are results and the phase did not pass, so that parts of them may be missing
    last_lines  last lines of its output, if it did not pass
    """

    status: Status
    wall_s: float
    limit_s: float
    results: dict[str, Any] | None = None
    reason: str = ""
    is_partial: bool = False
    last_lines: tuple[str, ...] = ()


def run_phase(
    phase: Phase, output: Path, limit_s: float, keep: Callable[[PhaseResult], None] = lambda result: None
) -> PhaseResult:
    """Runs a phase until it ends, or is cut off after limit_s.

    `keep` takes the unfinished result at the start, and whenever the phase has written more.
    """
    started_s = time.monotonic()
    output.unlink(missing_ok=True)
    keep(PhaseResult("unfinished", 0.0, limit_s))
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
    kept: dict[str, Any] | None = None
    try:
        while (left_s := started_s + limit_s - time.monotonic()) > 0:
            try:
                process.wait(min(_POLL_S, left_s))
                break
            except subprocess.TimeoutExpired:
                results = _read(output)
            if results is not None and results != kept:
                kept = results
                wall_s = time.monotonic() - started_s
                keep(PhaseResult("unfinished", wall_s, limit_s, kept, is_partial=True, last_lines=tuple(lines)))
        return_code = process.poll()
    finally:
        _end(process)
    reader.join(_KILL_AFTER_S)
    return _result(return_code, time.monotonic() - started_s, limit_s, _read(output), tuple(lines))


def _result(
    return_code: int | None, wall_s: float, limit_s: float, results: dict[str, Any] | None, lines: tuple[str, ...]
) -> PhaseResult:
    """Returns the result of a phase that has ended. A return code of None says that it was cut off."""
    if return_code == 0:
        if results is not None and "skipped_because" in results:
            return PhaseResult("skipped", wall_s, limit_s, reason=str(results["skipped_because"]))
        return PhaseResult("passed", wall_s, limit_s, results)
    status: Status = "failed"
    reason = f"exit status {return_code}"
    if return_code is None:
        status, reason = "cut off", f"not finished after {limit_s:.0f} s"
    elif return_code < 0:
        status, reason = "killed", f"ended by {signal.Signals(-return_code).name}"
    return PhaseResult(status, wall_s, limit_s, results, reason, results is not None, lines)


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
