"""The core on a virtual clock: by hand, against a hand-driven core, and against what queueing theory says."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import inf
from random import Random

import pytest

from planning.arrivals import Bursts, ClosedLoop, Diurnal, Poisson
from planning.cost import CostModel
from planning.fit import FittedCost
from planning.lengths import SHAREGPT, FixedLengths, Lengths
from planning.records import Records
from planning.server import Server
from planning.simulation import Horizon, JobSource, Simulation
from planning.summary import Summary, summarize, timeline
from planning.workload import Job, ListedJobs, Source, Tenant
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

COST = FittedCost(
    overhead_s=5e-3,
    decode_s=1e-5,
    decode_pair_s=4e-8,
    prefill_s=1e-4,
    prefill_token_s=2e-5,
    prefill_pair_s=1e-10,
)
SERVER = Server(SchedulerLimits(64, 2048, 4096), num_blocks=4000)
SMALL = Lengths("short", 40.0, 30.0, 0.7, 200)


@dataclass(frozen=True, slots=True)
class Steady:
    """Every step takes as long."""

    duration_s: float

    def step_s(self, load: StepLoad) -> float:
        return self.duration_s


def run(
    jobs: Sequence[Job],
    cost: CostModel = COST,
    server: Server = SERVER,
    clients: ClosedLoop | None = None,
    **options: bool,
) -> Records:
    source: JobSource = ListedJobs(jobs, clients)
    return Simulation(server, [source], cost, Horizon(num_requests=len(jobs)), **options).run()


def draw(
    tenants: Sequence[Tenant], horizon: Horizon, server: Server = SERVER, seed: int = 3, **options: bool
) -> Records:
    max_model_len = server.limits.max_model_len
    sources = [Source(i, tenant, max_model_len, seed) for i, tenant in enumerate(tenants)]
    shares = any(tenant.num_system_tokens for tenant in tenants)
    return Simulation(server, sources, COST, horizon, has_shared_prefixes=shares, **options).run()


def summary(records: Records, server: Server = SERVER, names: Sequence[str] = ("requests",)) -> Summary:
    return summarize(records, names, server.num_blocks - 1, wall_s=1.0)


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_one_client_waits_for_the_sum_of_its_steps() -> None:
    """A prompt of 10 and 4 tokens: one prefill, and decodes whose contexts are 11, 12 and 13."""
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


def test_who_comes_while_a_plan_is_held_back_is_in_it() -> None:
    """Steps of a second each. Request 1 is planned at 0 (prefill, done at 1), its decode is held back until 0.75;
    request 2 comes at 0.5, is planned with it, and its first step is done at 2."""
    records = run([Job(0.0, 0, 4, 10), Job(0.5, 0, 4, 10)], Steady(1.0))
    assert list(records.requests.planned_s) == [0.0, 0.5]
    assert list(records.requests.first_token_s) == [1.0, 2.0]
    assert list(records.requests.end_s) == [10.0, 11.0]


def test_who_comes_while_two_plans_are_out_is_in_the_third() -> None:
    """Request 1's decode was planned at 0.75, and is done at 2; request 2 comes at 0.8, is planned with the result at
    1, and its step is done at 3."""
    records = run([Job(0.0, 0, 4, 10), Job(0.8, 0, 4, 10)], Steady(1.0))
    assert list(records.requests.planned_s) == [0.0, 1.0]
    assert list(records.requests.first_token_s) == [1.0, 3.0]
    assert list(records.requests.end_s) == [10.0, 12.0]


def test_in_short_steps_no_plan_is_held_back() -> None:
    """Steps of a hundredth of a second: request 1's decode is planned at 0, and request 2 is in the third."""
    records = run([Job(0.0, 0, 4, 10), Job(0.005, 0, 4, 10)], Steady(0.01))
    assert list(records.requests.planned_s) == [0.0, 0.01]


def test_with_one_plan_out_a_request_is_in_the_next_step() -> None:
    server = replace(SERVER, limits=replace(SERVER.limits, max_in_flight=1))
    records = run([Job(0.0, 0, 4, 10), Job(0.5, 0, 4, 10)], Steady(1.0), server)
    assert list(records.requests.first_token_s) == [1.0, 2.0]


def test_steps_that_are_taken_together_take_as_long() -> None:
    """100 decodes of one sequence, in one leap: an arithmetic series."""
    records = run([Job(0.0, 0, 100, 100)])
    steps_s = [5e-3 + 1e-4 + 100 * 2e-5 + 5050 * 1e-10] + [5e-3 + 1e-5 + n * 4e-8 for n in range(101, 200)]
    assert records.virtual_s == pytest.approx(sum(steps_s))
    assert records.counters.num_steps == 100
    assert records.num_leapt_steps > 80
    assert records.num_leaps < 4


def test_what_cannot_be_served_is_refused_and_the_client_goes_on() -> None:
    records = run([Job(0.0, 0, 4000, 200), Job(0.0, 0, 10, 2)], clients=ClosedLoop(1))
    assert (records.num_too_long, records.num_ended) == (1, 1)


# --- the same decisions as a core that is driven by hand --------------------------------------------------------------


def by_hand(jobs: Sequence[Job], server: Server, duration_s: float) -> tuple[list[tuple[int, float, float]], Scheduler]:
    """Request, time of the first token, time of the end: a plain loop over a clock, one step at a time."""
    core = server.scheduler(has_shared_prefixes=False)
    now_s, free_s, todo = 0.0, 0.0, list(enumerate(jobs, start=1))
    seen = Arrivals()
    out: list[tuple[float, int, int]] = []
    first: dict[int, float] = {}
    ended: list[tuple[int, float, float]] = []
    while todo or out or core.num_unfinished_requests:
        next_s = min(todo[0][1].arrival_s if todo else inf, out[0][0] if out else inf)
        while len(out) < 2:
            is_held = out and could_join(core) and seen.are_likely(now_s, duration_s - lead_s(duration_s))
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
def test_ten_requests_are_decided_as_by_a_core_that_is_driven_by_hand(policy, num_blocks) -> None:  # type: ignore[no-untyped-def]
    random = Random(11)
    jobs = [Job(0.7 * i, 0, random.randint(1, 40), random.randint(1, 60), 0, random.randint(0, 1)) for i in range(10)]
    limits = SchedulerLimits(4, 24, 128)
    server = Server(limits, num_blocks=num_blocks, block_size=8, policy=policy)
    ended, core = by_hand(jobs, server, 0.125)
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


@pytest.mark.parametrize("num_blocks", [4000, 300, 90])
@pytest.mark.parametrize("arrivals", [Poisson(8.0), ClosedLoop(40, 0.1), Bursts(10.0, 6.0)])
@pytest.mark.parametrize("num_system_tokens", [0, 70])
def test_leaps_change_nothing(arrivals: Poisson | ClosedLoop | Bursts, num_blocks: int, num_system_tokens: int) -> None:
    """Also under memory pressure, and with prefixes: times, counters and integrals are those of single steps."""
    server = Server(SchedulerLimits(16, 512, 2048), num_blocks=num_blocks)
    tenant = Tenant("requests", arrivals, SMALL, num_system_tokens=num_system_tokens, system_share=0.7)
    leaping, stepping = (draw([tenant], Horizon(num_requests=80), server, leaps=leaps) for leaps in (True, False))
    assert leaping.num_leapt_steps > 0
    assert stepping.num_leapt_steps == 0
    assert asdict(leaping.counters) == asdict(stepping.counters)
    for field in ("arrival_s", "planned_s", "first_token_s", "end_s"):
        assert list(getattr(leaping.requests, field)) == pytest.approx(list(getattr(stepping.requests, field)))
    for field in ("busy_s", "sequence_steps_s", "waiting_s", "virtual_s"):
        assert getattr(leaping, field) == pytest.approx(getattr(stepping, field))


# --- what must hold of every run --------------------------------------------------------------------------------------


def test_one_seed_is_one_run_and_another_seed_another() -> None:
    tenants = [Tenant("requests", Poisson(6.0), SHAREGPT)]
    first, again, other = (draw(tenants, Horizon(num_requests=60), seed=seed) for seed in (5, 5, 6))
    assert summary(first) == summary(again)
    assert timeline(first) == timeline(again)
    assert summary(first) != summary(other)


@pytest.mark.parametrize("num_blocks", [4000, 150])
def test_tokens_out_are_tokens_asked_for(num_blocks: int) -> None:
    random = Random(4)
    jobs = [Job(0.02 * i, 0, random.randint(1, 300), random.randint(1, 200)) for i in range(100)]
    records = run(jobs, server=Server(SchedulerLimits(16, 256, 1024), num_blocks=num_blocks))
    requests = records.requests
    asked = sorted((job.arrival_s, job.num_prompt_tokens, job.num_output_tokens) for job in jobs)
    found = zip(requests.arrival_s, requests.num_prompt_tokens, requests.num_output_tokens, strict=True)
    assert sorted(found) == asked
    assert records.counters.num_generated_tokens == sum(job.num_output_tokens for job in jobs)
    assert (records.counters.num_preemptions > 0) == (num_blocks == 150)


def test_the_prefix_cache_decides_nothing_where_nobody_shares() -> None:
    """Why it can be left out then."""
    tenants = [Tenant("requests", Poisson(8.0), SMALL)]
    without, cached = (
        draw(tenants, Horizon(num_requests=60), replace(SERVER, enable_prefix_caching=caches, num_blocks=200))
        for caches in (False, True)
    )
    assert list(without.requests.end_s) == list(cached.requests.end_s)
    assert cached.counters.num_prefix_hit_tokens == 0


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


def test_tenants_have_their_own_lines_and_priorities() -> None:
    batch = Tenant("batch", ClosedLoop(30), FixedLengths(100, 100), priority=1)
    chat = Tenant("chat", Poisson(2.0), FixedLengths(20, 20), priority=0)
    names = [batch.name, chat.name]
    waits = {}
    for policy in (FCFS, PRIORITY):
        server = Server(SchedulerLimits(8, 512, 1024), num_blocks=500, policy=policy)
        result = summary(draw([batch, chat], Horizon(duration_s=60.0), server), server, names)
        whole, of_batch, of_chat = result.tenants
        assert whole.num_requests == of_batch.num_requests + of_chat.num_requests
        assert (whole.name, of_chat.name) == ("all", "chat")
        assert of_chat.queue_s is not None
        waits[policy.name] = of_chat.queue_s.mean
    assert waits["priority"] < waits["fcfs"] / 3


def test_a_dynamic_batch_is_formed_in_time() -> None:
    """50 ms after the first of its requests came, though nothing else happens then."""
    server = replace(SERVER, batching=BATCHING["dynamic"])
    records = run([Job(1.0, 0, 10, 5), Job(1.02, 0, 10, 5), Job(1.06, 0, 10, 5)], Steady(0.01), server)
    assert list(records.requests.planned_s) == pytest.approx([1.05, 1.05, 1.11])


def test_modes_serve_the_same_and_cost_what_they_cost() -> None:
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


# --- what theory says -------------------------------------------------------------------------------------------------


def test_littles_law() -> None:
    """Mean number in the queue and in service = rate x mean time there, over a long Poisson run. The times are of
    single requests, the numbers are integrals over the clock: they are kept apart."""
    server = Server(SchedulerLimits(6, 512, 2048, max_in_flight=1), num_blocks=1000)
    records = draw([Tenant("requests", Poisson(30.0), SMALL)], Horizon(num_requests=2000), server)
    result = summary(records, server)
    requests = records.requests
    queue_s = sum(p - a for p, a in zip(requests.planned_s, requests.arrival_s, strict=True)) / records.num_ended
    run_s = sum(e - p for e, p in zip(requests.end_s, requests.planned_s, strict=True)) / records.num_ended
    assert result.mean_waiting > 1
    assert result.mean_waiting == pytest.approx(result.requests_per_s * queue_s, rel=0.02)
    # one plan at a time: what is planned begins at once, and from then on a sequence is in every step
    assert result.mean_batch * result.busy_ratio == pytest.approx(result.requests_per_s * run_s, rel=0.02)


def test_a_server_of_one_is_the_m_d_1_queue() -> None:
    """One slot, one plan at a time, requests of one length: a queue with Poisson arrivals and a constant service time
    S, whose mean wait is rho S / 2 (1 - rho) (Pollaczek and Khinchine)."""
    server = Server(SchedulerLimits(1, 64, 64, max_in_flight=1), num_blocks=20)
    service_s, load = 10 * 0.01, 0.7
    tenant = Tenant("requests", Poisson(load / service_s), FixedLengths(5, 10))
    source = Source(0, tenant, 64, seed=2)
    records = Simulation(server, [source], Steady(0.01), Horizon(num_requests=8_000)).run()
    requests = records.requests
    wait_s = sum(p - a for p, a in zip(requests.planned_s, requests.arrival_s, strict=True)) / records.num_ended
    assert wait_s == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.1)
    assert summary(records, server).busy_ratio == pytest.approx(load, rel=0.03)


# --- arrivals ---------------------------------------------------------------------------------------------------------


def gaps(arrivals: Poisson | Bursts | Diurnal, number: int) -> list[float]:
    times = arrivals.times_s(Random(9))
    found = [next(times) for _ in range(number + 1)]
    return [later - earlier for earlier, later in pairwise(found)]


@pytest.mark.parametrize(
    ("arrivals", "variation"), [(Poisson(5.0), 1.0), (Bursts(5.0, 4.0), 4.0), (Bursts(5.0, 0.1), 0.1)]
)
def test_gaps_have_the_mean_and_the_variation_that_were_asked_for(arrivals: Poisson | Bursts, variation: float) -> None:
    found = gaps(arrivals, 40_000)
    mean = sum(found) / len(found)
    assert mean == pytest.approx(0.2, rel=0.03)
    assert sum((gap - mean) ** 2 for gap in found) / len(found) / mean**2 == pytest.approx(variation, rel=0.08)


def test_a_day_is_quiet_at_its_ends_and_busy_at_noon() -> None:
    times = Diurnal(0.5, 0.8).times_s(Random(1))
    by_hour = [0] * 24
    while (now_s := next(times)) < 86_400:
        by_hour[int(now_s // 3600)] += 1
    assert sum(by_hour) == pytest.approx(0.5 * 86_400, rel=0.03)
    assert by_hour[12] == pytest.approx(0.5 * 1.8 * 3600, rel=0.1)
    assert by_hour[0] == pytest.approx(0.5 * 0.2 * 3600, rel=0.2)
