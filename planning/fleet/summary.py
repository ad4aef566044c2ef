"""Summarizes the simulation of a fleet."""

from collections.abc import Sequence
from dataclasses import dataclass

from planning.fleet.records import FleetRecords
from planning.summary import TenantSummary, ratio, summarize_tenants


@dataclass(frozen=True, slots=True)
class FleetSummary:
    """The summary of a simulated fleet. All figures are simulated.

    virtual_s           virtual time from the start to the last token
    wall_s              real time of the simulation; real_time_factor is virtual_s / wall_s
    prefix_hit_ratio    share of the prompt tokens looked up that prefix caches had, at the first start of requests
    request_imbalance   requests of the replica with the most, divided by their mean
    busy_imbalance      the same of the time in which the executor computes
    busy_ratio          share of the virtual time in which executors compute, mean of the replicas
    num_resumptions     streams that continued at another replica, because theirs had died
    num_gaps            gaps in the events of a replica that a router noticed; a snapshot followed
    """

    virtual_s: float
    wall_s: float
    real_time_factor: float
    num_replicas: int
    num_requests: int
    num_refused: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    prefix_hit_ratio: float
    request_imbalance: float
    busy_imbalance: float
    busy_ratio: float
    max_waiting: int
    num_steps: int
    num_preemptions: int
    num_deaths: int
    num_resumptions: int
    num_lost_reports: int
    num_gaps: int
    tenants: tuple[TenantSummary, ...]


def summarize_fleet(records: FleetRecords, names: Sequence[str], wall_s: float) -> FleetSummary:
    """Summarizes the records of a run with these tenants; several tenants are preceded by their total, "all"."""
    requests, virtual_s = records.requests, records.virtual_s
    num_output, num_prompt = sum(requests.num_output_tokens), sum(requests.num_prompt_tokens)
    num_replicas = len(records.replica_requests)
    return FleetSummary(
        virtual_s=virtual_s,
        wall_s=wall_s,
        real_time_factor=ratio(virtual_s, wall_s),
        num_replicas=num_replicas,
        num_requests=records.num_ended,
        num_refused=records.num_refused,
        requests_per_s=ratio(records.num_ended, virtual_s),
        output_tokens_per_s=ratio(num_output, virtual_s),
        total_tokens_per_s=ratio(num_output + num_prompt, virtual_s),
        prefix_hit_ratio=ratio(records.num_hit_tokens, records.num_queried_tokens),
        request_imbalance=ratio(max(records.replica_requests) * num_replicas, sum(records.replica_requests)),
        busy_imbalance=ratio(max(records.replica_busy_s) * num_replicas, sum(records.replica_busy_s)),
        busy_ratio=ratio(sum(records.replica_busy_s), virtual_s * num_replicas),
        max_waiting=records.max_waiting,
        num_steps=records.num_steps,
        num_preemptions=records.num_preemptions,
        num_deaths=records.num_deaths,
        num_resumptions=records.num_resumptions,
        num_lost_reports=records.num_lost,
        num_gaps=records.num_gaps,
        tenants=summarize_tenants(requests, names),
    )
