"""The responses to one request, as a server sends them: from the beginning, or the rest for a client that resumes."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from quire.v1 import generation_pb2 as pb

HELD_BACK = 2
"""The text of this many tokens is held back until the sequence ends, as if it might become a stop string."""


@dataclass(frozen=True, slots=True)
class FakeSequence:
    """The output of one sequence. `text_at(n)` is what has been sent when n tokens have."""

    token_ids: tuple[int, ...]

    def text_at(self, num_tokens: int) -> str:
        is_all = num_tokens == len(self.token_ids)
        known = self.token_ids if is_all else self.token_ids[: max(0, num_tokens - HELD_BACK)]
        return "".join(f"<{token_id}>" for token_id in known)


class FakeGeneration:
    """A request with a known answer. Each stream cuts the answer into other messages, in another order."""

    def __init__(self, sequences: Sequence[Sequence[int]], num_prompt_logprobs: int, seed: int) -> None:
        self._sequences = [FakeSequence(tuple(token_ids)) for token_ids in sequences]
        self._num_prompt_logprobs = num_prompt_logprobs
        self._random = Random(seed)
        self.continuation = pb.Continuation(
            seed=seed, prompt=pb.TokenIds(ids=[4, 5, 6]), cached_tokens=1, model_digest="model"
        )

    def request(self) -> pb.GenerateRequest:
        return pb.GenerateRequest(text="p", sampling=pb.SamplingParams(n=len(self._sequences)))

    def stream(self, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        """Returns the responses. Raises AssertionError for a resumption that is not a part of the answer."""
        assert request.resumable
        assert request.text == "p"
        resume = request.resume
        if request.HasField("resume"):
            assert resume.continuation == self.continuation
        assert resume.num_prompt_logprobs <= self._num_prompt_logprobs
        begun = {each.index: each for each in resume.sequences}
        assert len(begun) == len(resume.sequences)
        started = pb.Started(request_id="r", prompt_tokens=3, cached_tokens=1, continuation=self.continuation)
        rests = [
            self._rest(index, sequence, begun.get(index, pb.ResumedSequence()))
            for index, sequence in enumerate(self._sequences)
        ]
        return [
            pb.GenerateResponse(started=started),
            *self._prompt_logprobs(resume.num_prompt_logprobs),
            *self._interleaved(rests),
        ]

    def _prompt_logprobs(self, first: int) -> list[pb.GenerateResponse]:
        responses = []
        while first < self._num_prompt_logprobs:
            end = self._random.randint(first + 1, self._num_prompt_logprobs)
            tokens = [_logprobs(position) for position in range(first, end)]
            part = pb.PromptLogprobs(first_position=1 + first, tokens=tokens)
            responses.append(pb.GenerateResponse(prompt_logprobs=part))
            first = end
        return responses

    def _rest(self, index: int, sequence: FakeSequence, begun: pb.ResumedSequence) -> list[pb.GenerateResponse]:
        if begun.finished:
            return []
        first = len(begun.token_ids)
        assert tuple(begun.token_ids) == sequence.token_ids[:first]
        assert begun.has_last == (bool(first) and first == len(sequence.token_ids))
        responses = []
        while first < len(sequence.token_ids):
            end = self._random.randint(first + 1, len(sequence.token_ids))
            token_ids = sequence.token_ids[first:end]
            text = sequence.text_at(end).removeprefix(sequence.text_at(first))
            logprobs = [_logprobs(token_id) for token_id in token_ids]
            delta = pb.Delta(index=index, text=text, token_ids=token_ids, logprobs=logprobs)
            delta.last = end == len(sequence.token_ids)
            responses.append(pb.GenerateResponse(delta=delta))
            first = end
        usage = pb.Usage(prompt_tokens=3, completion_tokens=len(sequence.token_ids), cached_tokens=1)
        finished = pb.Finished(index=index, reason=pb.FINISH_REASON_EOS, usage=usage)
        return [*responses, pb.GenerateResponse(finished=finished)]

    def _interleaved(self, lists: list[list[pb.GenerateResponse]]) -> list[pb.GenerateResponse]:
        """Mixes the lists at random; each keeps its order."""
        mixed = []
        while any(lists):
            mixed.append(self._random.choice([each for each in lists if each]).pop(0))
        return mixed


def _logprobs(token_id: int) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(chosen=pb.TokenLogprob(token_id=token_id, logprob=-float(token_id), rank=1))
