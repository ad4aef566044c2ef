"""Measured steps of a server, read from the trace that `quire bench serve --chrome-trace` saves.

The duration of a step is not the executor's working time. A server under load always has another plan in flight, and
scheduler, transport and clients share the machine with the executor. So a step lasts from the previous result to its
own:

    received   n-1          n            n+1
                │◄─ step n ─►│◄─ step n+1 ►│          planned before that: the pipeline was full

A step without decodes (the server was idle or had just started) begins with its plan instead.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from planning.bounded_file import read_text
from planning.errors import PlanningError
from scheduler.core.inspect.step_load import StepLoad

TimedStep = tuple[StepLoad, float]
"""The load of a step, and its duration in seconds."""

_MAX_BYTES = 1 << 29
_LOAD_FIELDS = ("sequences", "tokens", "decodes", "decode_pairs", "prefill_pairs")


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step of a trace. Times are in seconds, from one clock."""

    epoch: int
    planned_s: float
    received_s: float
    load: StepLoad


def measured_load(
    num_sequences: int, num_tokens: int, num_decodes: int, num_decode_pairs: int, num_prefill_pairs: int
) -> StepLoad:
    """Returns the load that these numbers of a trace describe.

    A trace does not say which chunks of prefills sampled a token, so all are assumed to.
    """
    return StepLoad(
        num_decodes,
        num_decode_pairs,
        num_sequences - num_decodes,
        num_tokens - num_decodes,
        num_prefill_pairs,
        num_sequences,
    )


def timed(steps: Sequence[MeasuredStep]) -> list[TimedStep]:
    """Returns the load and duration of each step, except the first of an epoch. The steps must be in order."""
    found: list[TimedStep] = []
    for before, step in pairwise(steps):
        if step.epoch == before.epoch:
            goes_on = step.load.num_decodes > 0
            started_s = before.received_s if goes_on else max(before.received_s, step.planned_s)
            found.append((step.load, step.received_s - started_s))
    return found


def turnaround_s(steps: Sequence[MeasuredStep]) -> float | None:
    """Returns the mean pause between a result after which no sequence runs and the next plan.

    For a single client this is the time from the last token of a request to the arrival of the next one. Returns None
    if the server was never idle.
    """
    pauses = [
        step.planned_s - before.received_s
        for before, step in pairwise(steps)
        if step.epoch == before.epoch and step.load.num_decodes == 0 and step.planned_s > before.received_s
    ]
    return sum(pauses) / len(pauses) if pauses else None


def read_steps(path: Path) -> list[MeasuredStep]:
    """Reads the steps of a saved trace, in order. Raises PlanningError."""
    try:
        content = json.loads(read_text(path, _MAX_BYTES))
        events = content["traceEvents"]
        planned = {_key(event): event for event in events if _names(event, "send")}
        received = {_key(event): event for event in events if _names(event, "in flight")}
        steps = [_step(planned[key], received[key]) for key in sorted(planned.keys() & received.keys())]
    except OSError as error:
        raise PlanningError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise PlanningError(f"{path}: not a step trace of quire bench serve --chrome-trace: {problem}") from None
    if len(steps) < 2:
        raise PlanningError(f"{path}: {len(steps)} steps are too few")
    return steps


def _names(event: Mapping[str, Any], phase: str) -> bool:
    return event.get("ph") == "X" and str(event["name"]).endswith(f" {phase}")


def _key(event: Mapping[str, Any]) -> tuple[int, int]:
    return int(event["args"]["epoch"]), int(str(event["name"]).split()[1])


def _step(planned: Mapping[str, Any], received: Mapping[str, Any]) -> MeasuredStep:
    """Returns the step of two trace events, whose times are in microseconds."""
    load = measured_load(*(int(planned["args"][field]) for field in _LOAD_FIELDS))
    return MeasuredStep(
        epoch=int(planned["args"]["epoch"]),
        planned_s=planned["ts"] / 1e6,
        received_s=(received["ts"] + received["dur"]) / 1e6,
        load=load,
    )
