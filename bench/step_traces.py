"""The steps of a run as a Chrome trace, and the share of time in which the executor was idle.

The trace opens in chrome://tracing and in Perfetto.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from quire.async_client import AsyncClient
from quire.block_map import StepTrace

_SCHEDULER, _EXECUTOR = 1, 2
_PROCESSES = {_SCHEDULER: "scheduler", _EXECUTOR: "executor"}


class StepRecorder:
    """Records the steps that were planned in its async context; `steps` has the last few thousand of them."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._after_ns = 0
        self.steps: tuple[StepTrace, ...] = ()

    async def __aenter__(self) -> Self:
        before = await self._client.step_trace()
        self._after_ns = before[-1].planned_ns if before else 0
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.steps = await self._client.step_trace(self._after_ns)


def idle_ratio(steps: Sequence[StepTrace]) -> float | None:
    """Returns the share of time without a plan on the device, from the start of the first step to the end of the last.

    The wait before the first step does not count, because no request had arrived. None: fewer than two steps.
    """
    if len(steps) < 2:
        return None
    idle_ns = sum(step.idle_ns for step in steps[1:])
    return idle_ns / (idle_ns + sum(step.busy_ns for step in steps))


def chrome_trace(steps: Sequence[StepTrace]) -> dict[str, object]:
    """Returns complete events ("X") of the scheduler and of the executor.

    The executor sends durations, not times. Its spans are placed so that they end when the result arrived. A step that
    was prepared during another step has its preparation in a lane of its own.
    """
    events: list[dict[str, object]] = [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}} for pid, name in _PROCESSES.items()
    ]
    for step in steps:
        name = f"step {step.step_id}"
        details = {
            "epoch": step.epoch,
            "sequences": step.num_sequences,
            "tokens": step.num_tokens,
            "decodes": step.num_decodes,
            "decode_pairs": step.num_decode_pairs,
            "prefill_pairs": step.num_prefill_pairs,
        }
        lane = step.step_id % 2  # two plans in flight overlap
        events += [
            _span(f"{name} send", _SCHEDULER, lane, step.planned_ns, step.sent_ns, details),
            _span(f"{name} in flight", _SCHEDULER, lane, step.sent_ns, step.received_ns, details),
            _span(f"{name} commit", _SCHEDULER, lane, step.received_ns, step.committed_ns, details),
        ]
        sample_ns = step.received_ns - step.sample_ns
        forward_ns = sample_ns - step.forward_ns
        prepare_lane = int(step.prepare_overlaps)
        events += [
            _span(f"{name} prepare", _EXECUTOR, prepare_lane, forward_ns - step.prepare_ns, forward_ns, details),
            _span(f"{name} forward", _EXECUTOR, 0, forward_ns, sample_ns, details),
            _span(f"{name} sample", _EXECUTOR, 0, sample_ns, step.received_ns, details),
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_chrome_trace(path: Path, steps: Sequence[StepTrace]) -> None:
    """Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chrome_trace(steps)), encoding="utf-8")


def _span(name: str, pid: int, lane: int, start_ns: int, end_ns: int, details: dict[str, int]) -> dict[str, object]:
    """Returns a complete event. Chrome's times are in microseconds."""
    return {
        "name": name,
        "ph": "X",
        "pid": pid,
        "tid": lane,
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "args": details,
    }
