"""Unexpected errors fail all requests, and not the engine. An engine that does nothing but fail gives up."""

import asyncio
import errno
import logging
import math
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from scheduler.core import BeamParams, FinishReason, Request, Scheduler, SequenceParams, StepResult
from scheduler.core.inspect.invariants import check_invariants
from scheduler.engine.dispatcher import EventDispatcher
from scheduler.engine.engine import Engine, ServerState
from scheduler.engine.failures import MAX_FAILURES, WINDOW_S, Failures
from scheduler.telemetry.metrics import SchedulerMetrics
from tests.support.core.fake_executor import expected_output
from tests.support.scheduler.engine_rig import RecordingSink, engine_options, running_engine, submit
from tests.support.scheduler.fake_client import DESCRIPTION, FakeClient, FakeStream
from tests.support.waiting import until

ERRORS = [MemoryError(), OSError(errno.EMFILE, "too many open files"), RuntimeError("on purpose")]
PLACES: list[tuple[type, str]] = [
    (Scheduler, "schedule"),
    (Scheduler, "commit"),
    (Scheduler, "expire"),
    (FakeStream, "send"),
    (FakeStream, "take"),
    (EventDispatcher, "dispatch"),
]


def break_call(patch: pytest.MonkeyPatch, place: tuple[type, str], error: Exception, number: int = 1) -> None:
    """Makes one call of a method raise an error, or every call if `number` is 0. Other calls do what they did."""
    owner, name = place
    whole, num_calls = getattr(owner, name), 0

    def broken(self: object, *arguments: Any, **options: Any) -> object:
        nonlocal num_calls
        num_calls += 1
        if number in (0, num_calls):
            raise error
        return whole(self, *arguments, **options)

    patch.setattr(owner, name, broken)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0].__name__}.{place[1]}")
async def test_an_unexpected_error_fails_all_requests_and_the_engine_serves_again(
    monkeypatch: pytest.MonkeyPatch, place: tuple[type, str], error: Exception
) -> None:
    async with running_engine(FakeClient()) as engine:
        sinks = [submit(engine, [i, 2, 3], 150) for i in range(3)]
        await sinks[0].first_token.wait()
        break_call(monkeypatch, place, error, number=3)
        for sink in sinks:
            await asyncio.wait_for(sink.done.wait(), 10)
            assert sink.has_failed
        await submit(engine, [1, 2, 3]).check()
        assert engine.failures.num_failures == 1
        assert engine.state is ServerState.SERVING


@pytest.mark.parametrize("verb", ["add", "cancel", "stop"])
async def test_an_error_in_a_call_of_a_client_fails_all_requests(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    async with running_engine(FakeClient()) as engine:
        other, mine = submit(engine, [1, 2, 3], 150), submit(engine, [4, 5], 150)
        await mine.first_token.wait()
        break_call(monkeypatch, (Scheduler, verb), MemoryError())
        calls: dict[str, Callable[[], object]] = {
            "add": lambda: submit(engine, [1]),
            "cancel": lambda: engine.cancel(mine.request.request_id),
            "stop": lambda: engine.stop(mine.request.request_id, 0),
        }
        if verb == "add":
            with pytest.raises(MemoryError):
                calls[verb]()
        else:
            calls[verb]()
        await asyncio.wait_for(other.done.wait(), 10)
        assert other.has_failed
        await submit(engine, [1, 2, 3]).check()


async def test_an_observer_of_the_state_that_raises_does_not_end_the_engine(
    caplog: pytest.LogCaptureFixture, counted: Callable[[], dict[str, int]]
) -> None:
    """The line `ready …` is printed by such an observer, perhaps to a pipe without a reader."""

    def broken(state: ServerState) -> None:
        raise BrokenPipeError(errno.EPIPE, "closed")

    engine = Engine(FakeClient(), engine_options())  # type: ignore[arg-type]  # it has the same methods
    engine.on_state_change(broken)
    task = asyncio.create_task(engine.run())
    await asyncio.wait_for(engine.described(), 10)
    await submit(engine, [1, 2, 3]).check()
    assert "an observer of the server's state failed" in caplog.text
    task.cancel()
    assert counted() == {"state_observer": 1}


@pytest.mark.parametrize("error", ERRORS, ids=repr)
async def test_an_engine_that_always_fails_gives_up_and_is_not_ready(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    engine = Engine(FakeClient(), engine_options())  # type: ignore[arg-type]  # it has the same methods
    break_call(monkeypatch, (Scheduler, "expire"), error, number=0)
    with pytest.raises(type(error)):
        await asyncio.wait_for(engine.run(), WINDOW_S)
    assert engine.failures.num_failures == MAX_FAILURES
    assert engine.state is ServerState.WAITING_FOR_EXECUTOR


async def test_a_core_that_cannot_be_replaced_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(FakeClient(), engine_options())  # type: ignore[arg-type]  # it has the same methods
    running = asyncio.create_task(engine.run())
    await asyncio.wait_for(engine.described(), 10)
    sink = submit(engine, [1, 2, 3], 150)
    await sink.first_token.wait()
    monkeypatch.setattr(type(engine._options), "new_core", lambda *_: 1 / 0)
    break_call(monkeypatch, (Scheduler, "commit"), RuntimeError("on purpose"))
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(running, WINDOW_S)
    assert sink.has_failed


async def test_cancellation_passes_through() -> None:
    engine = Engine(FakeClient(), engine_options())  # type: ignore[arg-type]  # it has the same methods
    task = asyncio.create_task(engine.run())
    await asyncio.wait_for(engine.described(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.failures.num_failures == 0


def test_failures_between_committed_steps_never_end_the_engine() -> None:
    failures = Failures()
    assert all(failures.add(RuntimeError("x"), number * 0.1, has_committed=True) for number in range(100))


def test_only_failures_close_together_end_the_engine() -> None:
    failures = Failures()
    apart_s = WINDOW_S / (MAX_FAILURES - 1)
    assert all(failures.add(RuntimeError("x"), number * apart_s, has_committed=False) for number in range(100))
    failures = Failures()
    goes_on = [failures.add(RuntimeError("x"), number * 0.9 * apart_s, has_committed=False) for number in range(5)]
    assert goes_on == [True, True, True, True, False]


def test_one_failure_in_ten_seconds_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures()
    with caplog.at_level(logging.CRITICAL):
        for number in range(250):
            failures.add(RuntimeError(f"number {number}"), number * 0.1, has_committed=True)
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "the engine failed: RuntimeError: number 0",
        "the engine failed, after 99 more that were not logged: RuntimeError: number 100",
        "the engine failed, after 99 more that were not logged: RuntimeError: number 200",
    ]


async def test_failures_are_counted_in_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = SchedulerMetrics()
    async with running_engine(FakeClient()) as engine:
        metrics.engine = engine
        assert b"quire_engine_failures_total{" in metrics.render()
        break_call(monkeypatch, (Scheduler, "commit"), RuntimeError("on purpose"))
        sink = submit(engine, [1, 2, 3], 150)
        await asyncio.wait_for(sink.done.wait(), 10)
        lines = metrics.render().decode().splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("quire_engine_failures_total{")] == ["1.0"]


async def test_a_sequence_without_finite_logits_fails_its_request_and_no_other() -> None:
    """Its last token has no meaning and reaches no client. The other samples of the request end with it."""
    client = FakeClient()
    num_steps = 0

    def alter(result: StepResult) -> StepResult:
        nonlocal num_steps
        num_steps += 1
        if num_steps != 4:
            return result
        reasons: list[FinishReason | None] = [FinishReason.NOT_FINITE, *[None] * (len(result.token_ids) - 1)]
        return replace(result, end_reasons=reasons)

    client.alter = alter
    async with running_engine(client) as engine:
        failing = submit(engine, [1, 2, 3], 150, seeds=(1, 2))
        others = [submit(engine, [i, 5], 20) for i in range(3)]
        await asyncio.wait_for(failing.done.wait(), 10)
        assert failing.has_failed
        assert failing.reasons == {0: FinishReason.NOT_FINITE}
        expected, _ = expected_output([1, 2, 3], failing.request.params, 1, DESCRIPTION.vocab_size)
        assert failing.outputs.get(0, []) == expected[: len(failing.outputs.get(0, []))]
        for other in others:
            await other.check()
        assert engine.core is not None
        await until(lambda: engine.core is not None and not engine.core.num_unfinished_requests)
        assert engine.failures.num_failures == 0


@pytest.mark.parametrize("step", [1, 3])
async def test_a_beam_without_finite_logits_fails_its_search_and_no_other_request(step: int) -> None:
    """The executor marks its candidates: NaN. It may be the first beam, or one of several."""
    client, num_steps = FakeClient(), 0

    def alter(result: StepResult) -> StepResult:
        nonlocal num_steps
        num_steps += result.candidates is not None
        if num_steps != step or result.candidates is None:
            return result
        values = array("f", result.candidates.values)
        values[-8:] = array("f", [math.nan] * 8)  # those of the last beam
        return replace(result, candidates=replace(result.candidates, values=values))

    client.alter = alter
    async with running_engine(client) as engine:
        failing = submit(engine, [1, 2, 3], 30, beam=BeamParams(4, 2))
        others = [submit(engine, [i, 5], 20) for i in range(3)]
        await asyncio.wait_for(failing.done.wait(), 10)
        assert failing.reasons == {0: FinishReason.NOT_FINITE}
        assert failing.outputs == {}
        for other in others:
            await other.check()
        await until(lambda: engine.core is not None and not engine.core.num_unfinished_requests)
        assert engine.core is not None
        pool = engine.core.state.cache.pool
        check_invariants(engine.core)
        await until(lambda: pool.num_free_blocks == pool.num_usable_blocks)
        assert engine.failures.num_failures == 0


async def test_a_prompt_without_finite_logits_fails_its_request_and_no_other() -> None:
    client = FakeClient()

    def alter(result: StepResult) -> StepResult:
        if (reported := result.prompt_logprobs) is None:
            return result
        return replace(result, prompt_logprobs=replace(reported, values=array("f", [math.nan] * len(reported.values))))

    client.alter = alter
    async with running_engine(client) as engine:
        params = SequenceParams(max_total_tokens=33, num_prompt_logprobs=2)
        request = Request(engine.new_request_id(), [1, 2, 3], params)
        failing = RecordingSink(request)
        engine.submit(request, failing)
        others = [submit(engine, [i, 5], 20) for i in range(3)]
        await asyncio.wait_for(failing.done.wait(), 10)
        assert failing.reasons == {0: FinishReason.NOT_FINITE}
        assert failing.outputs == {}
        assert failing.prompt == []
        for other in others:
            await other.check()
        await until(lambda: engine.core is not None and not engine.core.num_unfinished_requests)
        assert engine.failures.num_failures == 0


@pytest.mark.parametrize("event", ["started", "tokens", "finished"])
async def test_the_request_of_a_broken_sink_fails_and_its_sink_is_told(
    event: str, monkeypatch: pytest.MonkeyPatch, counted: Callable[[], dict[str, int]]
) -> None:
    """Its client waits for the sink, so it would wait for ever if only the core knew."""
    async with running_engine(FakeClient()) as engine:
        broken, other = submit(engine, [1, 2, 3], 5), submit(engine, [4, 5], 50)
        with monkeypatch.context() as patch:
            break_call(patch, (RecordingSink, event), MemoryError())
            await asyncio.wait_for(broken.done.wait(), 10)
        assert broken.has_failed
        await other.check()
        assert engine.failures.num_failures == 0
    assert counted() == {"sink": 1}


async def test_a_jump_of_the_wall_clock_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_engine(FakeClient()) as engine:
        sinks = [submit(engine, [i, 2, 3], 150, deadline_s=time.monotonic() + 1000) for i in range(3)]
        for jump_s in (-1e9, 1e9):
            await sinks[0].first_token.wait()
            monkeypatch.setattr(time, "time", lambda jump_s=jump_s: 1.7e9 + jump_s)
            await asyncio.sleep(0.02)
        for sink in sinks:
            await sink.check()
