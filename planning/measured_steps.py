"""Steps that a server took, from the trace that `quire bench serve --chrome-trace` saves.

What a step took is not what the executor worked for it. A server under load has always another plan out, and scheduler,
transport and clients share the machine with the executor; so a step takes from the result before it to its own:

    received   n-1          n            n+1
                │◄─ step n ─►│◄─ step n+1 ►│          planned before that: the pipeline was full

Only where no decode goes on (the server had run dry, or just started) it begins with its plan.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from planning.errors import PlanningError
from scheduler.core.inspect.step_load import StepLoad

TimedStep = tuple[StepLoad, float]
"""What a step was asked for, and how many seconds it took."""

_LOAD_FIELDS = ("sequences", "tokens", "decodes", "decode_pairs", "prefill_pairs")


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Times are readings of one clock, in seconds."""

    epoch: int
    planned_s: float
    received_s: float
    load: StepLoad


def measured_load(
    num_sequences: int, num_tokens: int, num_decodes: int, num_decode_pairs: int, num_prefill_pairs: int
) -> StepLoad:
    """As a trace has it. Of prefills in chunks it does not say which sampled: all are taken to."""
    return StepLoad(
        num_decodes,
        num_decode_pairs,
        num_sequences - num_decodes,
        num_tokens - num_decodes,
        num_prefill_pairs,
        num_sequences,
    )


def timed(steps: Sequence[MeasuredStep]) -> list[TimedStep]:
    """What each step took, but for the first of an epoch. Steps are in order."""
    found: list[TimedStep] = []
    for before, step in pairwise(steps):
        if step.epoch == before.epoch:
            goes_on = step.load.num_decodes > 0
            started_s = before.received_s if goes_on else max(before.received_s, step.planned_s)
            found.append((step.load, step.received_s - started_s))
    return found


def turnaround_s(steps: Sequence[MeasuredStep]) -> float | None:
    """Mean pause between the result that left nobody running and the next plan: of one client, the time from the last
    token of a request to the arrival of the next. None where the server never ran dry."""
    pauses = [
        step.planned_s - before.received_s
        for before, step in pairwise(steps)
        if step.epoch == before.epoch and step.load.num_decodes == 0 and step.planned_s > before.received_s
    ]
    return sum(pauses) / len(pauses) if pauses else None


def read_steps(path: Path) -> list[MeasuredStep]:
    """Of a saved trace, in order. Raises PlanningError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        events = content["traceEvents"]
        planned = {_key(event): event for event in events if _names(event, "send")}
        received = {_key(event): event for event in events if _names(event, "in flight")}
        steps = [_step(planned[key], received[key]) for key in sorted(planned.keys() & received.keys())]
    except OSError as error:
        raise PlanningError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise PlanningError(f"{path}: not a step trace of quire bench serve --chrome-trace: {problem}") from None
    if len(steps) < 2:
        raise PlanningError(f"{path}: {len(steps)} steps are too few")
    return steps


def _names(event: Mapping[str, Any], phase: str) -> bool:
    return event.get("ph") == "X" and str(event["name"]).endswith(f" {phase}")


def _key(event: Mapping[str, Any]) -> tuple[int, int]:
    return int(event["args"]["epoch"]), int(str(event["name"]).split()[1])


def _step(planned: Mapping[str, Any], received: Mapping[str, Any]) -> MeasuredStep:
    """Chrome counts in microseconds."""
    load = measured_load(*(int(planned["args"][field]) for field in _LOAD_FIELDS))
    return MeasuredStep(
        epoch=int(planned["args"]["epoch"]),
        planned_s=planned["ts"] / 1e6,
        received_s=(received["ts"] + received["dur"]) / 1e6,
        load=load,
    )
