"""Overload: more requests than the pool holds, of several shapes, and the tokens that are computed again.

Overload(shape, seed).run()      returns what happened; the same shape and seed give the same requests
"""

from collections import deque
from dataclasses import dataclass
from random import Random

from scheduler.core import POLICIES, PRIORITY, Request, Scheduler, SchedulerLimits, Sequence, SequenceParams, StepResult

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of load.

    long_ratio    share of the requests whose prompt has `long_prompt` tokens
    shared_ratio  share of the requests whose prompt begins with one of four long texts
    samples       numbers of samples, of which each request draws one
    """

    prompt: tuple[int, int]
    output: tuple[int, int]
    long_prompt: tuple[int, int] = (800, 1500)
    long_ratio: float = 0.0
    shared_ratio: float = 0.0
    samples: tuple[int, ...] = (1,)
    tenants: str = "a"
    policy: str = "fcfs"
    num_blocks: int = 200
    enable_prefix_caching: bool = True


SHAPES = {
    "mixed": Shape((8, 400), (8, 300)),
    "mixed, no prefix cache": Shape((8, 400), (8, 300), enable_prefix_caching=False),
    "small pool": Shape((8, 400), (8, 300), num_blocks=90),
    "short prompts, long outputs": Shape((20, 60), (50, 600)),
    "some long prompts": Shape((10, 60), (100, 400), long_ratio=0.2),
    "samples": Shape((40, 300), (50, 300), samples=(1, 1, 2, 4)),
    "samples, no prefix cache": Shape((40, 300), (50, 300), samples=(1, 1, 2, 4), enable_prefix_caching=False),
    "shared heads": Shape((10, 100), (50, 300), shared_ratio=0.7),
    "priorities": Shape((8, 400), (8, 300), policy="priority"),
    "two tenants": Shape((8, 400), (8, 300), tenants="aaab"),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The effort of one run. num_recomputed: tokens that were computed, lost by a preemption and computed again."""

    num_recomputed: int
    num_preemptions: int
    num_steps: int


class Overload:
    """One run: a request arrives every four steps on average, which is far more than the pool can hold."""

    def __init__(self, shape: Shape, seed: int, num_requests: int = 150) -> None:
        self._random = Random(seed)
        self._shape = shape
        self.scheduler = Scheduler(
            SchedulerLimits(max_num_seqs=32, max_num_batched_tokens=512, max_model_len=2048),
            num_blocks=shape.num_blocks,
            block_size=BLOCK_SIZE,
            policy=POLICIES[shape.policy],
            enable_prefix_caching=shape.enable_prefix_caching,
        )
        self.scheduler.executor_attached(1, shape.num_blocks)
        arrival = 0.0
        self._arrivals: deque[tuple[float, Request]] = deque()
        for request_id in range(1, num_requests + 1):
            arrival += self._random.expovariate(1 / 4)
            self._arrivals.append((arrival, self._draw(request_id)))
        self._lost: dict[Sequence, int] = {}  # computed tokens of sequences that were preempted
        self._num_recomputed = 0

    def run(self) -> Outcome:
        scheduler, counters = self.scheduler, self.scheduler.state.counters
        preempt = scheduler.state.preempt

        def count(victim: Sequence) -> None:
            self._lost[victim] = victim.num_computed_tokens
            preempt(victim)

        scheduler.state.preempt = count  # type: ignore[method-assign]
        step = 0
        while self._arrivals or scheduler.num_unfinished_requests:
            step += 1
            while self._arrivals and self._arrivals[0][0] <= step:
                scheduler.add(self._arrivals.popleft()[1])
            self._step()
        return Outcome(self._num_recomputed, counters.num_preemptions, counters.num_steps)

    def _step(self) -> None:
        """Plans as far ahead as possible, then commits one result."""
        in_flight = self.scheduler.state.in_flight
        while self.scheduler.schedule() is not None:
            for sequence, num_cached in in_flight[-1].admitted:
                self._num_recomputed += max(0, self._lost.pop(sequence, 0) - num_cached)
        if in_flight:
            token_ids = self._random.choices(range(1000), k=len(in_flight[0].sampled))
            self.scheduler.commit(StepResult(1, in_flight[0].step_id, token_ids))

    def _draw(self, request_id: int) -> Request:
        random, shape = self._random, self._shape
        head = [random.randrange(4)] * 320 if random.random() < shape.shared_ratio else []
        is_long = random.random() < shape.long_ratio
        num_own = random.randint(*(shape.long_prompt if is_long else shape.prompt))
        prompt = head + [random.randrange(1000) for _ in range(num_own)]
        params = SequenceParams(max_total_tokens=len(prompt) + random.randint(*shape.output))
        seeds = tuple(range(random.choice(shape.samples)))
        priority = random.randint(0, 2) if POLICIES[shape.policy] is PRIORITY else 0
        return Request(request_id, prompt, params, seeds=seeds, priority=priority, tenant=random.choice(shape.tenants))
