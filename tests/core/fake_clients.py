"""The clients of a test: they know what they must be told, and object to everything else at once."""

from dataclasses import dataclass, field

from scheduler.core import Events, FinishReason, Request
from tests.core.fake_executor import expected_output

Key = tuple[int, int]
"""(request_id, index): one sequence, as a client knows it."""

ENDED_BY_EXECUTOR = (FinishReason.EOS, FinishReason.LENGTH)
FAILED = (FinishReason.DEADLINE, FinishReason.ERROR)


@dataclass
class FakeClients:
    """All clients. A client hears `started` once, then the expected tokens of each of its sequences, each once and in
    order (I11), then the end of each; after it has gone away it hears nothing."""

    vocab_size: int
    requests: dict[int, Request] = field(default_factory=dict)
    expected: dict[Key, tuple[list[int], FinishReason]] = field(default_factory=dict)
    received: dict[Key, list[int]] = field(default_factory=dict)
    ended: dict[Key, FinishReason] = field(default_factory=dict)
    num_cached_tokens: dict[int, int] = field(default_factory=dict)  # by request, once it has started

    def submit(self, request: Request) -> None:
        prompt = list(request.prompt_token_ids)
        self.requests[request.request_id] = request
        for index, seed in enumerate(request.seeds):
            key = (request.request_id, index)
            self.expected[key] = expected_output(prompt, request.params, seed, self.vocab_size)
            self.received[key] = []

    def go_away(self, request_id: int) -> None:
        for key in self.open_keys(request_id):
            self.ended[key] = FinishReason.CANCELLED

    def open_keys(self, request_id: int) -> list[Key]:
        """Sequences of a request that have not ended, for all the client knows."""
        keys = [(request_id, index) for index in range(self.requests[request_id].num_sequences)]
        return [key for key in keys if key not in self.ended]

    def open_requests(self) -> list[int]:
        return [request_id for request_id in self.requests if self.open_keys(request_id)]

    def hear(self, events: Events) -> None:
        for sequence in events.started:
            self._hear_start(sequence.request.request_id, sequence.num_cached_tokens)
        for sequence, token_id in zip(events.sequences, events.token_ids, strict=True):
            self._hear_token((sequence.request.request_id, sequence.index), token_id)
        for sequence, reason in events.finished:
            self._hear_end((sequence.request.request_id, sequence.index), reason)
        for sequence, reason in events.finished:
            if reason in FAILED:  # with one of its sequences the whole request fails, samples not yet born included
                for key in self.open_keys(sequence.request.request_id):
                    self.ended[key] = reason

    def _hear_start(self, request_id: int, num_cached_tokens: int | None) -> None:
        assert request_id not in self.num_cached_tokens, f"I11: request {request_id} started twice"
        assert num_cached_tokens is not None, f"I11: request {request_id} started without a count of cached tokens"
        num_prompt_tokens = len(self.requests[request_id].prompt_token_ids)
        assert 0 <= num_cached_tokens < num_prompt_tokens, f"I11: {num_cached_tokens} cached of {num_prompt_tokens}"
        self.num_cached_tokens[request_id] = num_cached_tokens

    def _hear_token(self, key: Key, token_id: int) -> None:
        assert key[0] in self.num_cached_tokens, f"I11: a token of {key} before its request started"
        assert key not in self.ended, f"I11: a token of {key} after its end"
        expected, received = self.expected[key][0], self.received[key]
        assert len(received) < len(expected), f"I11: {key} got more than {expected}"
        received.append(token_id)
        assert received == expected[: len(received)], f"I11: {key} got {received} of {expected}"

    def _hear_end(self, key: Key, reason: FinishReason) -> None:
        assert key not in self.ended, f"I11: {key} ended twice"
        self.ended[key] = reason
        # STOP is also how a client's own stop string ends: with what was sent so far.
        is_whole = (self.received[key], reason) == self.expected[key]
        assert reason not in ENDED_BY_EXECUTOR or is_whole, f"I11: {key} ended by {reason} at {self.received[key]}"

    def assert_served(self) -> None:
        """Every sequence has ended; those that nobody stopped are whole."""
        assert not self.open_requests(), f"I12: requests {self.open_requests()} never ended"
        for key, reason in self.ended.items():
            if reason in ENDED_BY_EXECUTOR:
                assert (self.received[key], reason) == self.expected[key]
