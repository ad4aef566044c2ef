"""The model of the simulated executors: the fake executor of the core's tests, with penalties and min_tokens.

A penalty changes the next token according to the tokens that the executor counts as output. So a sequence that goes on
elsewhere, with another border between prompt and output, has other tokens.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING
from zlib import crc32

from tests.support.core import fake_executor
from tests.support.core.fake_executor import FakeExecutor, context_of, end_reason, kv_entry, sample_token

if TYPE_CHECKING:
    from scheduler.core import FinishReason, SequenceParams
    from scheduler.core.beams.search import Candidates
    from tests.support.core.fake_executor import Sample, Slot

NO_PENALTIES = (1.0, 0.0, 0.0)
"""Repetition, frequency and presence."""

_rank_tokens = fake_executor.rank_tokens


@lru_cache(4096)
def _ranked(entries: tuple[int, ...], number: int, vocab_size: int) -> Candidates:
    return _rank_tokens(list(entries), number, vocab_size)


def rank_tokens(entries: list[int], number: int, vocab_size: int) -> Candidates:
    """Returns what `fake_executor.rank_tokens` does, whose results are needed by a run and by its oracle."""
    token_ids, values = _ranked(tuple(entries), max(number, vocab_size), vocab_size)
    return token_ids[:number], values[:number]


def next_token(
    context: list[int], params: SequenceParams, seed: int, prompt_length: int, token_ids: list[int], vocab_size: int
) -> int:
    """Returns the token that follows `token_ids`, whose KV entries are `context`."""
    penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    if penalties != NO_PENALTIES:
        seed ^= crc32(array("d", (*penalties, *sorted(token_ids[prompt_length:]))))
    token_id = sample_token(context, seed, vocab_size)
    if len(token_ids) + 1 < params.min_total_tokens:
        while token_id in params.eos_token_ids or token_id in params.stop_token_ids:
            token_id = (token_id + 1) % vocab_size
    return token_id


def expected_output(
    prompt: list[int], params: SequenceParams, seed: int, vocab_size: int
) -> tuple[list[int], FinishReason]:
    """Returns the output that a sequence must generate in every schedule, and the reason for its end."""
    context, token_ids = context_of(prompt), list(prompt)
    while True:
        token_id = next_token(context, params, seed, len(prompt), token_ids, vocab_size)
        token_ids.append(token_id)
        if reason := end_reason(params, token_id, len(token_ids)):
            return token_ids[len(prompt) :], reason
        context.append(kv_entry(context, token_id))


@dataclass
class SimulatedModel(FakeExecutor):
    """The slots and the pool of an executor for one lease."""

    def _sample(self, slot: Slot, context: list[int]) -> Sample:
        if self.num_to_defer:
            return super()._sample(slot, context)
        prompt_length = slot.num_prompt_tokens
        token_id = next_token(context, slot.params, slot.seed, prompt_length, slot.token_ids, self.vocab_size)
        slot.token_ids.append(token_id)
        reason = end_reason(slot.params, token_id, len(slot.token_ids))
        slot.has_ended = reason is not None
        return token_id, reason
