"""The engine when something is wrong: with the core, with the executor, or with who else uses it."""

import asyncio
import time
from dataclasses import replace

import pytest

from scheduler.core import (
    Events,
    FinishReason,
    InvariantViolation,
    Request,
    SequenceParams,
    StepResult,
    TokenLogprobs,
    Unavailable,
    commit,
)
from scheduler.core.state import SchedulerState
from scheduler.core.step import Step
from scheduler.engine.engine import Engine, EngineOptions, ServerState
from tests.support.core.fake_executor import expected_output
from tests.support.scheduler.engine_rig import RecordingSink, running_engine, submit, until
from tests.support.scheduler.fake_client import DESCRIPTION, FakeClient


def break_a_commit(patch: pytest.MonkeyPatch, number: int) -> None:
    """The commit of this number breaks off when its tokens are in the books, and before anybody heard of them."""
    end_sequences, num_commits = commit._end_sequences, 0

    def broken(state: SchedulerState, step: Step, result: StepResult, events: Events) -> None:
        nonlocal num_commits
        num_commits += 1
        if num_commits == number:
            raise InvariantViolation("on purpose")
        end_sequences(state, step, result, events)

    patch.setattr(commit, "_end_sequences", broken)


def check_no_gap(sink: RecordingSink) -> None:
    """Each sequence has all its tokens, or the first of them and an error."""
    for index, seed in enumerate(sink.request.seeds):
        prompt = list(sink.request.prompt_token_ids)
        token_ids, reason = expected_output(prompt, sink.request.params, seed, DESCRIPTION.vocab_size)
        output = sink.outputs.get(index, [])
        assert output == token_ids[: len(output)]
        if not sink.has_failed:
            assert (output, sink.reasons[index]) == (token_ids, reason)


@pytest.mark.parametrize("number", [1, 4, 10, 20])
async def test_no_stream_goes_on_with_a_gap_after_a_bug_of_ours(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """It fails, and at once: who runs, who waits, and who ended with what was not told."""
    break_a_commit(monkeypatch, number)
    async with running_engine(FakeClient(), max_num_seqs=6) as engine:
        sinks = [submit(engine, [i, 2, 3], 8 + i, seeds=(i, i + 1)) for i in range(8)]
        for sink in sinks:
            await asyncio.wait_for(sink.done.wait(), 10)
            check_no_gap(sink)
        assert any(sink.has_failed for sink in sinks)
        await submit(engine, [1, 2, 3]).check()
        await asyncio.wait_for(engine.drain(), 10)


async def test_a_sample_that_has_ended_stays_ended_when_its_request_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_engine(FakeClient()) as engine:
        sink = submit(engine, [1, 2, 3], 50, seeds=(1, 2))
        await sink.first_token.wait()
        engine.stop(sink.request.request_id, 0)
        break_a_commit(monkeypatch, 1)
        await asyncio.wait_for(sink.done.wait(), 10)
        assert (sink.reasons[0], sink.has_failed) == (FinishReason.STOP, True)


def break_the_books(patch: pytest.MonkeyPatch, verb: str) -> None:
    """The next call of this method of the books changes nothing, and raises."""
    whole = getattr(SchedulerState, verb)

    def broken(state: SchedulerState, *arguments: object) -> object:
        patch.setattr(SchedulerState, verb, whole)
        raise InvariantViolation("on purpose")

    patch.setattr(SchedulerState, verb, broken)


async def check_all_fail_and_it_begins_anew(engine: Engine, sinks: list[RecordingSink]) -> None:
    broken_core = engine.core
    for sink in sinks:
        await asyncio.wait_for(sink.done.wait(), 10)
        assert sink.has_failed
        check_no_gap(sink)
    await submit(engine, [1, 2, 3]).check()
    assert engine.core is not broken_core
    await asyncio.wait_for(engine.drain(), 10)


async def test_a_bug_that_a_cancel_finds_fails_all_requests_and_not_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_engine(FakeClient()) as engine:
        gone, *others = [submit(engine, [i, 2, 3], 150) for i in range(3)]
        await gone.first_token.wait()
        break_the_books(monkeypatch, "end_request")
        engine.cancel(gone.request.request_id)
        await check_all_fail_and_it_begins_anew(engine, others)
        assert not gone.done.is_set(), "it hears nothing more"


class StoppingSink(RecordingSink):
    """As a stream with a stop string, which its first token completes: told of a step, it ends its sequence."""

    engine: Engine

    def tokens(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs] | None = None) -> None:
        super().tokens(index, token_ids, logprobs)
        self.engine.stop(self.request.request_id, index)


async def test_a_bug_that_a_stop_string_finds_fails_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_engine(FakeClient()) as engine:
        other = submit(engine, [1, 2, 3], 150)
        await other.first_token.wait()
        break_the_books(monkeypatch, "finish")
        params = SequenceParams(max_total_tokens=150)
        stopping = StoppingSink(Request(engine.new_request_id(), [4, 5], params))
        stopping.engine = engine
        engine.submit(stopping.request, stopping)
        await check_all_fail_and_it_begins_anew(engine, [other, stopping])


async def test_a_bug_that_is_found_while_there_is_no_executor_fails_all_requests_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = FakeClient()
    async with running_engine(client, max_backoff_s=60.0) as engine:
        client.is_up = False
        client.lose()
        await until(lambda: engine.state is ServerState.WAITING_FOR_EXECUTOR)
        gone, other = submit(engine, [1]), submit(engine, [2])
        await asyncio.sleep(0.3)  # it pauses longer and longer by now
        break_the_books(monkeypatch, "end_request")
        engine.cancel(gone.request.request_id)
        await asyncio.wait_for(other.done.wait(), 0.2)
        assert other.has_failed


async def test_a_bug_that_is_found_as_the_executor_goes_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient()
    async with running_engine(client) as engine:
        sink = submit(engine, [1, 2, 3], 150)
        await sink.first_token.wait()
        break_the_books(monkeypatch, "lose_executor")
        client.lose()
        await check_all_fail_and_it_begins_anew(engine, [sink])


async def test_deadlines_pass_while_an_executor_is_asked_and_says_nothing() -> None:
    client = FakeClient()
    async with running_engine(client) as engine:
        client.is_hanging = True
        client.lose()
        await until(lambda: engine.state is ServerState.WAITING_FOR_EXECUTOR)
        num_asked = client.num_asked
        await until(lambda: client.num_asked > num_asked)
        sink = submit(engine, [1], deadline_s=time.monotonic() + 0.1)
        await asyncio.wait_for(sink.done.wait(), 2)
        assert sink.reasons == {0: FinishReason.DEADLINE}


async def test_an_executor_with_another_model_is_not_taken_and_everybody_can_know_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = FakeClient()
    async with running_engine(client, max_backoff_s=0.02) as engine:
        client.description = replace(DESCRIPTION, vocab_size=51, max_model_len=300)
        client.lose()
        sink = submit(engine, [1, 2, 3])
        num_asked = client.num_asked
        await until(lambda: client.num_asked >= num_asked + 4)
        assert engine.state is ServerState.WAITING_FOR_EXECUTOR
        changes = "vocab_size 51, not 50, and max_model_len 300, not 200"
        why = f"the executor now has {changes}: restart the scheduler to take it"
        assert engine.readiness == f"waiting for executor: {why}"
        assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [why], "said once"

        client.is_up = False
        await until(lambda: engine.readiness == "waiting for executor")
        client.is_up, client.description = True, replace(DESCRIPTION, epoch=7)
        await until(lambda: engine.state is ServerState.SERVING)
        assert engine.readiness == "serving"
        assert engine.core is not None
        assert engine.core.state.epoch == 8
        await sink.check()


NONSENSE = pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("vocab_size", 0, "vocab_size 0, where at least 1 is needed"),
        ("max_model_len", 0, "max_model_len 0, where at least 2 is needed"),
        ("max_model_len", 1, "max_model_len 1, where at least 2 is needed"),
        ("block_size", 0, "block_size 0, where at least 1 is needed"),
        ("num_blocks", 0, "num_blocks 0, where at least 2 is needed"),
        ("num_blocks", 1, "num_blocks 1, where at least 2 is needed"),
        ("max_num_seqs", 0, "max_num_seqs 0, where at least 1 is needed"),
        ("max_num_batched_tokens", 0, "max_num_batched_tokens 0, where at least 1 is needed"),
        ("epoch", 2**64 - 1, "epoch 18446744073709551615, after which there is none"),
    ],
)


@NONSENSE
async def test_an_executor_that_describes_itself_with_nonsense_is_asked_again_later(
    field: str, value: int, complaint: str
) -> None:
    client = FakeClient(replace(DESCRIPTION, **{field: value}))
    engine = Engine(client, EngineOptions(max_backoff_s=0.3))
    running = asyncio.create_task(engine.run())
    await until(lambda: running.done() or (client.num_asked == 1 and engine.readiness != "waiting for executor"))
    assert not running.done()
    why = f"the executor cannot be used, by what it says of itself: {complaint}"
    assert engine.readiness == f"waiting for executor: {why}"
    with pytest.raises(Unavailable):
        submit(engine, [1, 2, 3])
    await asyncio.sleep(0.1)
    assert client.num_asked == 1, "after the longest pause, not the shortest"
    client.description = DESCRIPTION
    await until(lambda: engine.state is ServerState.SERVING)
    await submit(engine, [1, 2, 3]).check()
    running.cancel()


@NONSENSE
async def test_requests_outlive_an_executor_that_describes_itself_with_nonsense(
    field: str, value: int, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = FakeClient()
    async with running_engine(client, max_backoff_s=0.02) as engine:
        sink = submit(engine, [1, 2, 3])
        await sink.first_token.wait()
        client.description = replace(client.description, **{field: value})
        client.lose()
        num_asked = client.num_asked
        await until(lambda: client.num_asked >= num_asked + 3)
        assert engine.readiness.endswith(complaint)
        (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert said.endswith(complaint), "once"
        client.description = replace(DESCRIPTION, epoch=7)
        await sink.check()


async def test_all_that_is_wrong_with_a_description_is_said_at_once() -> None:
    async with running_engine(client := FakeClient()) as engine:
        client.description = replace(DESCRIPTION, block_size=0, num_blocks=1)
        client.lose()
        both = "block_size 0, where at least 1 is needed, and num_blocks 1, where at least 2 is needed"
        await until(lambda: engine.readiness.endswith(f": {both}"))
