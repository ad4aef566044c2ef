"""Summarizes a simulation: the figures that a load generator reports, and some that only a simulator knows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planning.records import Records, Requests, Sample


@dataclass(frozen=True, slots=True)
class Distribution:
    """The mean, percentiles and maximum of some values."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class TenantSummary:
    """The requests of one tenant. Times are in virtual seconds, None if no request has one.

    queue_s    from the arrival to the plan that admits the request
    ttft_s     from the arrival to the first token
    tpot_s     time per output token after the first
    latency_s  from the arrival to the last token
    """

    name: str
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    queue_s: Distribution | None
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    latency_s: Distribution | None


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of a simulation.

    virtual_s               virtual time from the start to the last token
    wall_s                  real time of the simulation; real_time_factor is virtual_s / wall_s
    busy_ratio              share of the virtual time in which the executor computes
    mean_batch              number of sequences in a step, mean over the time that steps take
    mean_waiting            length of the queue, mean over time
    occupancy_ratio         share of the blocks that sequences hold, mean over time
    waste_ratio             share of the token slots in these blocks that no token fills, mean of the samples
    prefix_hit_ratio        share of the prompt tokens looked up that the prefix cache had
    num_leapt_steps         number of the num_steps steps that were simulated in leaps
    num_refused             requests that were too long for the server, or refused by a full queue
    """

    virtual_s: float
    wall_s: float
    real_time_factor: float
    num_requests: int
    num_refused: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    num_steps: int
    num_leapt_steps: int
    busy_ratio: float
    mean_batch: float
    max_batch: int
    mean_waiting: float
    max_waiting: int
    occupancy_ratio: float
    waste_ratio: float
    num_preemptions: int
    num_preempted_tokens: int
    prefix_hit_ratio: float
    num_blocks: int
    tenants: tuple[TenantSummary, ...]


def summarize(records: Records, names: Sequence[str], num_usable_blocks: int, wall_s: float) -> Summary:
    """Summarizes the records of a run with these tenants; several tenants are preceded by their total, "all"."""
    requests, counters, virtual_s = records.requests, records.counters, records.virtual_s
    num_output = int(np.sum(requests.num_output_tokens)) if records.num_ended else 0
    num_prompt = int(np.sum(requests.num_prompt_tokens)) if records.num_ended else 0
    queried = counters.num_prefix_queried_tokens
    return Summary(
        virtual_s=virtual_s,
        wall_s=wall_s,
        real_time_factor=ratio(virtual_s, wall_s),
        num_requests=records.num_ended,
        num_refused=records.num_refused,
        requests_per_s=ratio(records.num_ended, virtual_s),
        output_tokens_per_s=ratio(num_output, virtual_s),
        total_tokens_per_s=ratio(num_output + num_prompt, virtual_s),
        num_steps=counters.num_steps,
        num_leapt_steps=records.num_leapt_steps,
        busy_ratio=ratio(records.busy_s, virtual_s),
        mean_batch=ratio(records.sequence_steps_s, records.busy_s),
        max_batch=records.max_running,
        mean_waiting=ratio(records.waiting_s, virtual_s),
        max_waiting=records.max_waiting,
        occupancy_ratio=ratio(records.block_s, virtual_s * num_usable_blocks),
        waste_ratio=_waste_ratio(records.samples),
        num_preemptions=counters.num_preemptions,
        num_preempted_tokens=counters.num_preempted_tokens,
        prefix_hit_ratio=ratio(counters.num_prefix_hit_tokens, queried),
        num_blocks=num_usable_blocks,
        tenants=summarize_tenants(requests, names),
    )


def summarize_tenants(requests: Requests, names: Sequence[str]) -> tuple[TenantSummary, ...]:
    """Summarizes the requests of each tenant; several tenants are preceded by their total, "all"."""
    parts: list[tuple[str, int | None]] = [(name, index) for index, name in enumerate(names)]
    if len(names) > 1:
        parts.insert(0, ("all", None))
    return tuple(_of_tenant(requests, name, index) for name, index in parts)


def timeline(records: Records) -> list[dict[str, Any]]:
    """Returns the samples as plain values, for plots."""
    return [
        {
            "time_s": sample.now_s,
            "num_running": sample.num_running,
            "num_waiting": sample.num_waiting,
            "num_ended": sample.num_ended,
            "num_output_tokens": sample.num_output_tokens,
            **{name.replace("_token_slots", "_slots"): number for name, number in asdict(sample.usage).items()},
        }
        for sample in records.samples
    ]


def _of_tenant(requests: Requests, name: str, index: int | None) -> TenantSummary:
    tenant = np.asarray(requests.tenant)
    chosen = np.ones(len(tenant), dtype=bool) if index is None else tenant == index

    def column(values: Sequence[float]) -> np.ndarray:
        return np.compress(chosen, np.asarray(values))

    arrival, first, end = (column(values) for values in (requests.arrival_s, requests.first_token_s, requests.end_s))
    num_output = column(requests.num_output_tokens)
    several = num_output > 1
    return TenantSummary(
        name=name,
        num_requests=len(arrival),
        num_prompt_tokens=int(column(requests.num_prompt_tokens).sum()),
        num_output_tokens=int(num_output.sum()),
        queue_s=_distribution(column(requests.planned_s) - arrival),
        ttft_s=_distribution(first - arrival),
        tpot_s=_distribution((end - first)[several] / (num_output[several].astype(float) - 1)),
        latency_s=_distribution(end - arrival),
    )


def _distribution(values: np.ndarray) -> Distribution | None:
    if not len(values):
        return None
    p50, p90, p95, p99 = (float(value) for value in np.percentile(values, (50, 90, 95, 99)))
    return Distribution(float(values.mean()), p50, p90, p95, p99, float(values.max()))


def _waste_ratio(samples: Sequence[Sample]) -> float:
    held = [sample.usage for sample in samples if sample.usage.num_active_blocks]
    return sum(usage.waste_ratio for usage in held) / len(held) if held else 0.0


def ratio(number: float, whole: float) -> float:
    """Returns a quotient; 0 if the divisor is 0."""
    return number / whole if whole else 0.0
