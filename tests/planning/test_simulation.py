"""The core on a virtual clock, compared with figures by hand and with a core in a plain loop."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from random import Random

import pytest

from planning.arrivals import ClosedLoop, Poisson
from planning.cost import CostModel, step_costs
from planning.lengths import SHAREGPT, FixedLengths
from planning.server import Server
from planning.simulation import Horizon
from planning.summary import timeline
from planning.workload import Job, Tenant
from scheduler.core import (
    BATCHING,
    FCFS,
    KV_ALLOCATIONS,
    PRIORITY,
    Request,
    Scheduler,
    SchedulerLimits,
    SequenceParams,
    StepResult,
)
from scheduler.core.inspect.step_load import StepLoad
from scheduler.engine.plan_timing import Arrivals, could_join, lead_s
from tests.support.planning.simulations import COST, SERVER, SMALL, Steady, draw, run, summary

# --- by hand ----------------------------------------------------------------------------------------------------------


def test_a_request_takes_the_sum_of_its_steps() -> None:
    """A prompt of 10 and an output of 4 tokens take one prefill and decodes with contexts of 11, 12 and 13."""
    records = run([Job(0.0, 0, 10, 4)] * 3, clients=ClosedLoop(1, turnaround_s=0.25))
    prefill_s = 5e-3 + 1e-4 + 10 * 2e-5 + 55 * 1e-10
    decodes_s = [5e-3 + 1e-5 + context * 4e-8 for context in (11, 12, 13)]
    request_s = prefill_s + sum(decodes_s)
    assert list(records.requests.first_token_s) == pytest.approx([n * (request_s + 0.25) + prefill_s for n in range(3)])
    assert list(records.requests.end_s) == pytest.approx([n * (request_s + 0.25) + request_s for n in range(3)])
    assert records.virtual_s == pytest.approx(3 * request_s + 2 * 0.25)
    assert records.busy_s == pytest.approx(3 * request_s)
    times = summary(records).tenants[0]
    assert times.tpot_s is not None
    assert times.tpot_s.mean == pytest.approx(sum(decodes_s) / 3)
    assert (times.num_prompt_tokens, times.num_output_tokens) == (30, 12)


def test_a_request_that_arrives_while_a_plan_is_delayed_joins_it() -> None:
    """All steps take a second.

    Request 1 is planned at 0 (its prefill is done at 1), and its decode is delayed until 0.75. Request 2 arrives at 0.5
    and is planned with that decode; its first step is done at 2.
    """
    records = run([Job(0.0, 0, 4, 10), Job(0.5, 0, 4, 10)], Steady(1.0))
    assert list(records.requests.planned_s) == [0.0, 0.5]
    assert list(records.requests.first_token_s) == [1.0, 2.0]
    assert list(records.requests.end_s) == [10.0, 11.0]


def test_a_request_that_arrives_with_two_plans_in_flight_joins_the_third() -> None:
    """Request 1's decode is planned at 0.75 and done at 2.

    Request 2 arrives at 0.8, is planned at 1 when the next result comes, and its step is done at 3.
    """
    records = run([Job(0.0, 0, 4, 10), Job(0.8, 0, 4, 10)], Steady(1.0))
    assert list(records.requests.planned_s) == [0.0, 1.0]
    assert list(records.requests.first_token_s) == [1.0, 3.0]
    assert list(records.requests.end_s) == [10.0, 12.0]


def test_plans_of_short_steps_are_not_delayed() -> None:
    """With steps of 10 ms, request 1's decode is planned at 0, and request 2 joins the third step."""
    records = run([Job(0.0, 0, 4, 10), Job(0.005, 0, 4, 10)], Steady(0.01))
    assert list(records.requests.planned_s) == [0.0, 0.01]


def test_with_max_in_flight_1_a_request_joins_the_next_step() -> None:
    server = replace(SERVER, limits=replace(SERVER.limits, max_in_flight=1))
    records = run([Job(0.0, 0, 4, 10), Job(0.5, 0, 4, 10)], Steady(1.0), server)
    assert list(records.requests.first_token_s) == [1.0, 2.0]


def test_a_client_continues_after_a_refused_request() -> None:
    records = run([Job(0.0, 0, 4000, 200), Job(0.0, 0, 10, 2)], clients=ClosedLoop(1))
    assert (records.num_refused, records.num_ended) == (1, 1)


# --- the same decisions as a core in a plain loop ---------------------------------------------------------------------


def run_plain_loop(
    jobs: Sequence[Job], server: Server, duration_s: float
) -> tuple[list[tuple[int, float, float]], Scheduler]:
    """Runs the jobs in a plain loop over a clock, one step at a time.

    Returns (request, time of the first token, time of the end) of each request, and the core.
    """
    core = server.scheduler(has_shared_prefixes=False)
    now_s, free_s, todo = 0.0, 0.0, list(enumerate(jobs, start=1))
    seen = Arrivals()
    out: list[tuple[float, int, int]] = []
    first: dict[int, float] = {}
    ended: list[tuple[int, float, float]] = []
    while todo or out or core.num_unfinished_requests:
        next_s = min(todo[0][1].arrival_s if todo else inf, out[0][0] if out else inf)
        while len(out) < 2:
            is_held = out and could_join(core) and seen.are_likely(now_s, duration_s - lead_s(duration_s), duration_s)
            held_s = free_s - lead_s(duration_s) if is_held else now_s
            if held_s > next_s:
                break
            now_s = max(now_s, held_s)
            if (plan := core.schedule()) is None:
                break
            free_s = max(now_s, free_s) + duration_s
            out.append((free_s, plan.step_id, len(core.state.in_flight[-1].sampled)))
            next_s = min(next_s, free_s)
        if todo and (not out or todo[0][1].arrival_s < out[0][0]):
            request_id, job = todo.pop(0)
            now_s = job.arrival_s
            seen.add(now_s)
            prompt = [1000 + request_id] * job.num_prompt_tokens
            total = job.num_prompt_tokens + job.num_output_tokens
            core.add(Request(request_id, prompt, SequenceParams(max_total_tokens=total), priority=job.priority))
            continue
        now_s, step_id, num_sampled = out.pop(0)
        events = core.commit(StepResult(1, step_id, [7] * num_sampled))
        for sequence in events.sequences:
            first.setdefault(sequence.request.request_id, now_s)
        ended += [(s.request.request_id, first[s.request.request_id], now_s) for s, _ in events.finished]
    return ended, core


@pytest.mark.parametrize("policy", [FCFS, PRIORITY])
@pytest.mark.parametrize("num_blocks", [1000, 14])
def test_decisions_equal_those_of_a_core_in_a_plain_loop(policy, num_blocks) -> None:  # type: ignore[no-untyped-def]
    random = Random(11)
    jobs = [Job(0.7 * i, 0, random.randint(1, 40), random.randint(1, 60), 0, random.randint(0, 1)) for i in range(10)]
    limits = SchedulerLimits(4, 24, 128)
    server = Server(limits, num_blocks=num_blocks, block_size=8, policy=policy)
    ended, core = run_plain_loop(jobs, server, 0.125)
    records = run(jobs, Steady(0.125), server)
    order = {job.arrival_s: i for i, job in enumerate(jobs, start=1)}
    requests = records.requests
    simulated = [
        (order[arrival_s], first_s, end_s)
        for arrival_s, first_s, end_s in zip(requests.arrival_s, requests.first_token_s, requests.end_s, strict=True)
    ]
    assert simulated == [(request_id, pytest.approx(first), pytest.approx(end)) for request_id, first, end in ended]
    assert asdict(records.counters) == asdict(core.state.counters)
    assert (records.counters.num_preemptions > 0) == (num_blocks == 14)


# --- properties of every run ------------------------------------------------------------------------------------------


def test_a_seed_determines_a_run() -> None:
    tenants = [Tenant("requests", Poisson(6.0), SHAREGPT)]
    first, again, other = (draw(tenants, Horizon(num_requests=60), seed=seed) for seed in (5, 5, 6))
    assert summary(first) == summary(again)
    assert timeline(first) == timeline(again)
    assert summary(first) != summary(other)


@pytest.mark.parametrize("num_blocks", [4000, 150])
def test_every_request_gets_its_number_of_tokens(num_blocks: int) -> None:
    random = Random(4)
    jobs = [Job(0.02 * i, 0, random.randint(1, 300), random.randint(1, 200)) for i in range(100)]
    records = run(jobs, server=Server(SchedulerLimits(16, 256, 1024), num_blocks=num_blocks))
    requests = records.requests
    asked = sorted((job.arrival_s, job.num_prompt_tokens, job.num_output_tokens) for job in jobs)
    found = zip(requests.arrival_s, requests.num_prompt_tokens, requests.num_output_tokens, strict=True)
    assert sorted(found) == asked
    assert records.counters.num_generated_tokens == sum(job.num_output_tokens for job in jobs)
    assert (records.counters.num_preemptions > 0) == (num_blocks == 150)


@pytest.mark.parametrize("num_blocks", [200, 30])
def test_without_shared_prefixes_the_cache_matters_only_to_preempted_sequences(num_blocks: int) -> None:
    """The simulation leaves the cache out if no prompts are shared, which changes nothing unless it preempts."""
    server = replace(SERVER, num_blocks=num_blocks)
    tenants = [Tenant("requests", Poisson(12.0), SMALL)]
    without, cached = (
        draw(tenants, Horizon(num_requests=100), replace(server, enable_prefix_caching=caches))
        for caches in (False, True)
    )
    has_preemptions = num_blocks == 30
    assert (without.counters.num_preemptions > 0) == (cached.counters.num_preemptions > 0) == has_preemptions
    assert (list(without.requests.end_s) != list(cached.requests.end_s)) == has_preemptions
    assert cached.counters.num_prefix_hit_tokens == 0  # counts what sequences find when they start for the first time


def test_a_system_prompt_is_computed_once() -> None:
    alone, shared = (
        draw(
            [Tenant("requests", Poisson(4.0), FixedLengths(20, 10), num_system_tokens=320)],
            Horizon(num_requests=50),
            server,
        )
        for server in (replace(SERVER, enable_prefix_caching=False), SERVER)
    )
    assert alone.counters.num_prefix_hit_tokens == 0
    assert shared.counters.num_prefix_hit_tokens == 49 * 320  # 20 blocks of 16, for all but the first
    assert sum(shared.requests.num_cached_tokens) == 49 * 320
    assert sum(shared.requests.num_prompt_tokens) == 50 * 340
    times, cached_times = summary(alone).tenants[0].ttft_s, summary(shared).tenants[0].ttft_s
    assert times is not None
    assert cached_times is not None
    assert cached_times.mean < times.mean


def test_a_dynamic_batch_starts_when_its_timeout_ends() -> None:
    """The batch starts 50 ms after its first request arrived, although no other event occurs at that time."""
    server = replace(SERVER, batching=BATCHING["dynamic"])
    records = run([Job(1.0, 0, 10, 5), Job(1.02, 0, 10, 5), Job(1.06, 0, 10, 5)], Steady(0.01), server)
    assert list(records.requests.planned_s) == pytest.approx([1.05, 1.05, 1.11])


def test_baseline_modes_give_the_same_output_and_are_slower() -> None:
    tenants = [Tenant("requests", ClosedLoop(16), SMALL)]
    found = {}
    for batching, memory in (("continuous", "paged"), ("static", "paged"), ("continuous", "contiguous")):
        server = Server(SchedulerLimits(16, 512, 512), 200, batching=BATCHING[batching], memory=KV_ALLOCATIONS[memory])
        records = draw(tenants, Horizon(num_requests=120), server)
        found[batching, memory] = summary(records, server)
    continuous, static, contiguous = found.values()
    outputs = {result.tenants[0].num_output_tokens for result in found.values()}
    assert len(outputs) == 1
    assert static.output_tokens_per_s < 0.8 * continuous.output_tokens_per_s
    assert contiguous.max_batch == 199 // (512 // 16) == 6
    assert contiguous.waste_ratio > 0.5 > 0.2 > continuous.waste_ratio


# --- the target of a step ---------------------------------------------------------------------------------------------


@dataclass
class Recorded:
    """A cost model that keeps the loads of all steps with decodes and long prompts."""

    cost: CostModel
    full_s: list[float] = field(default_factory=list)

    def step_s(self, load: StepLoad) -> float:
        step_s = self.cost.step_s(load)
        if load.num_decodes and load.num_prefill_tokens > 100:
            self.full_s.append(step_s)
        return step_s


@pytest.mark.parametrize("target_s", [0.02, 0.04, inf])
def test_steps_with_decodes_keep_to_the_target(target_s: float) -> None:
    limits = replace(SERVER.limits, target_inter_token_latency_s=target_s)
    cost = Recorded(COST)
    jobs = [Job(0.0, 0, 100, 200)] + [Job(0.1 * i, 0, 3000, 4) for i in range(1, 5)]
    run(jobs, cost, replace(SERVER, limits=limits))
    assert cost.full_s
    longest_s = 5e-3 + 1e-4 * 2 + 2048 * 2e-5
    if target_s == inf:
        assert max(cost.full_s) > longest_s * 0.95
    else:
        assert target_s * 0.95 < max(cost.full_s) < target_s * 1.05


def test_costs_for_the_core_are_those_of_the_model() -> None:
    costs = step_costs(COST)
    assert (costs.step_s, costs.decode_s, costs.decode_pair_s) == pytest.approx((5e-3, 1e-5, 4e-8))
    assert costs.token_s == pytest.approx(2e-5, rel=0.01)
    assert costs.pair_s == pytest.approx(1e-10, rel=0.01)
