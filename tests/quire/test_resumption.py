"""The bookkeeping of a stream that breaks off, without a network: nothing is lost and nothing comes twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import Completion, InternalError, messages
from quire.resumption import ResumableRequest
from quire.v1 import generation_pb2 as pb
from tests.support.client.fake_generation import FakeGeneration
from tests.support.client.scripted_server import delta, finished, started

SEQUENCES = st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=12), min_size=1, max_size=4)


def completion(fake: FakeGeneration, cuts: list[int]) -> Completion:
    """Receives the answer; the stream of number i breaks off after cuts[i] messages, the one after them does not."""
    request = ResumableRequest(fake.request())
    assembler = messages.CompletionAssembler()
    for cut in [*cuts, None]:
        for message in fake.stream(request.next_request())[:cut]:
            if request.accept(message):
                event = messages.event(message)
                assert event is not None
                assembler.add(event)
    return assembler.completion()


@given(SEQUENCES, st.integers(0, 5), st.integers(0, 2**32), st.lists(st.integers(0, 30), max_size=8))
def test_an_answer_is_the_same_wherever_it_is_cut(
    sequences: list[list[int]], num_prompt_logprobs: int, seed: int, cuts: list[int]
) -> None:
    whole = completion(FakeGeneration(sequences, num_prompt_logprobs, seed), [])
    assert [list(sequence.token_ids) for sequence in whole.sequences] == sequences
    assert completion(FakeGeneration(sequences, num_prompt_logprobs, seed), cuts) == whole


def test_a_stream_that_never_started_is_requested_again_as_it_was() -> None:
    original = pb.GenerateRequest(text="p", sampling=pb.SamplingParams(n=2, temperature=0.5))
    request = ResumableRequest(original)
    expected = pb.GenerateRequest(text="p", sampling=pb.SamplingParams(n=2, temperature=0.5), resumable=True)
    assert [request.next_request(), request.next_request()] == [expected, expected]
    assert not original.resumable, "the caller's message does not change"


def test_a_resumption_lists_what_was_received() -> None:
    request = ResumableRequest(pb.GenerateRequest(text="p", sampling=pb.SamplingParams(n=4)))
    continuation = pb.Continuation(seed=9, prompt=pb.TokenIds(ids=[1, 2]), cached_tokens=1, model_digest="d")
    received = [
        pb.GenerateResponse(started=pb.Started(continuation=continuation)),
        pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(first_position=1, tokens=[pb.TokenLogprobs()] * 3)),
        delta(2, "a", 7, 8),
        delta(0, "", 1),
        delta(2, "b", 9),
        finished(1),
        finished(2),
    ]
    assert [request.accept(message) for message in received] == [True] * 7
    assert request.next_request().resume == pb.Resumption(
        continuation=continuation,
        num_prompt_logprobs=3,
        sequences=[
            pb.ResumedSequence(index=0, token_ids=[1]),
            pb.ResumedSequence(index=1, finished=True),
            pb.ResumedSequence(index=2, finished=True),
        ],
    )


def test_a_resumption_of_a_resumed_stream_lists_no_tokens_of_finished_sequences_either() -> None:
    original = pb.GenerateRequest(text="p")
    original.resume.sequences.add(index=0, token_ids=[7, 8], has_last=True, finished=True)
    original.resume.sequences.add(index=1, token_ids=[9])
    request = ResumableRequest(original)
    request.accept(pb.GenerateResponse(started=pb.Started(continuation=pb.Continuation(seed=9))))
    finished_one, other = request.next_request().resume.sequences
    assert finished_one.finished
    assert not finished_one.token_ids
    assert list(other.token_ids) == [9]


def test_the_first_continuation_stays() -> None:
    request = ResumableRequest(pb.GenerateRequest(text="p"))
    first, second = (pb.Continuation(seed=1, cached_tokens=tokens, model_digest="d") for tokens in (2, 0))
    assert request.accept(pb.GenerateResponse(started=pb.Started(continuation=first)))
    request.next_request()
    assert not request.accept(pb.GenerateResponse(started=pb.Started(continuation=second)))
    assert request.next_request().resume.continuation == first


def test_a_server_that_does_not_know_continuations() -> None:
    """It would ignore the resumption, and send the text from the beginning."""
    request = ResumableRequest(pb.GenerateRequest(text="p"))
    request.accept(started())
    assert not request.can_continue

    upgraded = ResumableRequest(pb.GenerateRequest(text="p"))
    upgraded.accept(pb.GenerateResponse(started=pb.Started(continuation=pb.Continuation(model_digest="d"))))
    assert upgraded.can_continue
    upgraded.next_request()
    with pytest.raises(InternalError, match="cannot continue"):
        upgraded.accept(started())
