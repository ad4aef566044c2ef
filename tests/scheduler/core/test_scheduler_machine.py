"""The scheduler under random moves of clients, executors and time, with every invariant checked after each of them.

The harness (`checked_scheduler.py`) checks invariants, order and progress, and compares each token that a client gets
with the one that its sequence must generate in every schedule.
"""

from collections import Counter
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import ClassVar, TypeVar

import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

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
    Scheduler,
    SchedulerLimits,
    SequenceParams,
    StepCosts,
    StepResult,
)
from tests.support.core.harness import Harness
from tests.support.core.resumptions import arrived, resumption
from tests.support.core.snapshot import take_snapshot

pytestmark = pytest.mark.exhaustive

T = TypeVar("T")

_MAX_SEARCHES = 5

COMMON_TEXT = (0, 1, 1, 0, 1, 0, 0, 0)
numbers = st.integers(0, 31)
tokens = st.integers(0, 1)


@st.composite
def limits(draw: st.DrawFn) -> SchedulerLimits:
    max_num_seqs = draw(st.sampled_from((4, 6, 3, 2, 1)))
    return SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 6)),
        max_model_len=draw(st.sampled_from((32, 12))),
        max_in_flight=draw(st.sampled_from((2, 2, 1, 3))),
        max_waiting_requests=draw(st.sampled_from((100, 100, 6))),
        max_preemptions=draw(st.sampled_from((1, 2, 0))),
        max_losses=draw(st.sampled_from((3, 1000))),
        watermark_ratio=draw(st.sampled_from((0.0, 0.1))),
        target_inter_token_latency_s=draw(st.sampled_from((inf, 1.0))),
        min_prompt_tokens=draw(st.integers(1, 3)),
    )


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request without its id and its time of arrival."""

    num_common: int  # tokens of the common text that its prompt starts with
    tail: list[int]
    max_tokens: int
    can_end_early: bool
    seeds: list[int]
    salt: bytes
    priority: int
    patience_s: float | None
    is_too_long: bool
    is_open_ended: bool
    beam: BeamParams | None
    num_logprobs: int

    def to_request(self, request_id: int, scheduler: Scheduler, now_s: float) -> Request:
        most_tokens = scheduler.max_tokens_per_sequence
        prompt = (*COMMON_TEXT[: self.num_common], *self.tail)[: most_tokens - 1]
        max_total_tokens = most_tokens if self.is_open_ended else min(len(prompt) + self.max_tokens, most_tokens)
        beam = self.beam if scheduler.state.limits.max_num_seqs > 2 else None
        num_logprobs = 0 if beam else self.num_logprobs
        return Request(
            request_id,
            prompt,
            SequenceParams(
                max_total_tokens=most_tokens + 1 if self.is_too_long else max_total_tokens,
                min_total_tokens=len(prompt) + 1,
                eos_token_ids=(0,) if self.can_end_early else (),
                num_logprobs=num_logprobs,
                num_prompt_logprobs=num_logprobs,
            ),
            seeds=(0,) if beam else tuple(self.seeds[: scheduler.state.limits.max_num_seqs]),
            beam=beam,
            priority=self.priority,
            cache_salt=self.salt,
            deadline_s=None if self.patience_s is None else now_s + self.patience_s,
            is_open_ended=self.is_open_ended,
        )


arrivals = st.builds(
    Arrival,
    num_common=st.sampled_from((0, 4, 8)),
    tail=st.lists(tokens, min_size=1, max_size=6),
    max_tokens=st.integers(1, 12),
    can_end_early=st.booleans(),
    seeds=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    salt=st.sampled_from((b"", b"", b"salt")),
    priority=st.integers(0, 2),
    patience_s=st.sampled_from((None, None, None, 1.0, 5.0)),
    is_too_long=st.sampled_from((False,) * 9 + (True,)),
    is_open_ended=st.sampled_from((False, False, True)),
    beam=st.sampled_from(
        (None, None, None, BeamParams(3, 2), BeamParams(2, 2), BeamParams(2, 1, 0.0, early_stopping=True))
    ),
    num_logprobs=st.sampled_from((0, 0, 2)),
)


class SchedulerMachine(RuleBasedStateMachine):
    happened: ClassVar[Counter[str]] = Counter()

    @initialize(
        limits=limits(),
        num_blocks=st.sampled_from((8, 6, 4, 12, 16)),
        block_size=st.integers(1, 4),
        policy=st.sampled_from((FCFS, PRIORITY)),
        batching=st.sampled_from((CONTINUOUS, CONTINUOUS, STATIC, replace(DYNAMIC, timeout_s=0.5))),
        kv_allocation=st.sampled_from((PAGED, PAGED, PAGED, *KV_ALLOCATIONS.values())),
        enable_prefix_caching=st.sampled_from((True, True, True, False)),
        retains=st.sampled_from((True, True, False)),
        first=st.lists(arrivals, min_size=1, max_size=5),
    )
    def build(
        self,
        limits: SchedulerLimits,
        num_blocks: int,
        block_size: int,
        policy: Policy,
        batching: Batching,
        kv_allocation: KVAllocation,
        enable_prefix_caching: bool,
        retains: bool,
        first: list[Arrival],
    ) -> None:
        self.harness = Harness(
            limits,
            num_blocks=num_blocks,
            block_size=block_size,
            policy=policy,
            batching=batching,
            kv_allocation=kv_allocation,
            enable_prefix_caching=enable_prefix_caching,
            retains=retains,
        )
        self.harness.attach()
        self.now_s = 0.0
        self.num_requests = 0
        self.add(first)

    # --- clients ----------------------------------------------------------------------------------------------

    @rule(arrivals=st.lists(arrivals, min_size=1, max_size=3))
    def add(self, arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            self._add(arrival)

    def _add(self, arrival: Arrival) -> None:
        self._submit(arrival.to_request(self.num_requests, self.harness.scheduler, self.now_s))

    def _submit(self, request: Request) -> None:
        self.num_requests += 1
        before = take_snapshot(self.harness.scheduler)
        try:
            self.harness.add(request)
        except (CapacityExceeded, QueueFull) as error:
            self.happened[type(error).__name__] += 1
            assert take_snapshot(self.harness.scheduler) == before

    @precondition(lambda self: self.harness.clients.open_requests())
    @rule(number=numbers)
    def cancel(self, number: int) -> None:
        """Cancels twice, because a client's cancel may cross with the end of its request."""
        self.happened["cancels in flight"] += bool(self.harness.in_flight)
        request_id = _pick(self.harness.clients.open_requests(), number)
        self.harness.cancel(request_id)
        before = take_snapshot(self.harness.scheduler)
        self.harness.cancel(request_id)
        assert take_snapshot(self.harness.scheduler) == before

    @precondition(lambda self: self.harness.clients.open_requests())
    @rule(number=numbers)
    def break_off(self, number: int) -> None:
        """Ends a stream as the death of a scheduler does, and resumes it."""
        request_id = _pick(self.harness.clients.open_requests(), number)
        rest = resumption(self.harness.clients, request_id)
        self.harness.cancel(request_id)
        request = rest and arrived(rest, self.num_requests, self.harness.scheduler)
        if request is not None:
            self.happened["resumptions"] += bool(request.outputs)
            self._submit(request)

    @precondition(lambda self: self.stoppable())
    @rule(number=numbers)
    def stop(self, number: int) -> None:
        """Stops a sequence, as if a stop string were found in its text so far."""
        self.harness.stop(*_pick(self.stoppable(), number))

    def stoppable(self) -> list[tuple[int, int]]:
        clients = self.harness.clients
        return [key for key, token_ids in clients.received.items() if token_ids and key not in clients.ended]

    @rule(pause_s=st.sampled_from((0.1, 1.0)))
    def time_passes(self, pause_s: float) -> None:
        self.now_s += pause_s
        self.harness.expire(self.now_s)

    # --- steps ------------------------------------------------------------------------------------------------

    @rule(num_plans=st.integers(1, 3))
    def schedule(self, num_plans: int) -> None:
        for _ in range(num_plans):
            self.harness.schedule()

    @rule(costs=st.builds(StepCosts, *[st.sampled_from((0.0, 0.05, 0.4))] * 6))
    def measure(self, costs: StepCosts) -> None:
        self.harness.scheduler.set_costs(costs)

    @precondition(lambda self: self.harness.in_flight)
    @rule()
    def commit(self) -> None:
        self.harness.commit()

    @precondition(lambda self: self.harness.scheduler.num_unfinished_requests)
    @rule(num_steps=st.integers(1, 8))
    def step(self, num_steps: int) -> None:
        """Commits the oldest result and makes the next plans, as the engine does most of the time."""
        for _ in range(num_steps):
            if self.harness.in_flight:
                self.harness.commit()
            while self.harness.schedule() is not None:
                pass

    @precondition(lambda self: self.harness.in_flight)
    @rule(kind=st.sampled_from(("epoch", "step", "short", "long", "negative", "unknown", "no place")))
    def wrong_result(self, kind: str) -> None:
        """Checks that a wrong result is refused and changes nothing (I17)."""
        right = self.harness.in_flight[0].result
        tokens = list(right.token_ids)
        wrong = {
            "epoch": StepResult(right.epoch - 1, right.step_id, tokens),
            "step": StepResult(right.epoch, right.step_id + 1, tokens),
            "short": StepResult(right.epoch, right.step_id, tokens[1:] if tokens else [0]),
            "long": StepResult(right.epoch, right.step_id, tokens, [None] * (len(tokens) + 1)),
            "negative": StepResult(right.epoch, right.step_id, [*tokens[:-1], -1]),
            "unknown": StepResult(right.epoch, right.step_id, [*tokens[:-1], self.harness.clients.vocab_size]),
            "no place": StepResult(right.epoch, right.step_id, tokens, deferred=[len(tokens)]),
        }
        self._assert_refused(wrong[kind])

    def _assert_refused(self, result: StepResult) -> None:
        before = take_snapshot(self.harness.scheduler)
        with pytest.raises(ResultMismatch):
            self.harness.scheduler.commit(result)
        assert take_snapshot(self.harness.scheduler) == before

    @rule(number=numbers)
    def reset_prefix_cache(self, number: int) -> None:
        if number == 0:  # rare, because otherwise no cached prefix would be found
            self.harness.reset_prefix_cache()

    # --- executors --------------------------------------------------------------------------------------------

    @precondition(lambda self: self.harness.in_flight)
    @rule(number=numbers)
    def executor_lost(self, number: int) -> None:
        """Loses the executor, sometimes several in a row."""
        self.harness.lose()
        for _ in range(max(0, number - 26)):
            self.harness.attach()
            self.harness.schedule()
            self.harness.lose()

    @precondition(lambda self: self.harness.executor is None)
    @rule(num_fewer_blocks=st.sampled_from((0, 0, 4, 2, -4)))
    def executor_attached(self, num_fewer_blocks: int) -> None:
        self.harness.attach(max(2, self.harness.num_blocks - num_fewer_blocks))

    @precondition(lambda self: self.harness.executor is None)
    @rule(num_unexecuted=st.integers(0, 3))
    def executor_returns(self, num_unexecuted: int) -> None:
        """Attaches the executor that was lost, which has executed some of the plans that were in flight."""
        self.harness.attach(num_unexecuted=min(num_unexecuted, self.harness.num_lost_plans))

    @precondition(lambda self: self.harness.executor is not None)
    @rule(num_samples=st.integers(1, 3))
    def defer(self, num_samples: int) -> None:
        self.harness.defer(num_samples)

    @precondition(lambda self: self.harness.lost)
    @rule()
    def late_result(self) -> None:
        """Commits a result of an executor that was lost, which is refused (I17)."""
        self.happened["late results"] += 1
        self._assert_refused(self.harness.lost.pop().result)

    # --- the end ----------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Checks that all unfinished requests end within the bound (I12)."""
        if hasattr(self, "harness"):
            self.harness.run()
            self.happened.update(asdict(self.harness.coverage))
            counters = self.harness.scheduler.state.counters
            self.happened["preemptions"] += counters.num_preemptions
            self.happened["copies"] += counters.num_cow_copies
            self.happened["hit tokens"] += counters.num_prefix_hit_tokens
            self.happened.update(self.harness.clients.count_ends())
            del self.happened["finished: too_late"]  # these schedulers are told no run time


def _pick(choices: list[T], number: int) -> T:
    return choices[number % len(choices)]


def test_scheduler_keeps_its_invariants(search: settings) -> None:
    happened = SchedulerMachine.happened
    happened.clear()
    thorough = settings(search, max_examples=2 * search.max_examples)
    # Too rare for so few examples. The simulation, test_beam_group.py, test_smaller_pool.py and test_progress.py cover
    # them. Without a second tenant nothing pauses: that is for the simulation and test_newcomers.py.
    rare = {
        "num_preempted_beams",
        "num_beams_behind",
        "num_narrowed",
        "num_ended_by_pool",
        "finished: error",
        "num_pauses",
    }
    missing: list[str] = []
    # Hypothesis also draws from the constants of loaded modules, so examples change with them. An event that one search
    # misses is found by the next.
    for attempt in range(_MAX_SEARCHES):
        machine = seed(attempt)(SchedulerMachine) if search.derandomize else SchedulerMachine
        run_state_machine_as_test(machine, settings=thorough)
        missing = [name for name, number in happened.items() if not number and name not in rare]
        if not missing:
            return
    pytest.fail(f"{_MAX_SEARCHES} searches never saw {missing}")
