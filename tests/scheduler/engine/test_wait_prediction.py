"""Requests that cannot meet their deadline are refused at once. Time is that of a virtual clock."""

from random import Random

import pytest

from scheduler.core import (
    Events,
    FinishReason,
    QueueFull,
    Request,
    Scheduler,
    SchedulerLimits,
    SequenceParams,
    StepResult,
)
from scheduler.engine.wait_prediction import WaitPrediction

STEP_S = 0.01


class Server:
    """A core whose steps take STEP_S each, and that refuses by prediction if `predicts`."""

    def __init__(self, *, predicts: bool) -> None:
        limits = SchedulerLimits(8, 64, 400, max_in_flight=1)
        self.core = Scheduler(limits, num_blocks=1000, block_size=4)
        self.core.executor_attached(1, 1000)
        self.waits = WaitPrediction()
        self.predicts = predicts
        self.now_s = 0.0
        self.num_good_tokens = 0
        self.num_refused = 0
        self.num_requests = 0
        self.random = Random(0)

    def arrive(self, deadline_s: float | None, tenant: str = "default") -> None:
        self.num_requests += 1
        prompt = [self.random.randrange(1000) for _ in range(self.random.randint(1, 40))]
        params = SequenceParams(max_total_tokens=len(prompt) + self.random.randint(10, 60))
        request = Request(self.num_requests, prompt, params, deadline_s=deadline_s, tenant=tenant)
        try:
            if self.predicts:
                self.waits.check(self.core, request, self.now_s)
            self.core.add(request, self.now_s)
        except QueueFull:
            self.num_refused += 1

    def step(self) -> None:
        self.waits.committed(self.core, self.core.expire(self.now_s), self.now_s)
        plan = self.core.schedule()
        self.now_s += STEP_S
        if plan is None:
            return
        num_sampled = len(self.core.state.in_flight[-1].sampled)
        events = self.core.commit(StepResult(plan.epoch, plan.step_id, [7] * num_sampled))
        self.waits.committed(self.core, events, self.now_s)
        for sequence, reason in events.finished:
            if reason is FinishReason.LENGTH:
                self.num_good_tokens += sequence.num_tokens - sequence.num_prompt_tokens


def good_tokens(load: float, deadline_s: float | None, *, predicts: bool) -> Server:
    """Returns a server after 60 s with `load` times as many requests as it can serve, about 22 a second."""
    server = Server(predicts=predicts)
    due = 0.0
    while server.now_s < 60:
        due += 22 * load * STEP_S
        while due >= 1:
            due -= 1
            server.arrive(None if deadline_s is None else server.now_s + deadline_s)
        server.step()
    return server


def test_under_three_times_overload_nine_tenths_of_the_capacity_are_good() -> None:
    capacity = good_tokens(3, None, predicts=False).num_good_tokens
    served = good_tokens(3, 2.0, predicts=True)
    assert served.num_good_tokens >= 0.9 * capacity
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
    assert server.waits.predicted_s(server.core, Request(9999, [1], SequenceParams(max_total_tokens=20))) < 2


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


def test_a_tenant_waits_for_its_own_queue_and_not_for_that_of_another() -> None:
    server = good_tokens(3, None, predicts=False)
    greedy, modest = (
        Request(99999, [1], SequenceParams(max_total_tokens=20), tenant=tenant) for tenant in ("default", "modest")
    )
    assert server.waits.predicted_s(server.core, greedy) > 10 * server.waits.predicted_s(server.core, modest) > 0
    request = Request(99999, [1], SequenceParams(max_total_tokens=20), deadline_s=server.now_s + 1)
    with pytest.raises(QueueFull, match="miss its deadline") as refusal:
        server.waits.check(server.core, request, server.now_s)
    assert refusal.value.retry_after_s > 1


def test_requests_that_end_in_the_queue_do_not_count_as_outputs() -> None:
    server = Server(predicts=True)
    server.arrive(None)
    sequence = next(iter(server.core.state.waiting))
    server.waits.committed(server.core, Events(finished=[(sequence, FinishReason.DEADLINE)]), 1.0)
    assert server.waits._num_output_tokens is None
