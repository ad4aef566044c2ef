"""Requests that cannot meet their deadline are refused at once. Time is that of a virtual clock."""

from collections.abc import Callable
from random import Random

import pytest

from scheduler.core import (
    DEFAULT_TENANT,
    FCFS,
    PRIORITY,
    BeamParams,
    Events,
    FinishReason,
    Logprobs,
    Policy,
    QueueFull,
    ReceivedOutput,
    Request,
    Scheduler,
    SchedulerLimits,
    SequenceParams,
    StepResult,
    TenantTerms,
    TermsOf,
)
from scheduler.core.tenants.account import equal_terms
from scheduler.engine import wait_prediction
from scheduler.engine.wait_prediction import MARGIN, WaitPrediction

STEP_S = 0.01

StepTime = Callable[[float], float]
"""Returns how long a step takes that begins at a time."""


class Server:
    """A core whose steps take `step_s`, and that refuses by prediction if `predicts`."""

    def __init__(
        self,
        *,
        predicts: bool,
        step_s: StepTime = lambda now_s: STEP_S,
        terms_of: TermsOf = equal_terms,
        policy: Policy = FCFS,
    ) -> None:
        limits = SchedulerLimits(8, 64, 4000, max_in_flight=1)
        self.core = Scheduler(limits, num_blocks=1000, block_size=4, terms_of=terms_of, policy=policy)
        self.core.executor_attached(1, 1000)
        self.waits = WaitPrediction()
        self.predicts = predicts
        self.step_s = step_s
        self.now_s = 0.0
        self.num_good_tokens = 0
        self.num_lost_tokens = 0
        self.num_refused = 0
        self.num_requests = 0
        self.random = Random(0)

    def arrive(self, deadline_s: float | None, tenant: str = "default", priority: int = 0) -> None:
        self.num_requests += 1
        prompt = [self.random.randrange(1000) for _ in range(self.random.randint(1, 40))]
        params = SequenceParams(max_total_tokens=len(prompt) + self.random.randint(10, 60))
        request = Request(self.num_requests, prompt, params, deadline_s=deadline_s, tenant=tenant, priority=priority)
        try:
            if self.predicts:
                self.waits.check(self.core, tenant, deadline_s, request.max_tokens, self.now_s, priority)
            self.core.add(request, self.now_s)
        except QueueFull:
            self.num_refused += 1

    def step(self) -> None:
        self.tell(self.core.expire(self.now_s))
        plan = self.core.schedule()
        self.now_s += self.step_s(self.now_s)
        if plan is None:
            return
        num_sampled = len(self.core.state.in_flight[-1].sampled)
        self.tell(self.core.commit(StepResult(plan.epoch, plan.step_id, [7] * num_sampled)))

    def tell(self, events: Events) -> None:
        if self.predicts:
            self.waits.committed(self.core, events, self.now_s)
        for sequence, reason in events.finished:
            num_tokens = sequence.num_tokens - sequence.num_prompt_tokens
            if reason is FinishReason.LENGTH:
                self.num_good_tokens += num_tokens
            else:
                self.num_lost_tokens += num_tokens


def good_tokens(
    load: float, deadline_s: float | None, *, predicts: bool, step_s: StepTime = lambda now_s: STEP_S
) -> Server:
    """Returns a server after 60 s with `load` times as many requests as it can serve, about 22 a second."""
    server = Server(predicts=predicts, step_s=step_s)
    due, last_s = 0.0, 0.0
    while server.now_s < 60:
        due += 22 * load * (server.now_s - last_s)
        last_s = server.now_s
        while due >= 1:
            due -= 1
            server.arrive(None if deadline_s is None else server.now_s + deadline_s)
        server.step()
    return server


SPEEDS: dict[str, StepTime] = {
    "steady": lambda now_s: STEP_S,
    "slower from the middle on": lambda now_s: STEP_S * (1.0 if now_s < 30 else 2.0),
    "slow every other second": lambda now_s: STEP_S * (1.0 + int(now_s) % 2),
    "stalls": lambda now_s: 0.3 if int(now_s * 100) % 150 == 0 else STEP_S,
}


@pytest.mark.parametrize("deadline_s", [2.0, 4.0])
@pytest.mark.parametrize("speed", SPEEDS)
def test_under_three_times_overload_about_nine_tenths_of_the_capacity_are_good(speed: str, deadline_s: float) -> None:
    """The longest request needs 0.6 s on the faster server."""
    capacity = good_tokens(3, None, predicts=False, step_s=SPEEDS[speed]).num_good_tokens
    served = good_tokens(3, deadline_s, predicts=True, step_s=SPEEDS[speed])
    assert served.num_good_tokens >= 0.88 * capacity
    assert served.num_lost_tokens <= 0.12 * capacity
    assert served.num_refused > served.num_requests / 2


def test_an_idle_server_refuses_nothing() -> None:
    server = good_tokens(0.5, 2.0, predicts=True)
    assert server.num_refused == 0


def test_without_measurements_nothing_is_refused() -> None:
    server = Server(predicts=True)
    for _ in range(500):
        server.arrive(0.001)
    assert server.num_refused == 0


def test_a_pause_without_requests_does_not_count_as_slow_service() -> None:
    server = good_tokens(3, 2.0, predicts=True)
    while server.core.num_unfinished_requests:
        server.step()
    server.now_s += 3600
    server.arrive(server.now_s + 2)
    for _ in range(20):
        server.arrive(server.now_s + 2)
    assert server.waits.predicted_s(server.core, "default", 19) < 2


def test_a_time_without_an_executor_does_not_count_as_slow_service() -> None:
    server = Server(predicts=True)
    while server.now_s < 5:
        for _ in range(4):
            server.arrive(None)
        server.step()
    server.waits.committed(server.core, server.core.executor_lost(server.now_s), server.now_s)
    server.now_s += 100
    server.waits.committed(server.core, server.core.expire(server.now_s), server.now_s)
    assert server.core.num_waiting
    server.arrive(server.now_s + 1.0)
    assert server.num_refused == 0


def test_a_long_prompt_that_takes_minutes_does_not_count_as_slow_service() -> None:
    """Its tokens count as they are computed: at once they would be forgotten before it ends, and the rate be zero.

    Nor do its steps of a second, in which nothing decodes, say how fast a short request would decode.
    """
    server = good_tokens(1.5, None, predicts=True)
    while server.core.num_unfinished_requests:
        server.step()
    server.core.add(Request(1 << 30, [7] * 3_950, SequenceParams(max_total_tokens=3_960)), server.now_s)
    server.step_s = lambda now_s: 1.0
    server.step()
    for _ in range(10):
        server.arrive(None)
    predicted_s = []
    while server.core.state.batch.prefilling:
        server.step()
        assert server.core.num_waiting == 10, "the pool has no blocks for others"
        predicted_s.append(server.waits.predicted_s(server.core, "default", 60))
    assert len(predicted_s) > 50
    assert max(predicted_s) < 20, "64 tokens a second, and 10 waiting requests of up to 40 prompt tokens"


def test_a_tenant_waits_for_its_own_queue_and_not_for_that_of_another() -> None:
    server = good_tokens(3, None, predicts=True)
    greedy, modest = (server.waits.predicted_s(server.core, tenant, 19) for tenant in ("default", "modest"))
    assert greedy > 10 * modest > 0
    with pytest.raises(QueueFull, match="miss its deadline") as refusal:
        server.waits.check(server.core, "default", server.now_s + 1, 19, server.now_s)
    assert refusal.value.retry_after_s > 1


def test_a_tenant_waits_for_those_before_it_by_priority_and_not_for_those_behind_it() -> None:
    terms = {"urgent": TenantTerms(priority=-1), "late": TenantTerms(priority=1)}
    server = Server(predicts=True, terms_of=lambda tenant: terms.get(tenant, TenantTerms()))
    while server.now_s < 10:
        for tenant in ("usual", "usual", "urgent", "late"):
            if len(server.core.state.waiting.of(server.core.state.accounts.of(tenant))) < 20:
                server.arrive(None, tenant)
        server.step()
    urgent, usual, late = (server.waits.predicted_s(server.core, each, 20) for each in ("urgent", "usual", "late"))
    assert usual == pytest.approx(2 * urgent, rel=0.4)
    assert late == pytest.approx(3 * urgent, rel=0.4)


def test_an_urgent_request_is_not_refused_for_the_queue_behind_it() -> None:
    """Under the priority policy it is admitted before them, so it met its deadline if it was not refused."""
    server = Server(predicts=True, policy=PRIORITY)
    while server.now_s < 5:
        if server.core.num_waiting < 100:
            server.arrive(None, priority=1)
        server.step()
    urgent, usual, late = (server.waits.predicted_s(server.core, DEFAULT_TENANT, 60, rank) for rank in (0, 1, 2))
    assert usual == late > 3.0
    assert urgent < 1.0
    server.arrive(server.now_s + 2.0, priority=0)
    assert server.num_refused == 0
    first = next(iter(server.core.state.waiting))
    assert first.request.priority == 0
    while server.core.has_request(first.request.request_id):
        server.step()
    assert server.num_lost_tokens == 0, "it ended before its deadline"
    server.arrive(server.now_s + 2.0, priority=1)
    assert server.num_refused == 1


def test_the_first_in_first_out_policy_ignores_priorities_in_predictions() -> None:
    server = good_tokens(3, None, predicts=True)
    urgent, usual = (server.waits.predicted_s(server.core, DEFAULT_TENANT, 60, priority) for priority in (-1, 0))
    assert urgent == usual > 0


def test_a_stream_that_is_nearly_complete_is_not_refused_for_the_time_of_a_whole_output() -> None:
    """All streams of a lost scheduler come back at once, so others wait, and their deadlines are near."""
    server = good_tokens(3, 2.0, predicts=True)
    params, received = SequenceParams(max_total_tokens=61), [7] * 58
    rest_s, whole_s = (MARGIN * server.waits.predicted_s(server.core, DEFAULT_TENANT, number) for number in (2, 60))
    assert rest_s < whole_s
    deadline_s = server.now_s + (rest_s + whole_s) / 2

    def check(*outputs: ReceivedOutput) -> None:
        request = Request(0, [5], params, (0,) * max(1, len(outputs)), outputs=outputs)
        server.waits.check(server.core, DEFAULT_TENANT, deadline_s, request.max_tokens, server.now_s)

    check(ReceivedOutput(received))
    check(ReceivedOutput(received), ReceivedOutput(is_finished=True))
    with pytest.raises(QueueFull):
        check()
    with pytest.raises(QueueFull):
        check(ReceivedOutput(received), ReceivedOutput())


def test_requests_that_end_in_the_queue_do_not_count_as_outputs() -> None:
    server = Server(predicts=True)
    server.arrive(None)
    sequence = next(iter(server.core.state.waiting))
    server.waits.committed(server.core, Events(finished=[(sequence, FinishReason.DEADLINE)]), 1.0)
    assert server.waits._num_output_tokens is None


def test_a_server_of_beam_searches_learns_how_long_outputs_are() -> None:
    server = Server(predicts=True)
    server.core.add(Request(1, [7], SequenceParams(max_total_tokens=5), beam=BeamParams(1, 1)), 0.0)
    while server.core.num_unfinished_requests:
        plan = server.core.schedule()
        assert plan is not None
        candidates = Logprobs([0, 1], [-1.0, -2.0])
        server.tell(server.core.commit(StepResult(plan.epoch, plan.step_id, [], candidates=candidates)))
    assert server.waits._num_output_tokens == 4


def test_the_age_of_the_queue_is_not_looked_up_for_each_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look visits the whole queue, and every client may ask."""
    looks = []
    monkeypatch.setattr(wait_prediction, "oldest_waiting_s", lambda core, now_s: looks.append(now_s) or now_s - 1.0)
    server = Server(predicts=False)
    assert server.waits.oldest_s(server.core, 5.0) == 0.0
    server.arrive(None)
    ages = [server.waits.oldest_s(server.core, 5.0 + i / 100) for i in range(100)]
    assert ages == pytest.approx([4.0 + i / 100 for i in range(100)])
    assert len(looks) == 4


@pytest.mark.parametrize("stall_s", [30.0, 57.0, 104.0, 1000.0])
def test_an_executor_that_stands_still_makes_requests_wait_for_a_bounded_time(stall_s: float) -> None:
    """While it does, the measured rate goes to zero."""
    server = good_tokens(3, None, predicts=True)
    server.core.schedule()
    server.now_s += stall_s
    server.tell(server.core.expire(server.now_s))
    with pytest.raises(QueueFull) as refused:
        server.waits.check(server.core, "default", server.now_s + 30.0, 20, server.now_s)
    assert 0 < refused.value.retry_after_s <= 2 * wait_prediction.MAX_WAIT_S


@pytest.mark.parametrize("num_shared", [0, 360])
def test_cached_prompt_tokens_in_the_queue_are_no_service_to_come(num_shared: int) -> None:
    assert waited_in_relation_to_prediction(num_shared=num_shared) == pytest.approx(1.0, abs=0.3)


@pytest.mark.parametrize("num_samples", [2, 8])
def test_all_samples_of_the_requests_in_the_queue_are_service_to_come(num_samples: int) -> None:
    assert waited_in_relation_to_prediction(num_samples=num_samples) == pytest.approx(1.0, abs=0.3)


def waited_in_relation_to_prediction(num_shared: int = 360, num_samples: int = 1) -> float:
    """Returns how long a request at the end of a queue of 20 took, divided by what was predicted."""
    server, random = Server(predicts=True), Random(0)
    number, started_s, predicted_s = 0, 0.0, 0.0
    while not started_s or server.core.has_request(number):
        while server.core.num_waiting < 20 and not started_s:
            number += 1
            prompt = [7] * num_shared + random.choices(range(1000), k=400 - num_shared)
            params, seeds = SequenceParams(max_total_tokens=420), tuple(range(num_samples))
            server.core.add(Request(number, prompt, params, seeds=seeds), server.now_s)
        server.step()
        if server.now_s > 5 and not started_s:
            started_s, predicted_s = server.now_s, server.waits.predicted_s(server.core, "default", 20)
    return (server.now_s - started_s) / predicted_s
