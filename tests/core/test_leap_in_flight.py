"""Leaps with plans in flight: two cores that are told the same, one of which leaps, are never told apart."""

from collections import Counter
from dataclasses import asdict
from random import Random

from scheduler.core import (
    FCFS,
    PRIORITY,
    BeamParams,
    CapacityExceeded,
    Limits,
    Logprobs,
    Request,
    Scheduler,
    SequenceParams,
    StepResult,
    block_map,
    check_invariants,
    leap,
)

TOKEN = 0


class Twins:
    """Two cores that are told the same. Everybody samples TOKEN."""

    def __init__(self, random: Random) -> None:
        self.random = random
        slots = random.randint(1, 6)
        limits = Limits(
            max_num_seqs=slots,
            max_num_batched_tokens=slots + random.choice((0, 3, 40)),
            max_model_len=80,
            max_in_flight=random.choice((1, 2, 2, 3)),
            max_preemptions=random.choice((0, 1, 3)),
            watermark_ratio=random.choice((0.0, 0.1)),
        )
        self.num_blocks = random.choice((12, 25, 200))
        self.block_size = random.choice((1, 2, 4))
        policy, caches = random.choice((FCFS, PRIORITY)), random.random() < 0.6
        self.stepping, self.leaping = (
            Scheduler(
                limits,
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                policy=policy,
                enable_prefix_caching=caches,
            )
            for _ in range(2)
        )
        for core in (self.stepping, self.leaping):
            core.executor_attached(1, self.num_blocks)
        self.num_requests = 0
        self.seen: Counter[str] = Counter()

    def add(self) -> None:
        random = self.random
        self.num_requests += 1
        prompt = [random.randrange(2) for _ in range(random.randint(1, 12))]
        is_beam = random.random() < 0.05
        request = Request(
            self.num_requests,
            prompt,
            SequenceParams(
                max_total_tokens=len(prompt) + random.choice((1, 2, 10, 40)),
                num_logprobs=0,
            ),
            seeds=tuple(range(random.choice((1, 1, 1, 2)))) if not is_beam else (0,),
            beam=BeamParams(2, 1) if is_beam else None,
            priority=random.randint(0, 2),
        )
        for core in (self.stepping, self.leaping):
            try:
                core.add(request)
            except CapacityExceeded:
                self.seen["refused"] += 1

    def schedule(self, core: Scheduler) -> bool:
        return core.schedule() is not None

    def commit(self, core: Scheduler) -> None:
        step = core.books.in_flight[0]
        if step.beams:  # nobody samples for beams here: their requests go
            for beam in step.beams:
                core.cancel(beam.request.request_id)
        num_candidates = sum(beam.params.num_candidates for beam in step.beams)
        candidates = Logprobs([1] * num_candidates, [-1.0] * num_candidates) if step.beams else None
        core.commit(StepResult(1, step.step_id, [TOKEN] * len(step.sampled), candidates=candidates))

    def compare(self) -> None:
        assert snapshot(self.stepping) == snapshot(self.leaping)
        check_invariants(self.leaping)

    def leap(self) -> None:
        is_waiting = self.leaping.num_waiting > 0
        releases = any(step.releases for step in self.leaping.books.in_flight)
        max_steps = self.random.choice((1, 2, 5, 1000))
        num_steps = leap(self.leaping, max_steps, TOKEN)
        assert 0 <= num_steps <= max_steps
        for _ in range(num_steps):
            assert self.schedule(self.stepping)
            self.commit(self.stepping)
        self.compare()
        if num_steps:
            self.seen["leaps"] += 1
            self.seen["steps"] += num_steps
            self.seen["leaps past a queue"] += is_waiting
            self.seen["leaps over releases"] += releases
            self.seen["leaps cut short"] += 1 < num_steps < max_steps

    def run(self) -> None:
        random = self.random
        num_left = random.randint(2, 12)
        while num_left or self.stepping.num_unfinished_requests:
            if num_left and random.random() < 0.3:
                num_left -= 1
                self.add()
            if random.random() < 0.05 and self.num_requests:
                request_id = random.randint(1, self.num_requests)
                for core in (self.stepping, self.leaping):
                    core.cancel(request_id)
            while self.schedule(self.stepping):
                assert self.schedule(self.leaping)
            assert not self.schedule(self.leaping)
            if self.stepping.num_in_flight:
                for core in (self.stepping, self.leaping):
                    self.commit(core)
                self.leap()
        self.seen["preemptions"] += self.stepping.counters.num_preemptions
        self.seen["forks"] += self.stepping.counters.num_forks
        self.seen["hits"] += self.stepping.counters.num_prefix_hit_tokens


def snapshot(core: Scheduler) -> tuple[object, ...]:
    """All there is, names of physical blocks and the order in which they will be reused included."""
    return (
        block_map(core),
        tuple(core.cache.pool.free_blocks()),
        core.cache.num_reserved_blocks,
        tuple(sorted(core.cache.index.items())),
        [s.request.request_id for s in core.waiting_sequences()],
        core.num_free_slots,
        asdict(core.counters),
        [
            (s.token_ids, s.num_computed_tokens, s.num_planned_tokens, s.write_limit, s.publish_at)
            for s in core.unfinished_sequences()
        ],
        [
            (step.step_id, [(s.request.request_id, s.index) for s in step.sampled], step.releases, len(step.ending))
            for step in core.books.in_flight
        ],
    )


def test_leaps_are_pairs_of_schedule_and_commit() -> None:
    seen: Counter[str] = Counter()
    for seed in range(250):
        twins = Twins(Random(seed))
        twins.run()
        seen.update(twins.seen)
    wanted = ("leaps", "leaps past a queue", "leaps over releases", "leaps cut short", "preemptions", "forks", "hits")
    assert all(seen[name] > 20 for name in wanted), seen
    assert seen["steps"] > 5 * seen["leaps"] / 2


def test_nobody_leaps_who_has_a_prompt_to_compute_or_a_plan_too_many() -> None:
    core = Scheduler(Limits(4, 16, 100), num_blocks=50, block_size=4)
    core.executor_attached(1, 50)
    core.add(Request(1, [1] * 6, SequenceParams(max_total_tokens=60)))
    assert leap(core, 10) == 0
    assert core.schedule() is not None
    assert leap(core, 10) == 0  # its prompt is in flight
    assert core.schedule() is not None
    assert leap(core, 10) == 0  # two plans are out
    core.commit(StepResult(1, 1, [0]))
    assert leap(core, 10) == 10
    assert leap(core, 1000) == 60 - 6 - 13  # plans 1 to 12 of 54 are out; the 54th ends it
    assert core.schedule() is not None
