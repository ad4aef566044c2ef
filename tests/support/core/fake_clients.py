"""Fake clients, which know the events that they must get and fail at once on any other event."""

from collections import Counter
from dataclasses import dataclass, field, replace

from scheduler.core import BeamResult, Events, FinishReason, Request, Sequence, TokenLogprobs
from tests.support.core.fake_executor import context_of, expected_beams, expected_output, token_logprobs

Key = tuple[int, int]
"""The (request_id, index) of a sequence, as a client knows it."""

ENDED_BY_EXECUTOR = (FinishReason.EOS, FinishReason.LENGTH)
FAILED = (FinishReason.DEADLINE, FinishReason.TOO_LATE, FinishReason.EXECUTORS_LOST, FinishReason.CAPACITY)


@dataclass
class FakeClients:
    """The clients of all requests.

    A client gets `started` once, then the expected tokens of each of its sequences, each once and in order (I11), and
    then the end of each sequence. After it has disconnected it gets no events.
    """

    vocab_size: int
    requests: dict[int, Request] = field(default_factory=dict)
    expected: dict[Key, tuple[list[int], FinishReason]] = field(default_factory=dict)
    received: dict[Key, list[int]] = field(default_factory=dict)
    ended: dict[Key, FinishReason] = field(default_factory=dict)
    beams: dict[int, list[BeamResult]] = field(default_factory=dict)  # the expected results of each beam search
    num_prompt_logprobs: dict[int, int] = field(default_factory=dict)  # prompt tokens with log-probabilities
    num_cached_tokens: dict[int, int] = field(default_factory=dict)  # by request, once it has started

    def submit(self, request: Request) -> None:
        prompt = list(request.prompt_token_ids)
        self.requests[request.request_id] = request
        if request.beam:
            self.beams[request.request_id] = expected_beams(request, self.vocab_size)
            self.received[request.request_id, 0] = []
            return
        for index, seed in enumerate(request.seeds):
            key = (request.request_id, index)
            self.expected[key] = expected_output(prompt, request.params, seed, self.vocab_size)
            self.received[key] = list(request.outputs[index].token_ids) if request.outputs else []
            expected = self.expected[key][0]
            if request.outputs and request.outputs[index].is_finished:
                self.ended[key] = FinishReason.STOP  # the client knows the true reason from an earlier stream
            else:
                assert self.received[key] == expected[: len(self.received[key])], f"{key} resumes another output"
        self.num_prompt_logprobs[request.request_id] = request.num_prompt_reported

    def count_ends(self) -> dict[str, int]:
        """Returns the number of ended sequences by reason, including reasons that did not occur."""
        num_ended = Counter(self.ended.values())
        # These worlds do not have their causes.
        from_outside = {FinishReason.ERROR, FinishReason.GRAMMAR, FinishReason.MODEL_CHANGED, FinishReason.NOT_FINITE}
        return {f"finished: {reason.value}": num_ended[reason] for reason in FinishReason if reason not in from_outside}

    def narrow(self, most_tokens: int) -> int:
        """Called for a pool in which a sequence can reach `most_tokens`; returns the number of requests concerned.

        A client that set no max_tokens then expects at most that many tokens, or the tokens that it has already.
        """
        open_ended = [self.requests[request_id] for request_id in self.open_requests()]
        concerned = [r for r in open_ended if r.is_open_ended and r.params.max_total_tokens > most_tokens]
        for request in concerned:
            self._narrow(replace(request, params=replace(request.params, max_total_tokens=most_tokens)))
        return len(concerned)

    def _narrow(self, request: Request) -> None:
        self.requests[request.request_id] = request
        room = max(1, request.params.max_total_tokens - len(request.prompt_token_ids))
        if request.beam and request.params.max_total_tokens > len(request.prompt_token_ids):
            self.beams[request.request_id] = expected_beams(request, self.vocab_size)
        for key in self.open_keys(request.request_id):
            output, _ = self.expected.get(key, ([], None))
            num_tokens = max(room, len(self.received[key]))
            if len(output) > num_tokens:
                self.expected[key] = output[:num_tokens], FinishReason.LENGTH

    def go_away(self, request_id: int) -> None:
        for key in self.open_keys(request_id):
            self.ended[key] = FinishReason.CANCELLED

    def open_keys(self, request_id: int) -> list[Key]:
        """Returns the sequences of a request that have not ended, as far as the client knows."""
        keys = [(request_id, index) for index in range(self.requests[request_id].num_sequences)]
        return [key for key in keys if key not in self.ended]

    def open_requests(self) -> list[int]:
        return [request_id for request_id in self.requests if self.open_keys(request_id)]

    def hear(self, events: Events) -> None:
        for sequence in events.started:
            self._hear_start(sequence.request.request_id, sequence.num_cached_tokens)
        for sequence, token_id in zip(events.sequences, events.token_ids, strict=True):
            self._hear_token((sequence.request.request_id, sequence.index), token_id)
        self._hear_logprobs(events)
        for sequence, first, tokens in events.prompt_logprobs:
            self._hear_prompt_logprobs(sequence, first, tokens)
        for sequence, results in events.beams:
            self._hear_beams(sequence.request.request_id, results)
        for sequence, reason in events.finished:
            self._hear_end((sequence.request.request_id, sequence.index), reason)
        for sequence, reason in events.finished:
            if reason in FAILED:  # if one sequence fails, the whole request fails, later samples included
                for key in self.open_keys(sequence.request.request_id):
                    self.ended[key] = reason

    def _hear_start(self, request_id: int, num_cached_tokens: int | None) -> None:
        assert request_id not in self.num_cached_tokens, f"I11: request {request_id} started twice"
        assert num_cached_tokens is not None, f"I11: request {request_id} started without a count of cached tokens"
        request = self.requests[request_id]
        most = len(request.prompt_token_ids) + max((len(output.token_ids) for output in request.outputs), default=0)
        assert 0 <= num_cached_tokens < most, f"I11: {num_cached_tokens} cached of {most}"
        self.num_cached_tokens[request_id] = num_cached_tokens

    def _hear_token(self, key: Key, token_id: int) -> None:
        assert key[0] in self.num_cached_tokens, f"I11: a token of {key} before its request started"
        assert key not in self.ended, f"I11: a token of {key} after its end"
        expected, received = self.expected[key][0], self.received[key]
        assert len(received) < len(expected), f"I11: {key} got more than {expected}"
        received.append(token_id)
        assert received == expected[: len(received)], f"I11: {key} got {received} of {expected}"

    def _hear_logprobs(self, events: Events) -> None:
        """Checks that exactly the sequences that asked get log-probabilities, in order."""
        told = [sequence for sequence in events.sequences if sequence.params.num_logprobs]
        assert [sequence for sequence, _ in events.logprobs] == told, "I18: log-probabilities of other sequences"
        for sequence, logprobs in events.logprobs:
            request = sequence.request
            received = self.received[request.request_id, sequence.index]
            context = context_of([*request.prompt_token_ids, *received[:-1]])
            self._check_logprobs(logprobs, context, received[-1], request.params.num_logprobs)

    def _hear_prompt_logprobs(self, sequence: Sequence, first: int, tokens: list[TokenLogprobs]) -> None:
        """Checks that each position is reported once, and in order."""
        request = sequence.request
        num_known = self.num_prompt_logprobs.get(request.request_id, 0)
        assert sequence.index == 0, "I18: a sample reports on the prompt"
        assert first == num_known + 1, f"I18: {sequence!r} reports prompt token {first} after {num_known} others"
        assert tokens, "I18: an empty report"
        for position, logprobs in enumerate(tokens, first):
            context = context_of(list(request.prompt_token_ids[:position]))
            width = request.params.num_prompt_logprobs
            self._check_logprobs(logprobs, context, request.prompt_token_ids[position], width)
        self.num_prompt_logprobs[request.request_id] = num_known + len(tokens)

    def _check_logprobs(self, logprobs: TokenLogprobs, context: list[int], token_id: int, width: int) -> None:
        told = list(zip(logprobs.token_ids, logprobs.values, logprobs.ranks, strict=True))
        assert told == token_logprobs(context, token_id, width, self.vocab_size), "I18: wrong log-probabilities"

    def _hear_beams(self, request_id: int, results: list[BeamResult]) -> None:
        assert request_id in self.num_cached_tokens, f"I11: beams of {request_id} before it started"
        assert (request_id, 0) not in self.ended, f"I11: beams of {request_id} after its end"
        assert results == self.beams[request_id], f"I11: {request_id} got {results}, not {self.beams[request_id]}"
        self.ended[request_id, 0] = results[0].reason

    def _hear_end(self, key: Key, reason: FinishReason) -> None:
        assert key not in self.ended, f"I11: {key} ended twice"
        self.ended[key] = reason
        # A client's stop string also ends a sequence with STOP, after the tokens sent so far.
        is_whole = (self.received[key], reason) == self.expected.get(key)
        assert key[0] not in self.beams or reason in FAILED, f"I11: {key} ended without its beams"
        assert reason not in ENDED_BY_EXECUTOR or is_whole, f"I11: {key} ended by {reason} at {self.received[key]}"

    def assert_served(self) -> None:
        """Checks that every sequence has ended, and that those that were not stopped are complete."""
        assert not self.open_requests(), f"I12: requests {self.open_requests()} never ended"
        for key, reason in self.ended.items():
            if reason in ENDED_BY_EXECUTOR and key[0] not in self.beams:
                num_prompt_tokens = len(self.requests[key[0]].prompt_token_ids)
                asked = self.requests[key[0]].params.num_prompt_logprobs
                num_told = self.num_prompt_logprobs.get(key[0], 0)
                assert not asked or num_told == num_prompt_tokens - 1, (
                    f"I18: {key} got {num_told} prompt tokens with log-probabilities"
                )
                assert (self.received[key], reason) == self.expected[key]
