"""Log-probabilities and beams are sent in order, with their tokens, in messages of bounded size."""

import asyncio
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.v1 import generation_pb2 as pb
from scheduler.core import FinishReason
from scheduler.requests.logprob_buffer import MAX_LOGPROBS
from scheduler.requests.status import RequestFailed
from tests.support.scheduler.fake_engine import made_up_logprobs
from tests.support.scheduler.stream_rig import EOS, TOKENIZER, ids, read_now_and_then, started_rig, text_of, tokens_of


def expected_logprobs(token_ids: list[int], num_logprobs: int) -> list[pb.TokenLogprobs]:
    expected = []
    for token_id in token_ids:
        made_up = made_up_logprobs(token_id, num_logprobs)
        entries = [
            pb.TokenLogprob(token_id=i, logprob=value, rank=rank)
            for i, value, rank in zip(made_up.token_ids, made_up.values, made_up.ranks, strict=True)
        ]
        expected.append(pb.TokenLogprobs(chosen=entries[0], top=entries[1:]))
    return expected


def assert_aligned(messages: list[pb.GenerateResponse], num_logprobs: int) -> None:
    """Checks that each Delta has the log-probabilities of its tokens."""
    for message in messages:
        if message.HasField("delta"):
            token_ids = list(message.delta.token_ids)
            assert list(message.delta.logprobs) == expected_logprobs(token_ids, num_logprobs)


@pytest.mark.parametrize("num_logprobs", [1, 4])
async def test_logprobs_are_sent_with_their_tokens(num_logprobs: int) -> None:
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


async def test_coalesced_deltas_have_all_logprobs() -> None:
    token_ids = ids("hello fox")
    messages = await started_rig(num_logprobs=3, num_sequences=2).run(token_ids).run(token_ids[1:], index=1).messages()
    assert [m.WhichOneof("event") for m in messages] == ["started", "delta", "finished", "delta", "finished"]
    assert (tokens_of(messages, 0), tokens_of(messages, 1)) == (token_ids, token_ids[1:])
    assert_aligned(messages, 3)


async def test_text_leaves_with_its_own_tokens_if_a_message_is_too_large() -> None:
    token_ids = ids("hello fox, the river said nothing at all. " * 20)
    rig = started_rig(num_logprobs=21, stop=("\x00",)).run(token_ids)
    deltas = [message.delta for message in await rig.messages() if message.HasField("delta")]
    assert len(deltas) == -(-len(token_ids) // (MAX_LOGPROBS // 21)) > 1
    assert [delta.text for delta in deltas] == [TOKENIZER.decode(list(delta.token_ids)) for delta in deltas]


async def test_logprobs_do_not_wait_for_held_back_text() -> None:
    rig = started_rig(num_logprobs=2, stop=("foxes",))
    messages = rig.stream.messages()
    await anext(messages)
    for token_id in ids("fox"):
        rig.stream.tokens(0, [token_id], [made_up_logprobs(token_id, 2)])
    held = await anext(messages)
    assert (held.delta.text, list(held.delta.token_ids)) == ("", ids("fox"))
    assert_aligned([held], 2)
    # Tokens after the stop string do not belong to the completion, nor do their log-probabilities.
    rest = ids("es and more")
    rig.stream.tokens(0, rest, [made_up_logprobs(token_id, 2) for token_id in rest])
    received = [message async for message in messages]
    assert tokens_of(received) == ids("es")
    assert_aligned(received, 2)
    assert received[-1].finished.reason == pb.FINISH_REASON_STOP


async def test_size_of_messages_is_bounded() -> None:
    """Clients of gRPC accept messages of up to 4 MiB by default."""
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


async def test_prompt_logprobs_precede_deltas_in_order_of_position() -> None:
    rig = started_rig(num_prompt_logprobs=2)
    messages = rig.stream.messages()
    received = [await anext(messages)]
    prompt = list(range(50, 61))
    sent = [made_up_logprobs(token_id, 2) for token_id in prompt]
    rig.stream.prompt_logprobs(1, sent[1:4])
    received.append(await anext(messages))
    rig.stream.prompt_logprobs(4, sent[4:5])
    rig.stream.prompt_logprobs(5, sent[5:])
    rig.run(ids("fox"))
    received += [message async for message in messages]
    assert [m.WhichOneof("event") for m in received] == [
        "started", "prompt_logprobs", "prompt_logprobs", "delta", "finished",
    ]  # fmt: skip
    parts = [m.prompt_logprobs for m in received[1:3]]
    assert [part.first_position for part in parts] == [1, 4]
    assert [entry for part in parts for entry in part.tokens] == expected_logprobs(prompt[1:], 2)
    assert not received[3].delta.logprobs  # the request did not ask for those of the output


async def test_buffered_logprobs_are_bytes_not_objects() -> None:
    """A log-probability takes 12 bytes and a token 4, plus the reserve of growing arrays."""
    rig = started_rig(num_logprobs=21)
    num_tokens = 2000
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(num_tokens):
        rig.stream.tokens(0, [number], [made_up_logprobs(number, 21)])
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_tokens * (4 + 21 * 12) < after - before < 1.3 * num_tokens * (4 + 21 * 12)


async def test_missing_logprobs_fail_the_request() -> None:
    """This is a bug, but the reader must not wait forever."""
    for logprobs in (None, [], [made_up_logprobs(7, 3)]):
        rig = started_rig(num_logprobs=2)
        with pytest.raises(ValueError, match="log-probabilities"):
            rig.stream.tokens(0, [7], logprobs)
        with pytest.raises(RequestFailed):
            await rig.messages()


async def test_beams_are_sent_best_first_with_their_scores() -> None:
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


@settings(max_examples=100)
@given(
    token_ids=st.lists(st.integers(4, TOKENIZER.get_vocab_size() - 1), max_size=30),
    stops=st.lists(st.text(st.sampled_from("ab he\ufffd"), min_size=1, max_size=3), max_size=2),
    reads=st.lists(st.booleans(), min_size=30, max_size=30),
    num_logprobs=st.integers(1, 4),
)
def test_logprobs_are_aligned_however_it_is_read(
    token_ids: list[int], stops: list[str], reads: list[bool], num_logprobs: int
) -> None:
    async def run() -> list[pb.GenerateResponse]:
        return await read_now_and_then(started_rig(stop=tuple(stops), num_logprobs=num_logprobs), token_ids, reads)

    assert_aligned(asyncio.run(run()), num_logprobs)
