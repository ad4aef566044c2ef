"""Response streams coalesce and order messages, cut text at stop strings, and count tokens correctly."""

import asyncio
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.v1 import generation_pb2 as pb
from scheduler.core import CapacityExceeded, FinishReason, QueueFull
from scheduler.requests.status import DeadlineExceeded, GrammarFailed, RequestCancelled, RequestFailed
from scheduler.requests.write_queue import MIN_GROUP, WriteQueue
from tests.support.scheduler.stream_rig import (
    EOS,
    TOKENIZER,
    Rig,
    ids,
    read_now_and_then,
    started_rig,
    text_of,
    tokens_of,
)


async def test_messages_are_in_order() -> None:
    rig = started_rig()
    rig.stream.tokens(0, ids("hello"))
    rig.stream.finished(0, FinishReason.LENGTH, num_preemptions=2)
    started, delta, finished = await rig.messages()
    assert started.started == pb.Started(request_id="client's", prompt_tokens=10, cached_tokens=4)
    assert delta.delta == pb.Delta(index=0, text="hello", token_ids=ids("hello"), last=True)
    usage = pb.Usage(prompt_tokens=10, completion_tokens=len(ids("hello")), cached_tokens=4, num_preemptions=2)
    assert finished.finished == pb.Finished(index=0, reason=pb.FINISH_REASON_LENGTH, usage=usage)


async def test_fast_reader_gets_one_token_per_message() -> None:
    rig = started_rig()
    messages = rig.stream.messages()
    assert (await anext(messages)).HasField("started")
    for token_id in ids("hello 你好 fox"):
        rig.stream.tokens(0, [token_id])
        assert list((await anext(messages)).delta.token_ids) == [token_id]
    rig.stream.finished(0, FinishReason.EOS, 0)
    assert (await anext(messages)).finished.reason == pb.FINISH_REASON_EOS
    with pytest.raises(StopAsyncIteration):
        await anext(messages)


async def test_waiting_tokens_are_sent_in_one_message() -> None:
    rig = started_rig()
    token_ids = ids("hello fox 🦊 ") * 2000
    rig.run(token_ids)
    messages = await rig.messages()
    assert len(messages) == 3
    assert tokens_of(messages) == token_ids
    assert text_of(messages) == "hello fox 🦊 " * 2000


async def test_slow_reader_gets_few_messages_and_every_token() -> None:
    """The reader pauses twice; the tokens of each pause are one message."""
    rig = started_rig()
    text = "hello 你好 fox 🦊 " * 50
    token_ids = ids(text)
    messages = rig.stream.messages()
    received = [await anext(messages)]
    middle = len(token_ids) // 2 + 1  # inside a character
    for part in (token_ids[:middle], token_ids[middle:]):
        for token_id in part:
            rig.stream.tokens(0, [token_id])
            await asyncio.sleep(0)
        received.append(await anext(messages))
    rig.stream.finished(0, FinishReason.LENGTH, 0)
    received += [message async for message in messages]
    assert [m.WhichOneof("event") for m in received] == ["started", "delta", "delta", "finished"]
    assert tokens_of(received) == token_ids
    assert text_of(received) == text


async def test_streams_that_wait_for_their_turn_coalesce() -> None:
    """None of 64 readers finishes a message: only the first group gets one, and the other streams collect."""
    write_queue = WriteQueue()
    rigs = [started_rig(write_queue=write_queue) for _ in range(4 * MIN_GROUP)]
    readers = [rig.stream.messages() for rig in rigs]
    firsts = [asyncio.ensure_future(anext(reader)) for reader in readers]
    await asyncio.sleep(0)
    token_ids = ids("hello fox ")
    for rig in rigs:
        rig.run(token_ids)
    assert [first.done() for first in firsts] == [True] * MIN_GROUP + [False] * 3 * MIN_GROUP
    for first, reader in zip(firsts, readers, strict=True):
        received = [await first, *[message async for message in reader]]
        assert [m.WhichOneof("event") for m in received] == ["started", "delta", "finished"]
        assert tokens_of(received) == token_ids


async def test_cancelled_reader_leaves_the_write_queue() -> None:
    """The readers wait for output or for their turn, have just got their turn, or are writing."""
    write_queue = WriteQueue()
    rigs = [started_rig(write_queue=write_queue) for _ in range(4 * MIN_GROUP)]
    tasks = [asyncio.ensure_future(anext(rig.stream.messages())) for rig in rigs]
    for i, task in enumerate(tasks):
        if i % 2:
            await asyncio.sleep(0)
        task.cancel()
        if i % 3 == 0:
            rigs[i].stream.tokens(0, ids("a"))
    await asyncio.gather(*tasks, return_exceptions=True)
    for _ in range(3 * MIN_GROUP):
        rig = started_rig(write_queue=write_queue).run(ids("fox"))
        assert text_of(await rig.messages()) == "fox"
    assert write_queue._num_writing == 0


async def test_tokens_are_counted_once_whether_sent_or_not() -> None:
    rig = started_rig()
    messages = rig.stream.messages()
    await anext(messages)
    rig.stream.tokens(0, ids("fox"))
    await anext(messages)
    rig.stream.tokens(0, ids("hello"))
    rig.stream.close()
    rig.stream.close()
    assert rig.metrics.measurements.num_generation_tokens == len(ids("fox")) + len(ids("hello"))


@pytest.mark.parametrize(("stop", "bytes_a_token"), [((), 5), (("never occurs",), 80)])
async def test_buffer_of_a_slow_reader_is_small(stop: tuple[str, ...], bytes_a_token: int) -> None:
    rig = started_rig(stop=stop)
    token_ids = ids("hello fox ") * 5000
    for token_id in token_ids:
        rig.stream.tokens(0, [token_id])
    completion = rig.stream._completions[0]
    size = (
        sys.getsizeof(completion._token_ids)
        + sys.getsizeof(completion._text)
        + sum(map(sys.getsizeof, completion._text))
    )
    assert size < bytes_a_token * len(token_ids)


async def test_sequences_are_reported_separately() -> None:
    rig = started_rig(num_sequences=3)
    rig.run(ids("hello"), index=2)
    rig.run(ids("fox"), index=0, reason=FinishReason.EOS)
    reader = asyncio.create_task(rig.messages())
    await asyncio.sleep(0)
    rig.run([], index=1)
    messages = await reader
    assert [text_of(messages, index) for index in range(3)] == ["fox", "", "hello"]
    assert sorted(m.finished.index for m in messages if m.HasField("finished")) == [0, 1, 2]
    assert not any(m.delta.index == 1 for m in messages if m.HasField("delta"))


async def test_deltas_precede_the_finished_message() -> None:
    """A sequence that ends while its Delta is written sends its remaining tokens first."""
    rig = started_rig(num_sequences=2)
    rig.stream.tokens(0, ids("a"))
    order = []
    async for message in rig.stream.messages():
        order.append(message.WhichOneof("event"))
        if order == ["started", "delta"]:
            rig.run(ids("bc"), index=0)
            rig.run([], index=1)
    assert order == ["started", "delta", "finished", "delta", "finished"]


# --- how an output ends ---


@pytest.mark.parametrize("include_stop", [False, True])
async def test_ending_token_has_text_only_with_include_stop(include_stop: bool) -> None:
    rig = started_rig(include_stop=include_stop, ending_token_ids=frozenset(ids("!")))
    messages = await rig.run(ids("fox") + ids("!"), FinishReason.STOP).messages()
    assert text_of(messages) == ("fox!" if include_stop else "fox")
    assert tokens_of(messages) == ids("fox") + ids("!")
    assert messages[-1].finished.usage.completion_tokens == len(ids("fox")) + 1


async def test_eos_token_has_no_text() -> None:
    messages = await started_rig(include_stop=True).run([*ids("fox"), EOS], FinishReason.EOS).messages()
    assert text_of(messages) == "fox"
    assert messages[-1].finished.usage.completion_tokens == len(ids("fox")) + 1


async def test_incomplete_character_becomes_a_replacement_character() -> None:
    messages = await started_rig().run(ids("🦊")[:-1]).messages()
    assert text_of(messages) == "\ufffd"


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (FinishReason.CANCELLED, RequestCancelled),
        (FinishReason.DEADLINE, DeadlineExceeded),
        (FinishReason.TOO_LATE, QueueFull),
        (FinishReason.CAPACITY, CapacityExceeded),
        (FinishReason.NOT_FINITE, RequestFailed),
        (FinishReason.GRAMMAR, GrammarFailed),
        (FinishReason.EXECUTORS_LOST, RequestFailed),
    ],
)
async def test_failures_follow_the_output_that_was_ready(reason: FinishReason, error: type[Exception]) -> None:
    rig = started_rig(num_sequences=2).run(ids("hello"), reason)
    received: list[pb.GenerateResponse] = []
    with pytest.raises(error):
        await rig.messages(received)
    assert text_of(received) == "hello"
    assert not any(m.HasField("finished") for m in received)


async def test_a_bug_keeps_back_output_because_the_end_of_a_sequence_may_not_have_been_told() -> None:
    """A client that had the last token without the last text could not resume: it would never get that text."""
    rig = started_rig().run(ids("🦊")[:-1], FinishReason.ERROR)
    received: list[pb.GenerateResponse] = []
    with pytest.raises(RequestFailed):
        await rig.messages(received)
    assert [message.WhichOneof("event") for message in received] == ["started"]


async def test_request_that_fails_before_it_starts() -> None:
    with pytest.raises(DeadlineExceeded):
        await Rig().run([], FinishReason.DEADLINE).messages()


# --- stop strings ---


async def test_stop_string_can_span_tokens() -> None:
    rig = started_rig(stop=("o f",))
    token_ids = ids("hello fox and more")
    rig.run(token_ids)
    assert rig.stops == [0]
    messages = await rig.messages()
    assert text_of(messages) == "hell"
    reported = tokens_of(messages)
    assert token_ids[: len(reported)] == reported
    assert "o f" in TOKENIZER.decode(reported)
    assert "o f" not in TOKENIZER.decode(reported[:-1])
    assert messages[-1].finished.reason == pb.FINISH_REASON_STOP
    assert messages[-1].finished.usage.completion_tokens == len(reported)


async def test_slow_reader_does_not_delay_the_stop() -> None:
    rig = started_rig(stop=("fox",))
    rig.run(ids("hello fox"))  # before any message is read
    assert rig.stops == [0]


async def test_tokens_after_a_stop_string_do_not_count() -> None:
    rig = started_rig(stop=("fox",))
    rig._stop = lambda index: rig.stops.append(index)  # type: ignore[method-assign]
    rig.stream._stop_sequence = rig._stop
    rig.stream.tokens(0, ids("fox"))
    rig.stream.tokens(0, ids(" and more"))
    rig.stream.tokens(0, [EOS])
    rig.stream.finished(0, FinishReason.EOS, 0)  # the executor ended the sequence before the stop
    messages = await rig.messages()
    assert tokens_of(messages) == ids("fox")
    assert messages[-1].finished.reason == pb.FINISH_REASON_STOP
    assert messages[-1].finished.usage.completion_tokens == len(ids("fox"))
    assert rig.stops == [0]


async def test_held_back_text_is_sent_at_the_end() -> None:
    messages = await started_rig(stop=("foxes",)).run(ids("hello fox")).messages()
    assert text_of(messages) == "hello fox"
    assert messages[-1].finished.reason == pb.FINISH_REASON_LENGTH


async def test_stop_string_can_match_flushed_text() -> None:
    messages = await started_rig(stop=("\ufffd",)).run(ids("a🦊")[:-1]).messages()
    assert text_of(messages) == "a"
    assert messages[-1].finished.reason == pb.FINISH_REASON_STOP


async def test_min_tokens_applies_to_stop_strings() -> None:
    text = "fox fox fox"
    token_ids = ids(text)
    messages = await started_rig(stop=("fox",), min_tokens=len(token_ids)).run(token_ids).messages()
    assert tokens_of(messages) == token_ids


@settings(max_examples=200)
@given(
    token_ids=st.lists(st.integers(4, TOKENIZER.get_vocab_size() - 1), max_size=30),
    stops=st.lists(st.text(st.sampled_from("ab he\ufffd"), min_size=1, max_size=3), max_size=2),
    reads=st.lists(st.booleans(), min_size=30, max_size=30),
)
def test_text_does_not_depend_on_the_reader(token_ids: list[int], stops: list[str], reads: list[bool]) -> None:
    async def run() -> list[pb.GenerateResponse]:
        return await read_now_and_then(started_rig(stop=tuple(stops)), token_ids, reads)

    messages = asyncio.run(run())
    whole = TOKENIZER.decode(token_ids)
    matches = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
    expected = whole[: min(matches)[1]] if matches else whole
    assert text_of(messages) == expected
    reported = tokens_of(messages)
    assert token_ids[: len(reported)] == reported
    assert messages[-1].finished.usage.completion_tokens == len(reported)
    assert len(reported) == len(token_ids) or messages[-1].finished.reason == pb.FINISH_REASON_STOP
