"""Tests that the engine fails all requests and replaces the core when the core violates an invariant."""

import asyncio

import pytest

from scheduler.core import (
    Events,
    FinishReason,
    InvariantViolation,
    Request,
    SequenceParams,
    StepResult,
    TokenLogprobs,
    commit,
)
from scheduler.core.state import SchedulerState
from scheduler.core.step import Step
from scheduler.engine.engine import Engine, ServerState
from tests.support.core.fake_executor import expected_output
from tests.support.scheduler.engine_rig import RecordingSink, running_engine, submit
from tests.support.scheduler.fake_client import DESCRIPTION, FakeClient
from tests.support.waiting import until


def break_a_commit(patch: pytest.MonkeyPatch, number: int) -> None:
    """Makes the commit of this number fail after it has added its tokens, and before the clients receive them."""
    end_sequences, num_commits = commit._end_sequences, 0

    def broken(state: SchedulerState, step: Step, result: StepResult, events: Events) -> None:
        nonlocal num_commits
        num_commits += 1
        if num_commits == number:
            raise InvariantViolation("on purpose")
        end_sequences(state, step, result, events)

    patch.setattr(commit, "_end_sequences", broken)


def check_no_gap(sink: RecordingSink) -> None:
    """Checks that each sequence has all its tokens, or the first of them and an error."""
    for index, seed in enumerate(sink.request.seeds):
        prompt = list(sink.request.prompt_token_ids)
        token_ids, reason = expected_output(prompt, sink.request.params, seed, DESCRIPTION.vocab_size)
        output = sink.outputs.get(index, [])
        assert output == token_ids[: len(output)]
        if not sink.has_failed:
            assert (output, sink.reasons[index]) == (token_ids, reason)


@pytest.mark.parametrize("number", [1, 4, 10, 20])
async def test_no_output_has_a_gap_after_an_invariant_violation(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """All requests fail at once: running ones, waiting ones, and those whose end was not told yet."""
    break_a_commit(monkeypatch, number)
    async with running_engine(FakeClient(), max_num_seqs=6) as engine:
        sinks = [submit(engine, [i, 2, 3], 8 + i, seeds=(i, i + 1)) for i in range(8)]
        for sink in sinks:
            await asyncio.wait_for(sink.done.wait(), 10)
            check_no_gap(sink)
        assert any(sink.has_failed for sink in sinks)
        await submit(engine, [1, 2, 3]).check()
        await asyncio.wait_for(engine.drain(), 10)


async def test_a_sample_that_has_ended_keeps_its_reason_when_its_request_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_engine(FakeClient()) as engine:
        sink = submit(engine, [1, 2, 3], 50, seeds=(1, 2))
        await sink.first_token.wait()
        engine.stop(sink.request.request_id, 0)
        break_a_commit(monkeypatch, 1)
        await asyncio.wait_for(sink.done.wait(), 10)
        assert (sink.reasons[0], sink.has_failed) == (FinishReason.STOP, True)


def break_the_next_call(patch: pytest.MonkeyPatch, verb: str) -> None:
    """Makes the next call of this method of the core's state raise without changing anything."""
    whole = getattr(SchedulerState, verb)

    def broken(state: SchedulerState, *arguments: object) -> object:
        patch.setattr(SchedulerState, verb, whole)
        raise InvariantViolation("on purpose")

    patch.setattr(SchedulerState, verb, broken)


async def check_all_fail_and_the_core_is_replaced(engine: Engine, sinks: list[RecordingSink]) -> None:
    broken_core = engine.core
    for sink in sinks:
        await asyncio.wait_for(sink.done.wait(), 10)
        assert sink.has_failed
        check_no_gap(sink)
    await submit(engine, [1, 2, 3]).check()
    assert engine.core is not broken_core
    await asyncio.wait_for(engine.drain(), 10)


async def test_a_bug_found_by_cancel_fails_all_requests_but_not_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_engine(FakeClient()) as engine:
        cancelled, *others = [submit(engine, [i, 2, 3], 150) for i in range(3)]
        await cancelled.first_token.wait()
        break_the_next_call(monkeypatch, "end_request")
        engine.cancel(cancelled.request.request_id)
        await check_all_fail_and_the_core_is_replaced(engine, others)
        assert not cancelled.done.is_set(), "its sink receives no more events"


class StoppingSink(RecordingSink):
    """Stops its sequence at the first token, as a response stream does when a stop string is complete."""

    engine: Engine

    def tokens(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs] | None = None) -> None:
        super().tokens(index, token_ids, logprobs)
        self.engine.stop(self.request.request_id, index)


async def test_a_bug_found_by_stop_fails_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_engine(FakeClient()) as engine:
        other = submit(engine, [1, 2, 3], 150)
        await other.first_token.wait()
        break_the_next_call(monkeypatch, "finish")
        params = SequenceParams(max_total_tokens=150)
        stopping = StoppingSink(Request(engine.new_request_id(), [4, 5], params))
        stopping.engine = engine
        engine.submit(stopping.request, stopping)
        await check_all_fail_and_the_core_is_replaced(engine, [other, stopping])


async def test_a_bug_found_while_there_is_no_executor_fails_all_requests_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = FakeClient()
    async with running_engine(client, max_backoff_s=60.0) as engine:
        client.is_up = False
        client.lose()
        await until(lambda: engine.state is ServerState.WAITING_FOR_EXECUTOR)
        cancelled, other = submit(engine, [1]), submit(engine, [2])
        await asyncio.sleep(0.3)  # the pauses between attempts have grown by now
        break_the_next_call(monkeypatch, "end_request")
        engine.cancel(cancelled.request.request_id)
        await asyncio.wait_for(other.done.wait(), 0.2)
        assert other.has_failed


async def test_a_bug_found_when_the_executor_is_lost_does_not_stop_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient()
    async with running_engine(client) as engine:
        sink = submit(engine, [1, 2, 3], 150)
        await sink.first_token.wait()
        break_the_next_call(monkeypatch, "lose_executor")
        client.lose()
        await check_all_fail_and_the_core_is_replaced(engine, [sink])
