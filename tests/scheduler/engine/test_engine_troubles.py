"""Tests the engine when the core has a bug, or the executor is lost or describes itself badly."""

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
)
from scheduler.core.books import Books
from scheduler.core.committer import Committer
from scheduler.core.draft import Step
from scheduler.engine.engine import Engine, ServerState
from tests.support.core.fake_executor import expected_output
from tests.support.scheduler.engine_rig import RecordingSink, engine_options, running_engine, submit
from tests.support.scheduler.fake_client import DESCRIPTION, FakeClient
from tests.support.waiting import until


def break_a_commit(patch: pytest.MonkeyPatch, number: int) -> None:
    """Makes the commit of this number fail after it has added its tokens, and before the clients are told of them."""
    end_sequences, num_commits = Committer._end_sequences, 0

    def broken(committer: Committer, step: Step, result: StepResult, events: Events) -> None:
        nonlocal num_commits
        num_commits += 1
        if num_commits == number:
            raise InvariantViolation("on purpose")
        end_sequences(committer, step, result, events)

    patch.setattr(Committer, "_end_sequences", broken)


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
    whole = getattr(Books, verb)

    def broken(books: Books, *arguments: object) -> object:
        patch.setattr(Books, verb, whole)
        raise InvariantViolation("on purpose")

    patch.setattr(Books, verb, broken)


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
        assert not cancelled.done.is_set(), "its sink is told nothing more"


class StoppingSink(RecordingSink):
    """Stops its sequence at the first token, as a response stream does when a stop string is complete."""

    engine: Engine

    def tokens(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs] | None = None) -> None:
        super().tokens(index, token_ids, logprobs)
        self.engine.stop(self.request.request_id, index)


async def test_a_sample_that_ends_as_its_sibling_stops_is_told_so() -> None:
    """Sample 0 reaches a stop string with its third token, in the step in which sample 1 samples EOS."""
    prompt, params = [1, 2, 3], SequenceParams(max_total_tokens=20)
    first, _ = expected_output(prompt, params, 100, DESCRIPTION.vocab_size)
    outputs = {seed: expected_output(prompt, params, seed, DESCRIPTION.vocab_size)[0] for seed in range(40)}
    seed, eos = next((s, ids[2]) for s, ids in outputs.items() if ids[2] not in (*first[:3], *ids[:2]))
    request = Request(1, prompt, replace(params, eos_token_ids=(eos,)), seeds=(100, seed))

    class Sink(RecordingSink):
        def tokens(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs] | None = None) -> None:
            super().tokens(index, token_ids, logprobs)
            if index == 0 and len(self.outputs[0]) == 3:
                engine.stop(request.request_id, 0)

    async with running_engine(FakeClient()) as engine:
        sink = Sink(request)
        engine.submit(request, sink)
        await asyncio.wait_for(sink.done.wait(), 10)
        assert sink.reasons == {0: FinishReason.STOP, 1: FinishReason.EOS}
        assert sink.outputs == {0: first[:3], 1: outputs[seed][:3]}


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


async def test_requests_expire_while_an_executor_does_not_answer() -> None:
    client = FakeClient()
    async with running_engine(client) as engine:
        client.is_hanging = True
        client.lose()
        await until(lambda: engine.state is ServerState.WAITING_FOR_EXECUTOR)
        num_probes = client.num_probes
        await until(lambda: client.num_probes > num_probes)
        sink = submit(engine, [1], deadline_s=time.monotonic() + 0.1)
        await asyncio.wait_for(sink.done.wait(), 2)
        assert sink.reasons == {0: FinishReason.DEADLINE}


async def test_an_executor_with_another_model_is_refused_and_readiness_gives_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = FakeClient()
    async with running_engine(client, max_backoff_s=0.02) as engine:
        client.description = replace(DESCRIPTION, vocab_size=51, max_model_len=300)
        client.lose()
        sink = submit(engine, [1, 2, 3])
        num_probes = client.num_probes
        await until(lambda: client.num_probes >= num_probes + 4)
        assert engine.state is ServerState.WAITING_FOR_EXECUTOR
        changes = "vocab_size 51, not 50, and max_model_len 300, not 200"
        reason = f"the executor now has {changes}: restart the scheduler to take it"
        assert engine.readiness == f"waiting for executor: {reason}"
        assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [reason]

        client.is_up = False
        await until(lambda: engine.readiness == "waiting for executor")
        client.is_up, client.description = True, replace(DESCRIPTION, epoch=7)
        await until(lambda: engine.state is ServerState.SERVING)
        assert engine.readiness == "serving"
        assert engine.core is not None
        assert engine.core.epoch == 8
        await sink.check()


INVALID_DESCRIPTIONS = pytest.mark.parametrize(
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


@INVALID_DESCRIPTIONS
async def test_an_executor_with_an_invalid_description_is_asked_again_later(
    field: str, value: int, complaint: str
) -> None:
    client = FakeClient(replace(DESCRIPTION, **{field: value}))
    engine = Engine(client, engine_options(max_backoff_s=0.3))
    running = asyncio.create_task(engine.run())
    await until(lambda: running.done() or (client.num_probes == 1 and engine.readiness != "waiting for executor"))
    assert not running.done()
    reason = f"the executor cannot be used, by what it says of itself: {complaint}"
    assert engine.readiness == f"waiting for executor: {reason}"
    with pytest.raises(Unavailable):
        submit(engine, [1, 2, 3])
    await asyncio.sleep(0.1)
    assert client.num_probes == 1, "asked again after the shortest pause, not the longest"
    client.description = DESCRIPTION
    await until(lambda: engine.state is ServerState.SERVING)
    await submit(engine, [1, 2, 3]).check()
    running.cancel()


@INVALID_DESCRIPTIONS
async def test_requests_survive_an_executor_with_an_invalid_description(
    field: str, value: int, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = FakeClient()
    async with running_engine(client, max_backoff_s=0.02) as engine:
        sink = submit(engine, [1, 2, 3])
        await sink.first_token.wait()
        client.description = replace(client.description, **{field: value})
        client.lose()
        num_probes = client.num_probes
        await until(lambda: client.num_probes >= num_probes + 3)
        assert engine.readiness.endswith(complaint)
        (message,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert message.endswith(complaint)
        client.description = replace(DESCRIPTION, epoch=7)
        await sink.check()


async def test_all_faults_of_a_description_are_reported_together() -> None:
    async with running_engine(client := FakeClient()) as engine:
        client.description = replace(DESCRIPTION, block_size=0, num_blocks=1)
        client.lose()
        both = "block_size 0, where at least 1 is needed, and num_blocks 1, where at least 2 is needed"
        await until(lambda: engine.readiness.endswith(f": {both}"))
