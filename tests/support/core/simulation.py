"""A simulated world: the real scheduler, an executor behind a network that loses connections, and a virtual clock.

Everything that takes time is an event on the clock: requests and results arrive, clients disconnect, executors die and
are replaced. When an executor dies, the results in transit are lost, or arrive after a new executor has
taken over. The same seed gives the same world.

    simulate(seed)      runs the world to its end, checking every invariant on the way; returns the counts of all events
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from heapq import heappop, heappush
from math import inf
from random import Random

from scheduler.core import (
    CONTINUOUS,
    DYNAMIC,
    FCFS,
    KV_ALLOCATIONS,
    PAGED,
    PRIORITY,
    STATIC,
    Batching,
    BeamParams,
    CapacityExceeded,
    KVAllocation,
    Policy,
    QueueFull,
    Request,
    ResultMismatch,
    RunTime,
    SchedulerLimits,
    SequenceParams,
    StepCosts,
)
from tests.support.core.checked_scheduler import Flight
from tests.support.core.harness import Harness
from tests.support.core.resumptions import arrived, resumption
from tests.support.core.snapshot import take_snapshot

VOCAB_SIZE = 2
"""Small, so that prefixes collide at once."""

COMMON_TEXT = (0, 1, 1, 0, 1, 0, 0, 0)

HAPPENINGS = (
    "refused: can never fit",
    "refused: queue full",
    "stopped",
    "cancelled",
    "cancelled in flight",
    "forgotten blocks",
    "crashes",
    "late results",
    "another pool",
    "broken off",
    "broken off twice",
    "resumed with output",
    "resumed with finished samples",
)
"""Events that are counted in addition to the counters of scheduler and harness."""


@dataclass(frozen=True, slots=True)
class World:
    """The parameters of one simulated world. Times are in milliseconds of the virtual clock."""

    limits: SchedulerLimits
    policy: Policy
    batching: Batching
    kv_allocation: KVAllocation
    num_blocks: int
    block_size: int
    enable_prefix_caching: bool
    num_requests: int
    max_prompt_tokens: int
    eos_share: float  # share of requests that can end by EOS
    arrival_ms: float  # mean time between two requests
    step_ms: float  # mean time of a step
    network_ms: float  # mean time that a result is in transit
    num_crashes: int
    outage_ms: float
    late_share: float  # share of lost results that arrive late
    impatient_share: float  # share of clients that disconnect
    broken_share: float  # share of streams that break off; their clients resume them later
    deadline_share: float
    beam_share: float


def draw_costs(random: Random) -> StepCosts:
    """Returns costs of which some are 0, for a target of 1 s."""
    return StepCosts(*(random.choice((0.0, 0.05, 0.2, random.random())) for _ in range(6)))


def draw_world(random: Random) -> World:
    """Returns a small world with few slots, blocks and tokens per step."""
    max_num_seqs = random.randint(1, 5)
    kv_allocation = random.choice((PAGED, PAGED, PAGED, random.choice(tuple(KV_ALLOCATIONS.values()))))
    beam_share = random.choice((0.0, 0.4, 0.7)) if kv_allocation is PAGED else 0.0
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + random.randint(0, 8),
        max_model_len=random.randint(8, 40),
        max_in_flight=random.choice((1, 2, 2, 3)),
        max_waiting_requests=random.choice((3, 1000)),
        max_waiting_prompt_tokens=random.choice((20, 1000)),
        max_preemptions=random.randint(0, 3),
        max_losses=random.choice((2, 1000)),
        watermark_ratio=random.choice((0.0, 0.1)),
    )
    return World(
        limits=limits,
        policy=random.choice((FCFS, PRIORITY)),
        batching=random.choice((CONTINUOUS, CONTINUOUS, CONTINUOUS, STATIC, replace(DYNAMIC, timeout_s=0.004))),
        kv_allocation=kv_allocation,
        num_blocks=random.randint(4, 14) + (random.randint(0, 8) if beam_share or kv_allocation is not PAGED else 0),
        block_size=random.randint(1, 4),
        enable_prefix_caching=random.random() < 0.8,
        num_requests=random.randint(2, 9),
        max_prompt_tokens=random.randint(1, 12),
        eos_share=random.choice((0.0, 0.5)),
        arrival_ms=random.choice((0.2, 1.0, 5.0)),
        step_ms=1.0,
        network_ms=random.choice((0.1, 1.0, 3.0)),
        num_crashes=random.choice((0, 0, 1, 5)),
        outage_ms=random.choice((0.1, 5.0)),
        late_share=0.5,
        impatient_share=random.choice((0.0, 0.3)),
        broken_share=random.choice((0.0, 0.0, 0.5)),
        deadline_share=random.choice((0.0, 0.3)),
        beam_share=beam_share,
    )


class Clock:
    """A queue of events in the order of their times; simultaneous events happen in the order of addition."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0

    def at(self, time_ms: float, action: Callable[[], None]) -> None:
        self._num_events += 1
        heappush(self._events, (time_ms, self._num_events, action))

    def after(self, delay_ms: float, action: Callable[[], None]) -> None:
        self.at(self.now_ms + delay_ms, action)

    def run(self) -> None:
        while self._events:
            self.now_ms, _, action = heappop(self._events)
            action()


class Simulation:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.retention = Random(~seed)  # one of its own, so that the worlds stay the same without it
        self.world = world = draw_world(self.random)
        costs = Random(f"costs {seed}")  # one of its own, too
        if has_costs := costs.random() < 0.5:
            limits = replace(world.limits, target_inter_token_latency_s=1.0, min_prompt_tokens=costs.randint(1, 3))
            self.world = world = replace(world, limits=limits)
        self.tenants = Random(f"tenants {seed}")  # one of its own, too
        self.num_tenants = self.tenants.choice((1, 2, 3)) if has_costs else 1
        self.clock = Clock()
        self.happened: Counter[str] = Counter(dict.fromkeys(HAPPENINGS, 0))
        self.harness = Harness(
            world.limits,
            num_blocks=world.num_blocks,
            block_size=world.block_size,
            policy=world.policy,
            batching=world.batching,
            kv_allocation=world.kv_allocation,
            retains=self.retention.random() < 0.5,
            vocab_size=VOCAB_SIZE,
            enable_prefix_caching=world.enable_prefix_caching,
        )
        run_time = Random(f"pace {seed}")  # one of its own, too
        if world.batching is CONTINUOUS and run_time.random() < 0.5:  # the baselines form batches before they look
            self.harness.scheduler.set_run_time(RunTime(run_time.uniform(0.0, 0.004), run_time.uniform(1.0, 10.0)))
        if has_costs:
            self.harness.scheduler.set_costs(draw_costs(costs))
        self.deferrals = Random(f"deferrals {seed}")  # one of its own, too
        self.deferral_share = self.deferrals.choice((0.0, 0.0, 0.02, 0.2))
        self.num_requests = self.world.num_requests
        self.busy_until_ms = 0.0  # the executor runs steps one after the other
        self.wakes_s = inf  # the earliest scheduled wake-up
        self.arrived_until_ms = 0.0  # results arrive in order

    def run(self) -> Counter[str]:
        self._attach()
        arrives_ms = 0.0
        for request_id in range(self.world.num_requests):
            arrives_ms += self._around(self.world.arrival_ms)
            self.clock.at(arrives_ms, partial(self._arrive, self._draw_request(request_id)))
        for _ in range(self.world.num_crashes):
            self.clock.at(self.random.uniform(0, 2 * arrives_ms + 20 * self.world.step_ms), self._crash)
        if self.random.random() < 0.3:
            self.clock.at(self.random.uniform(0, 2 * arrives_ms), self._reset_prefix_cache)
        self.clock.run()
        self.harness.clients.assert_served()
        self.harness.assert_idle()
        self.happened.update(self._counted())
        return self.happened

    # --- clients ----------------------------------------------------------------------------------------------

    def _draw_request(self, request_id: int) -> Request:
        random, world = self.random, self.world
        prompt = self._draw_prompt()
        most_tokens = max(len(prompt) + 1, self.harness.scheduler.max_tokens_per_sequence + (random.random() < 0.05))
        can_end_early = random.random() < world.eos_share
        has_deadline = random.random() < world.deadline_share
        width = random.randint(2, 4) if random.random() < world.beam_share else 0
        width = min(width, world.limits.max_num_seqs)
        has_logprobs = not width and random.random() < 0.2
        max_total_tokens = min(len(prompt) + random.randint(1, 14), most_tokens)
        is_open_ended = random.random() < 0.3
        return Request(
            request_id,
            prompt,
            SequenceParams(
                max_total_tokens=most_tokens if is_open_ended else max_total_tokens,
                min_total_tokens=len(prompt) + random.randint(0, 3),
                eos_token_ids=(0,) if can_end_early else (),
                stop_token_ids=(1,) if random.random() < 0.1 else (),
                num_logprobs=random.randint(0, 2) if has_logprobs else 0,
                num_prompt_logprobs=random.randint(0, 2) if has_logprobs else 0,
            ),
            seeds=(0,) if width else tuple(random.randrange(4) for _ in range(self._draw_num_samples())),
            beam=self._draw_beam(width) if width else None,
            priority=random.randint(0, 2),
            cache_salt=random.choice((b"", b"", b"salt")),
            deadline_s=random.uniform(0.0, 0.03) if has_deadline else None,
            is_open_ended=is_open_ended,
            tenant=f"tenant {self.tenants.randrange(self.num_tenants)}",
        )

    def _draw_num_samples(self) -> int:
        """Returns 1 in most cases if runs are not shared: requests for more are refused."""
        choices = (1, 1, 2, 3) if self.world.kv_allocation is PAGED else (1,) * 9 + (2,)
        return self.random.choice(choices)

    def _draw_beam(self, width: int) -> BeamParams:
        random = self.random
        return BeamParams(width, random.randint(1, width), random.choice((1.0, 0.0, 2.0)), random.random() < 0.5)

    def _draw_prompt(self) -> tuple[int, ...]:
        """Returns a prompt, often with the head of a common text and a random tail."""
        head = COMMON_TEXT[: self.random.choice((0, 4, 8))]
        tail = [self.random.randrange(VOCAB_SIZE) for _ in range(self.random.randint(1, self.world.max_prompt_tokens))]
        return (*head, *tail)[: self.harness.scheduler.max_tokens_per_sequence - 1]

    def _arrive(self, request: Request) -> None:
        self.harness.expire(self.clock.now_ms / 1000)
        try:
            self.harness.add(request)
        except CapacityExceeded:
            self.happened["refused: can never fit"] += 1
            return
        except QueueFull:
            self.happened["refused: queue full"] += 1
            self.clock.after(self._around(5.0), partial(self._arrive, request))
            return
        if self.random.random() < self.world.impatient_share:
            self.clock.after(self._around(10.0), partial(self._go_away, request.request_id))
        if self.random.random() < self.world.broken_share:
            self.clock.after(self._around(10.0), partial(self._break_off, request.request_id))
        if request.deadline_s is not None:
            self.clock.at(max(self.clock.now_ms, 1000 * request.deadline_s), self._wake)
        self._wake()

    def _go_away(self, request_id: int) -> None:
        """Stops one sample of a client or, more often, cancels its request."""
        keys = [key for key in self.harness.clients.open_keys(request_id) if self.harness.clients.received[key]]
        if keys and self.random.random() < 0.4:
            self.happened["stopped"] += 1
            self.harness.stop(*self.random.choice(keys))
        else:
            self.happened["cancelled in flight" if self.harness.in_flight else "cancelled"] += 1
            self.harness.cancel(request_id)
        self._wake()

    def _break_off(self, request_id: int) -> None:
        """Ends a stream as the death of a scheduler does; its client resumes it later."""
        rest = resumption(self.harness.clients, request_id)
        if rest is not None:
            self.happened["broken off"] += 1
            self.happened["broken off twice"] += request_id >= self.world.num_requests
            self.harness.cancel(request_id)
            self.clock.after(self._around(3.0), partial(self._resume, rest))
            self._wake()

    def _resume(self, rest: Request) -> None:
        request = arrived(rest, self.num_requests, self.harness.scheduler)
        if request is not None:
            self.num_requests += 1
            self.happened["resumed with output"] += bool(request.outputs)
            self.happened["resumed with finished samples"] += any(each.is_finished for each in request.outputs)
            self._arrive(request)

    def _reset_prefix_cache(self) -> None:
        self.happened["forgotten blocks"] += self.harness.reset_prefix_cache()

    # --- the engine loop --------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self.harness.expire(self.clock.now_ms / 1000)
        if self.harness.now_s >= self.wakes_s:
            self.wakes_s = inf
        if self.harness.executor is not None:
            self.harness.defer(self.deferrals.randint(1, 4) * (self.deferrals.random() < self.deferral_share))
        while self.harness.schedule() is not None:
            flight = self.harness.in_flight[-1]
            self.busy_until_ms = max(self.busy_until_ms, self.clock.now_ms) + self._around(self.world.step_ms)
            arrives_ms = self.busy_until_ms + self._around(self.world.network_ms)
            self.arrived_until_ms = max(self.arrived_until_ms, arrives_ms)
            self.clock.at(self.arrived_until_ms, partial(self._deliver, flight))
        self._wake_when_due()

    def _wake_when_due(self) -> None:
        """Adds a wake-up for a batch that waits to be full; deadlines have their own events."""
        due_s = self.harness.scheduler.next_wake_s
        if due_s is not None and due_s < self.wakes_s:
            self.wakes_s = due_s
            self.clock.at(1000 * due_s + 1e-6, self._wake)  # rounding must not make it early

    def _deliver(self, flight: Flight) -> None:
        if flight not in self.harness.lost:
            assert flight is self.harness.in_flight[0]
            self.harness.commit()
            self._wake()
        elif self.random.random() < self.world.late_share:
            self._deliver_late(flight)

    def _deliver_late(self, flight: Flight) -> None:
        """Checks that a result of a lost executor is refused and changes nothing (I17)."""
        before = take_snapshot(self.harness.scheduler)
        try:
            self.harness.scheduler.commit(flight.result)
        except ResultMismatch:
            self.happened["late results"] += 1
        else:
            raise AssertionError(f"I17: a result of epoch {flight.plan.epoch} was accepted in a later one")
        assert take_snapshot(self.harness.scheduler) == before, "I17: a refused result changed the state"

    # --- executors --------------------------------------------------------------------------------------------

    def _crash(self) -> None:
        if self.harness.executor is None:
            return
        self.happened["crashes"] += 1
        self.harness.lose()
        self.clock.after(self._around(self.world.outage_ms), self._attach)

    def _attach(self) -> None:
        """Attaches the first executor, or a replacement that sometimes has less or more memory."""
        num_blocks, num_unexecuted = self.world.num_blocks, None
        if self.harness.scheduler.state.epoch and self.random.random() < 0.3:
            num_blocks = max(2, num_blocks + self.random.randint(-5, 2))
            self.happened["another pool"] += 1
        elif self.harness.num_blocks == num_blocks and self.retention.random() < 0.5:
            num_unexecuted = self.retention.randint(0, self.harness.num_lost_plans)
        self.busy_until_ms = self.arrived_until_ms = self.clock.now_ms
        self.harness.attach(num_blocks, num_unexecuted=num_unexecuted)
        self._wake()

    # --- numbers ----------------------------------------------------------------------------------------------

    def _around(self, mean_ms: float) -> float:
        return self.random.expovariate(1 / mean_ms)

    def _counted(self) -> dict[str, int]:
        return (
            asdict(self.harness.scheduler.state.counters)
            | asdict(self.harness.coverage)
            | self.harness.clients.count_ends()
        )


def simulate(seed: int) -> Counter[str]:
    return Simulation(seed).run()
