"""Checks that a leap equals as many steps: of two copies of a scheduler one leaps, and the other steps."""

from collections import Counter
from copy import deepcopy
from dataclasses import asdict
from math import inf
from random import Random

from scheduler.core import (
    BATCHING,
    KV_ALLOCATIONS,
    BeamParams,
    FinishReason,
    Logprobs,
    QuireError,
    Request,
    Scheduler,
    SchedulerLimits,
    SequenceParams,
    StepResult,
    check_invariants,
    leap,
)
from scheduler.core.baselines.batching import batch_members
from scheduler.core.inspect.views import unfinished_sequences
from scheduler.core.policy import POLICIES
from tests.support.core.letter_tokens import make_request
from tests.support.core.simulation import draw_costs
from tests.support.core.snapshot import take_snapshot

TOKEN = 1


def commit(scheduler: Scheduler) -> None:
    """Commits the oldest plan with the same token for every sequence."""
    step = scheduler.state.in_flight[0]
    for beam in step.beams:  # beams are not simulated here, so their requests are cancelled
        scheduler.cancel(beam.request.request_id)
    num_candidates = sum(beam.params.num_candidates for beam in step.beams)
    candidates = Logprobs([1] * num_candidates, [-1.0] * num_candidates) if step.beams else None
    ends = [s.num_tokens + 1 >= s.params.max_total_tokens for s in step.sampled]
    reasons = [FinishReason.LENGTH if end else None for end in ends] if any(ends) else None
    scheduler.commit(
        StepResult(scheduler.state.epoch, step.step_id, [TOKEN] * len(ends), reasons, candidates=candidates)
    )


def step(scheduler: Scheduler) -> bool:
    """Makes another plan and commits the oldest one; returns False if there is no plan."""
    is_planned = scheduler.schedule() is not None
    if is_planned:
        commit(scheduler)
    return is_planned


def picture(scheduler: Scheduler) -> tuple[object, ...]:
    """Returns the whole state, with block ids, the order of the free queue, and the steps in flight."""
    snapshot = take_snapshot(scheduler)
    sequences = [
        (s.request.request_id, s.index, s.token_ids, s.row_count, s.write_limit, s.publish_at, s.num_reserved_blocks)
        for s in unfinished_sequences(scheduler.state)
    ]
    flights = [
        (step.step_id, [(s.request.request_id, s.index) for s in step.sampled], step.releases, len(step.ending))
        for step in scheduler.state.in_flight
    ]
    waiting = [(s.request.request_id, s.index) for s in snapshot.waiting]
    counters = asdict(scheduler.state.counters)
    return (
        snapshot.block_map,
        snapshot.free_blocks,
        snapshot.progress,
        snapshot.num_reserved_blocks,
        waiting,
        sequences,
        flights,
        batch_members(scheduler.state),
        sorted(scheduler.state.cache.index.items()),
        (counters, scheduler.state.step_id, scheduler.state.batch.num_free_slots, scheduler.state.batch.retired_slots),
        [s.slot for s in scheduler.state.batch.joined],
    )


def draw_scheduler(random: Random) -> Scheduler:
    max_num_seqs = random.randint(1, 6)
    limits = SchedulerLimits(
        max_num_seqs,
        max_num_batched_tokens=max_num_seqs + random.randint(0, 20),
        max_model_len=random.choice((30, 60)),
        max_in_flight=random.choice((1, 2, 2, 3)),
        max_preemptions=random.randint(0, 2),
        watermark_ratio=random.choice((0.0, 0.1)),
        target_inter_token_latency_s=random.choice((inf, 1.0)),
        min_prompt_tokens=2,
    )
    scheduler = Scheduler(
        limits,
        num_blocks=random.randint(10, 50),
        block_size=random.randint(1, 5),
        policy=random.choice(list(POLICIES.values())),
        batching=random.choice(list(BATCHING.values())),
        kv_allocation=random.choice(list(KV_ALLOCATIONS.values())),
        enable_prefix_caching=random.random() < 0.7,
    )
    scheduler.set_costs(draw_costs(random))
    scheduler.executor_attached(1, scheduler.state.cache.pool.num_blocks)
    return scheduler


def draw_request(random: Random, request_id: int) -> Request:
    """Returns a request, often of tokens that a leap samples, so that prompts match the output of others."""
    prompt = [random.choice((TOKEN, TOKEN, TOKEN, 2)) for _ in range(random.randint(1, 12))]
    is_beam = random.random() < 0.05
    return Request(
        request_id,
        prompt,
        SequenceParams(max_total_tokens=len(prompt) + random.randint(1, 25)),
        seeds=(0,) if is_beam else tuple(range(random.choice((1, 1, 1, 2)))),
        beam=BeamParams(2, 1) if is_beam else None,
        priority=random.randint(0, 2),
    )


def run_world(seed: int) -> Counter[str]:
    random, happened = Random(seed), Counter[str]()
    scheduler = draw_scheduler(random)
    now_s, request_id = 0.0, 0
    while scheduler.num_unfinished_requests or request_id < 12:
        if request_id < 12 and random.random() < 0.3:
            request_id += 1
            try:
                scheduler.add(draw_request(random, request_id), now_s)
            except QuireError:
                happened["refused"] += 1
        if request_id and random.random() < 0.02:
            scheduler.cancel(random.randint(1, request_id))
        leap_and_compare(scheduler, random.choice((1, 3, 1000)), happened)
        advance(scheduler, random, happened)
        now_s += 0.01
        scheduler.expire(now_s)
    happened["preemptions"] = scheduler.state.counters.num_preemptions
    happened["hits"] = scheduler.state.counters.num_prefix_hit_tokens
    return happened


def leap_and_compare(scheduler: Scheduler, max_steps: int, happened: Counter[str]) -> None:
    stepping = deepcopy(scheduler)
    releases = any(step.releases for step in scheduler.state.in_flight)
    num_steps = leap(scheduler, max_steps, TOKEN)
    assert num_steps <= max_steps
    for _ in range(num_steps):
        assert step(stepping)
    assert picture(scheduler) == picture(stepping)
    check_invariants(scheduler)
    if num_steps:
        happened["leaps"] += 1
        happened["leapt steps"] += num_steps
        happened["leaps with plans in flight"] += scheduler.num_in_flight > 0
        happened["leaps over releases"] += releases
        happened["leaps cut short"] += 1 < num_steps < max_steps
        happened["leaps while others wait"] += scheduler.num_waiting > 0


def advance(scheduler: Scheduler, random: Random, happened: Counter[str]) -> None:
    """Does a step, or makes plans ahead and commits some of them."""
    if random.random() < 0.5:
        happened["steps"] += step(scheduler)
        return
    while (plan := scheduler.schedule()) is not None and random.random() < 0.7:
        happened["steps"] += 1
        happened["forks"] += len(plan.forks)
    for _ in range(random.randint(1, max(1, scheduler.num_in_flight))):
        if scheduler.num_in_flight:
            commit(scheduler)


def test_a_leap_equals_that_many_steps(effort: int) -> None:
    happened = Counter[str]()
    for seed in range(160 * effort):
        try:
            happened += run_world(seed)
        except Exception as error:
            error.add_note(f"run_world({seed})")
            raise
    assert happened["leapt steps"] > happened["steps"], "most steps are done by leaps"
    rare = ("leaps", "leaps with plans in flight", "leaps over releases", "leaps cut short", "leaps while others wait")
    for name in (*rare, "preemptions", "refused", "forks", "hits"):
        assert happened[name] > 10, name


def build(*requests: Request, num_blocks: int = 101) -> Scheduler:
    scheduler = Scheduler(SchedulerLimits(4, 64, 100), num_blocks=num_blocks, block_size=4)
    scheduler.executor_attached(1, num_blocks)
    for request in requests:
        scheduler.add(request)
    return scheduler


def test_stops_before_a_step_that_ends_a_sequence() -> None:
    """An output of 10 tokens: one from the prompt's step, eight from the leap, and the last from another step."""
    scheduler = build(make_request(1, "abc", 10), make_request(2, "de", 40))
    step(scheduler)
    assert leap(scheduler, 1000, TOKEN) == 8
    assert leap(scheduler, 1000, TOKEN) == 0
    step(scheduler)
    assert not scheduler.has_request(1)
    assert leap(scheduler, 5, TOKEN) == 5
    assert leap(scheduler, 1000, TOKEN) == 40 - 10 - 5 - 1


def test_stops_when_the_pool_is_short() -> None:
    """Request 1 takes the third of three blocks; then both requests need one, and none is free."""
    scheduler = build(make_request(1, "abc", 9), make_request(2, "d", 9), num_blocks=4)
    step(scheduler)
    assert leap(scheduler, 1000, TOKEN) == 3, "until 2 needs a second block"
    assert scheduler.state.cache.pool.num_free_blocks == 0
    assert leap(scheduler, 1000, TOKEN) == 0
    step(scheduler)
    assert scheduler.state.counters.num_preemptions == 1


def test_does_nothing_unless_the_next_step_is_one_token_for_every_sequence() -> None:
    empty = build()
    beams = build(make_request(1, "abc", 9, beam=BeamParams(2, 2)))
    beams.schedule()
    in_flight = build(make_request(1, "abc", 9))
    step(in_flight)
    in_flight.schedule()
    in_flight.schedule()  # as many as allowed
    prefilling = build(make_request(1, "a" * 80, 9))
    step(prefilling)
    waiting = build(make_request(1, "abc", 9))
    step(waiting)
    waiting.add(make_request(2, "xyz", 9))
    lost = build(make_request(1, "abc", 9))
    step(lost)
    lost.executor_lost()
    for scheduler in (empty, beams, in_flight, prefilling, waiting, lost):
        before = picture(scheduler)
        assert leap(scheduler, 10, TOKEN) == 0
        assert picture(scheduler) == before


def test_leaps_over_plans_in_flight_but_not_over_prompts() -> None:
    core = build(make_request(1, "abcdef", 54))
    core.schedule()
    assert leap(core, 10, TOKEN) == 0, "its prompt is in flight"
    core.schedule()
    commit(core)
    assert leap(core, 10, TOKEN) == 10
    assert leap(core, 1000, TOKEN) == 54 - 13, "plans 1 to 12 of 54 are in flight, and the 54th ends it"
    assert core.schedule() is not None


def test_does_nothing_if_a_published_block_could_admit_a_sequence() -> None:
    """Request 2 will publish a block that lets request 3 in.

    The first block of request 1 was forgotten, the second was not. When request 2 publishes the same first block,
    request 3 finds both, and needs one block instead of three.
    """
    scheduler = build(make_request(1, "abbbbbbbb", 9), make_request(2, "ab", 9), num_blocks=1 + 3 + 1 + 2)
    step(scheduler)
    first = next(iter(scheduler.state.batch.running))
    scheduler.state.cache.index.forget(first.block_table[0])
    scheduler.add(make_request(3, "abbbbbbbbbbb", 1))
    assert leap(scheduler, 10, TOKEN) == 0
    for num_waiting in (1, 1, 0):
        step(scheduler)
        assert scheduler.num_waiting == num_waiting
