"""Tokens to messages: coalesced, ordered, cut at stop strings, counted truly."""

import asyncio
import sys
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.v1 import generation_pb2 as wire
from scheduler.core import FinishReason
from scheduler.detokenizer import Vocabulary
from scheduler.metrics import SchedulerMetrics
from scheduler.response_stream import MAX_LOGPROBS, ResponseStream, StreamSettings
from scheduler.status import DeadlineExceeded, RequestCancelled, RequestFailed
from scheduler.turnstile import MIN_GROUP, Turnstile
from tests.scheduler.shell import small_tokenizers
from tests.scheduler.shell.fake_engine import made_up_logprobs

TOKENIZER = small_tokenizers.byte_level()
VOCABULARY = Vocabulary(TOKENIZER)
EOS = small_tokenizers.id_of(TOKENIZER, "</s>")


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


class Rig:
    """A stream, and the engine's side of it. `stop` ends a sequence at once, as the engine does."""

    def __init__(self, **settings: Any) -> None:
        self.metrics = SchedulerMetrics()
        turnstile = settings.pop("turnstile", None) or Turnstile()
        num_sequences = settings.get("num_sequences", 1)
        self.stops: list[int] = []
        self.stream = ResponseStream(
            StreamSettings("client's", 10, **({"ending_token_ids": frozenset([EOS])} | settings)),
            VOCABULARY.detokenizer,
            self._stop,
            self.metrics.request(num_sequences, self.metrics.clock()),
            turnstile,
        )

    def _stop(self, index: int) -> None:
        self.stops.append(index)
        self.stream.finished(index, FinishReason.STOP, 0)

    def run(self, token_ids: list[int], reason: FinishReason = FinishReason.LENGTH, index: int = 0) -> "Rig":
        num_logprobs = self.stream._settings.num_logprobs
        for token_id in token_ids:
            if index not in self.stops:
                logprobs = [made_up_logprobs(token_id, num_logprobs)] if num_logprobs else None
                self.stream.tokens(index, [token_id], logprobs)
        if index not in self.stops:
            self.stream.finished(index, reason, 0)
        return self

    async def messages(self, received: list[wire.GenerateResponse] | None = None) -> list[wire.GenerateResponse]:
        """All of them, in `received` if given: there they are after an error, too."""
        received = [] if received is None else received
        async for message in self.stream.messages():
            received.append(message)
        return received


def started_rig(**settings: Any) -> Rig:
    rig = Rig(**settings)
    rig.stream.started(4)
    return rig


def text_of(messages: list[wire.GenerateResponse], index: int = 0) -> str:
    return "".join(m.delta.text for m in messages if m.HasField("delta") and m.delta.index == index)


def tokens_of(messages: list[wire.GenerateResponse], index: int = 0) -> list[int]:
    return [i for m in messages if m.HasField("delta") and m.delta.index == index for i in m.delta.token_ids]


async def test_the_order_of_messages() -> None:
    rig = started_rig()
    rig.stream.tokens(0, ids("hello"))
    rig.stream.finished(0, FinishReason.LENGTH, num_preemptions=2)
    started, delta, finished = await rig.messages()
    assert started.started == wire.Started(request_id="client's", prompt_tokens=10, cached_tokens=4)
    assert delta.delta == wire.Delta(index=0, text="hello", token_ids=ids("hello"))
    usage = wire.Usage(prompt_tokens=10, completion_tokens=len(ids("hello")), cached_tokens=4, num_preemptions=2)
    assert finished.finished == wire.Finished(index=0, reason=wire.FINISH_REASON_LENGTH, usage=usage)


async def test_one_token_a_message_when_the_reader_keeps_up() -> None:
    rig = started_rig()
    messages = rig.stream.messages()
    assert (await anext(messages)).HasField("started")
    for token_id in ids("hello 你好 fox"):
        rig.stream.tokens(0, [token_id])
        assert list((await anext(messages)).delta.token_ids) == [token_id]
    rig.stream.finished(0, FinishReason.EOS, 0)
    assert (await anext(messages)).finished.reason == wire.FINISH_REASON_EOS
    with pytest.raises(StopAsyncIteration):
        await anext(messages)


async def test_one_message_for_all_that_waited() -> None:
    rig = started_rig()
    token_ids = ids("hello fox 🦊 ") * 2000
    rig.run(token_ids)
    messages = await rig.messages()
    assert len(messages) == 3
    assert tokens_of(messages) == token_ids
    assert text_of(messages) == "hello fox 🦊 " * 2000


async def test_a_reader_that_lags_gets_few_messages_and_every_token() -> None:
    """It takes nothing for a while, twice; what came meanwhile is one message each time."""
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
    """Sixty-four readers that are never done with a message: only the first group has one, and the others collect."""
    turnstile = Turnstile()
    rigs = [started_rig(turnstile=turnstile) for _ in range(4 * MIN_GROUP)]
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


async def test_a_reader_that_is_cancelled_gives_its_place_back() -> None:
    """Whether it waited for news, for its turn, had just been called, or was writing."""
    turnstile = Turnstile()
    rigs = [started_rig(turnstile=turnstile) for _ in range(4 * MIN_GROUP)]
    tasks = [asyncio.ensure_future(anext(rig.stream.messages())) for rig in rigs]
    for i, task in enumerate(tasks):
        if i % 2:
            await asyncio.sleep(0)
        task.cancel()
        if i % 3 == 0:
            rigs[i].stream.tokens(0, ids("a"))
    await asyncio.gather(*tasks, return_exceptions=True)
    for _ in range(3 * MIN_GROUP):
        rig = started_rig(turnstile=turnstile).run(ids("fox"))
        assert text_of(await rig.messages()) == "fox"
    assert turnstile._num_inside == 0


async def test_tokens_are_counted_once_taken_or_not() -> None:
    rig = started_rig()
    messages = rig.stream.messages()
    await anext(messages)
    rig.stream.tokens(0, ids("fox"))
    await anext(messages)
    rig.stream.tokens(0, ids("hello"))
    rig.stream.close()
    rig.stream.close()
    assert rig.metrics.num_generation_tokens == len(ids("fox")) + len(ids("hello"))


@pytest.mark.parametrize(("stop", "bytes_a_token"), [((), 5), (("never comes",), 80)])
async def test_what_waits_for_a_slow_reader_is_small(stop: tuple[str, ...], bytes_a_token: int) -> None:
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


async def test_several_sequences() -> None:
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


async def test_no_delta_follows_a_finished() -> None:
    """A sequence that ends while its Delta is on the way out sends the rest first."""
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
async def test_the_text_of_an_ending_token(include_stop: bool) -> None:
    rig = started_rig(include_stop=include_stop, ending_token_ids=frozenset(ids("!")))
    messages = await rig.run(ids("fox") + ids("!"), FinishReason.STOP).messages()
    assert text_of(messages) == ("fox!" if include_stop else "fox")
    assert tokens_of(messages) == ids("fox") + ids("!")
    assert messages[-1].finished.usage.completion_tokens == len(ids("fox")) + 1


async def test_eos_has_no_text() -> None:
    messages = await started_rig(include_stop=True).run([*ids("fox"), EOS], FinishReason.EOS).messages()
    assert text_of(messages) == "fox"
    assert messages[-1].finished.usage.completion_tokens == len(ids("fox")) + 1


async def test_a_character_that_is_never_completed() -> None:
    messages = await started_rig().run(ids("🦊")[:-1]).messages()
    assert text_of(messages) == "\ufffd"


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (FinishReason.CANCELLED, RequestCancelled),
        (FinishReason.DEADLINE, DeadlineExceeded),
        (FinishReason.ERROR, RequestFailed),
    ],
)
async def test_failures_come_after_what_was_ready(reason: FinishReason, error: type[Exception]) -> None:
    rig = started_rig(num_sequences=2).run(ids("hello"), reason)
    received: list[wire.GenerateResponse] = []
    with pytest.raises(error):
        await rig.messages(received)
    assert text_of(received) == "hello"
    assert not any(m.HasField("finished") for m in received)


async def test_a_request_that_fails_before_it_started() -> None:
    with pytest.raises(DeadlineExceeded):
        await Rig().run([], FinishReason.DEADLINE).messages()


# --- stop strings ---


async def test_stop_string_across_tokens() -> None:
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
    assert messages[-1].finished.reason == wire.FINISH_REASON_STOP
    assert messages[-1].finished.usage.completion_tokens == len(reported)


async def test_a_slow_reader_does_not_delay_the_stop() -> None:
    rig = started_rig(stop=("fox",))
    rig.run(ids("hello fox"))  # nobody reads
    assert rig.stops == [0]


async def test_tokens_in_flight_after_a_stop_do_not_count() -> None:
    rig = started_rig(stop=("fox",))
    rig._stop = lambda index: rig.stops.append(index)  # type: ignore[method-assign]
    rig.stream._stop_sequence = rig._stop
    rig.stream.tokens(0, ids("fox"))
    rig.stream.tokens(0, ids(" and more"))
    rig.stream.tokens(0, [EOS])
    rig.stream.finished(0, FinishReason.EOS, 0)  # the executor was first
    messages = await rig.messages()
    assert tokens_of(messages) == ids("fox")
    assert messages[-1].finished.reason == wire.FINISH_REASON_STOP
    assert messages[-1].finished.usage.completion_tokens == len(ids("fox"))
    assert rig.stops == [0]


async def test_held_text_comes_with_the_end() -> None:
    messages = await started_rig(stop=("foxes",)).run(ids("hello fox")).messages()
    assert text_of(messages) == "hello fox"
    assert messages[-1].finished.reason == wire.FINISH_REASON_LENGTH


async def test_a_stop_string_of_what_the_flush_brings() -> None:
    messages = await started_rig(stop=("\ufffd",)).run(ids("a🦊")[:-1]).messages()
    assert text_of(messages) == "a"
    assert messages[-1].finished.reason == wire.FINISH_REASON_STOP


async def test_min_tokens_hold_for_stop_strings() -> None:
    text = "fox fox fox"
    token_ids = ids(text)
    messages = await started_rig(stop=("fox",), min_tokens=len(token_ids)).run(token_ids).messages()
    assert tokens_of(messages) == token_ids


@settings(max_examples=200, deadline=None)
@given(
    token_ids=st.lists(st.integers(4, TOKENIZER.get_vocab_size() - 1), max_size=30),
    stops=st.lists(st.text(st.sampled_from("ab he\ufffd"), min_size=1, max_size=3), max_size=2),
    reads=st.lists(st.booleans(), min_size=30, max_size=30),
)
def test_however_it_is_read_the_text_is_the_same(token_ids: list[int], stops: list[str], reads: list[bool]) -> None:
    async def run() -> list[wire.GenerateResponse]:
        rig = started_rig(stop=tuple(stops))
        reader = asyncio.create_task(rig.messages())
        for token_id, is_read in zip(token_ids, reads, strict=False):
            if not rig.stops:
                rig.stream.tokens(0, [token_id])
            if is_read:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        if not rig.stops:
            rig.stream.finished(0, FinishReason.LENGTH, 0)
        return await reader

    messages = asyncio.run(run())
    whole = TOKENIZER.decode(token_ids)
    matches = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
    expected = whole[: min(matches)[1]] if matches else whole
    assert text_of(messages) == expected
    reported = tokens_of(messages)
    assert token_ids[: len(reported)] == reported
    assert messages[-1].finished.usage.completion_tokens == len(reported)
    assert len(reported) == len(token_ids) or messages[-1].finished.reason == wire.FINISH_REASON_STOP


# --- log-probabilities and beams ----------------------------------------------------------------------------------


def expected_logprobs(token_ids: list[int], num_logprobs: int) -> list[wire.TokenLogprobs]:
    expected = []
    for token_id in token_ids:
        made_up = made_up_logprobs(token_id, num_logprobs)
        entries = [
            wire.TokenLogprob(token_id=i, logprob=value, rank=rank)
            for i, value, rank in zip(made_up.token_ids, made_up.values, made_up.ranks, strict=True)
        ]
        expected.append(wire.TokenLogprobs(chosen=entries[0], top=entries[1:]))
    return expected


def assert_aligned(messages: list[wire.GenerateResponse], num_logprobs: int) -> None:
    """In every Delta by itself."""
    for message in messages:
        if message.HasField("delta"):
            token_ids = list(message.delta.token_ids)
            assert list(message.delta.logprobs) == expected_logprobs(token_ids, num_logprobs)


@pytest.mark.parametrize("num_logprobs", [1, 4])
async def test_logprobs_come_with_their_tokens(num_logprobs: int) -> None:
    rig = started_rig(num_logprobs=num_logprobs)
    messages = rig.stream.messages()
    await anext(messages)
    token_ids = ids("hello 你好 fox")
    for token_id in token_ids:
        rig.stream.tokens(0, [token_id], [made_up_logprobs(token_id, num_logprobs)])
        message = await anext(messages)
        assert list(message.delta.token_ids) == [token_id]
        assert_aligned([message], num_logprobs)
    await messages.aclose()


async def test_logprobs_of_deltas_that_coalesce() -> None:
    token_ids = ids("hello fox")
    messages = await started_rig(num_logprobs=3, num_sequences=2).run(token_ids).run(token_ids[1:], index=1).messages()
    assert [m.WhichOneof("event") for m in messages] == ["started", "delta", "finished", "delta", "finished"]
    assert (tokens_of(messages, 0), tokens_of(messages, 1)) == (token_ids, token_ids[1:])
    assert_aligned(messages, 3)


async def test_logprobs_do_not_wait_for_text_that_is_held_back() -> None:
    rig = started_rig(num_logprobs=2, stop=("foxes",))
    messages = rig.stream.messages()
    await anext(messages)
    for token_id in ids("fox"):
        rig.stream.tokens(0, [token_id], [made_up_logprobs(token_id, 2)])
    held = await anext(messages)
    assert (held.delta.text, list(held.delta.token_ids)) == ("", ids("fox"))
    assert_aligned([held], 2)
    # After the stop string nothing belongs to the completion: neither tokens nor what is said of them.
    rest = ids("es and more")
    rig.stream.tokens(0, rest, [made_up_logprobs(token_id, 2) for token_id in rest])
    received = [message async for message in messages]
    assert tokens_of(received) == ids("es")
    assert_aligned(received, 2)
    assert received[-1].finished.reason == wire.FINISH_REASON_STOP


async def test_a_message_has_a_bound_and_all_arrive() -> None:
    """A gRPC client takes 4 MiB unless it was told to take more."""
    token_ids = ids("hello fox ") * 400
    rig = started_rig(num_logprobs=21, num_prompt_logprobs=21)
    rig.stream.prompt_logprobs(1, [made_up_logprobs(token_id, 21) for token_id in token_ids])
    messages = await rig.run(token_ids).messages()
    assert len(token_ids) * 21 > MAX_LOGPROBS
    assert max(message.ByteSize() for message in messages) < 2**20
    assert tokens_of(messages) == token_ids
    assert text_of(messages) == "hello fox " * 400
    assert_aligned(messages, 21)
    kinds = [m.WhichOneof("event") for m in messages]
    assert kinds == sorted(kinds, key=["started", "prompt_logprobs", "delta", "finished"].index)
    assert kinds.count("delta") == kinds.count("prompt_logprobs") == -(-len(token_ids) // (MAX_LOGPROBS // 21))


async def test_prompt_logprobs_come_first_in_order_of_position() -> None:
    rig = started_rig(num_prompt_logprobs=2)
    messages = rig.stream.messages()
    received = [await anext(messages)]
    prompt = list(range(50, 61))
    told = [made_up_logprobs(token_id, 2) for token_id in prompt]
    rig.stream.prompt_logprobs(1, told[1:4])
    received.append(await anext(messages))
    rig.stream.prompt_logprobs(4, told[4:5])
    rig.stream.prompt_logprobs(5, told[5:])
    rig.run(ids("fox"))
    received += [message async for message in messages]
    assert [m.WhichOneof("event") for m in received] == [
        "started", "prompt_logprobs", "prompt_logprobs", "delta", "finished",
    ]  # fmt: skip
    parts = [m.prompt_logprobs for m in received[1:3]]
    assert [part.first_position for part in parts] == [1, 4]
    assert [entry for part in parts for entry in part.tokens] == expected_logprobs(prompt[1:], 2)
    assert not received[3].delta.logprobs  # nobody asked for those of the output


async def test_what_waits_for_a_slow_reader_is_counted_in_bytes() -> None:
    """12 bytes a log-probability and 4 a token, with what growing arrays keep in reserve; no object for any of them."""
    rig = started_rig(num_logprobs=21)
    num_tokens = 2000
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(num_tokens):
        rig.stream.tokens(0, [number], [made_up_logprobs(number, 21)])
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_tokens * (4 + 21 * 12) < after - before < 1.3 * num_tokens * (4 + 21 * 12)


async def test_tokens_without_the_logprobs_that_were_asked_for_fail_the_request() -> None:
    """A bug of ours; the reader must not wait for ever."""
    for logprobs in (None, [], [made_up_logprobs(7, 3)]):
        rig = started_rig(num_logprobs=2)
        with pytest.raises(ValueError, match="log-probabilities"):
            rig.stream.tokens(0, [7], logprobs)
        with pytest.raises(RequestFailed):
            await rig.messages()


async def test_beams_come_best_first_with_their_scores() -> None:
    rig = started_rig(num_sequences=3)
    for index, text in enumerate(("fox", "hello", "ab")):
        rig.stream.tokens(index, [*ids(text), EOS])
        rig.stream.finished(index, FinishReason.EOS, 1, score=-0.5 * index)
    messages = await rig.messages()
    assert [m.WhichOneof("event") for m in messages] == ["started", *["delta", "finished"] * 3]
    assert [m.delta.text for m in messages[1::2]] == ["fox", "hello", "ab"]
    assert [(m.finished.index, m.finished.HasField("score"), m.finished.score) for m in messages[2::2]] == [
        (0, True, 0.0), (1, True, -0.5), (2, True, -1.0),
    ]  # fmt: skip
    sampled = await started_rig().run(ids("fox")).messages()
    assert not sampled[-1].finished.HasField("score")


@settings(max_examples=100, deadline=None)
@given(
    token_ids=st.lists(st.integers(4, TOKENIZER.get_vocab_size() - 1), max_size=30),
    stops=st.lists(st.text(st.sampled_from("ab he\ufffd"), min_size=1, max_size=3), max_size=2),
    reads=st.lists(st.booleans(), min_size=30, max_size=30),
    num_logprobs=st.integers(1, 4),
)
def test_logprobs_are_aligned_however_it_is_read(
    token_ids: list[int], stops: list[str], reads: list[bool], num_logprobs: int
) -> None:
    async def run() -> list[wire.GenerateResponse]:
        rig = started_rig(stop=tuple(stops), num_logprobs=num_logprobs)
        reader = asyncio.create_task(rig.messages())
        for token_id, is_read in zip(token_ids, reads, strict=False):
            if not rig.stops:
                rig.stream.tokens(0, [token_id], [made_up_logprobs(token_id, num_logprobs)])
            if is_read:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        if not rig.stops:
            rig.stream.finished(0, FinishReason.LENGTH, 0)
        return await reader

    assert_aligned(asyncio.run(run()), num_logprobs)
