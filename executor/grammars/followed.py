"""A grammar and the output that has followed it so far: which tokens may come next.

A mask has one bit for each token: bit i % 8 of byte i // 8 belongs to token i.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from executor.grammars.turn import Turn
from quire.grammars import matcher

Mask = NDArray[np.uint8]

_TOKENS_AT_ONCE = 16
"""Tokens that a matcher consumes in one call, during which other threads do not get the interpreter."""

GrammarKey = tuple[str, tuple[int, ...]]
"""The text of a grammar, and the EOS ids that end its output."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens as matchers need them, with the EOS ids of a request.

    texts  mask of the tokens that are not EOS, neither of the request nor of the tokenizer
    ends   mask of the request's EOS ids
    """

    tokenizer: LLTokenizer
    texts: Mask
    ends: Mask

    @classmethod
    def of(cls, tokenizer: LLTokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> Self:
        others = sorted({*range(vocab_size)} - {*eos_token_ids, *tokenizer.eos_tokens})
        return cls(tokenizer, _mask(others, vocab_size), _mask(eos_token_ids, vocab_size))


@dataclass(slots=True)
class _Compiled:
    """A compiled grammar. Copies of a matcher share its lexer, whose limits count the work of all of them.

    turn      taken by the thread that follows a copy
    is_spent  a limit was exceeded: from then on every copy fails, whatever its own output
    """

    grammar: str
    vocabulary: Vocabulary
    is_spent: bool = False
    turn: Turn = field(default_factory=Turn)


@dataclass(slots=True)
class _Run:
    """A matcher, and the output that it has followed."""

    compiled: _Compiled
    matcher: LLMatcher
    output: list[int]

    @classmethod
    def new(cls, grammar: str, vocabulary: Vocabulary, output: Sequence[int] = ()) -> "_Run":
        run = cls(_Compiled(grammar, vocabulary), matcher(vocabulary.tokenizer, grammar), [])
        run.consume(output)
        return run

    def copy(self) -> "_Run":
        return _Run(self.compiled, self.matcher.deep_copy(), self.output.copy())

    def consume(self, token_ids: Sequence[int]) -> None:
        self.output += token_ids
        for first in range(0, len(token_ids), _TOKENS_AT_ONCE):
            self.matcher.consume_tokens(list(token_ids[first : first + _TOKENS_AT_ONCE]))


@dataclass(frozen=True, slots=True)
class FollowedGrammar:
    """A grammar after some output.

    run   None if the grammar cannot be followed: it does not compile, a limit was exceeded, the output is not the
          beginning of one of its texts, or no token can come next
    mask  tokens that may come next; all tokens if it cannot be followed, so that there is always one to sample
    """

    run: _Run | None
    mask: Mask

    @classmethod
    def failed(cls, vocab_size: int) -> Self:
        return cls(None, np.full(_num_bytes(vocab_size), 0xFF, dtype=np.uint8))

    @property
    def is_spent(self) -> bool:
        """True if copies of this state fail, because others have used up the limits of their lexer."""
        return self.run is not None and self.run.compiled.is_spent

    def allows(self, token_id: int) -> bool:
        """Returns whether a token may come next. No token may once the grammar cannot be followed."""
        if self.run is None or not 0 <= token_id < 8 * len(self.mask):
            return False
        return bool(self.mask.item(token_id >> 3) >> (token_id & 7) & 1)


def begin(vocabulary: Vocabulary, grammar: str) -> FollowedGrammar:
    """Returns the grammar before any output."""
    return _look(_Run.new(grammar, vocabulary))


def follow(before: FollowedGrammar, token_ids: Sequence[int], *, is_own: bool) -> FollowedGrammar:
    """Returns the grammar after more output.

    is_own  nothing else uses `before`, whose matcher goes on; otherwise it stays as it is

    If the matcher fails, a new one follows the whole output: the failure counts only if it depends on nothing else.
    Raises Busy while another thread follows a copy of the grammar.
    """
    if before.run is None:
        return before
    turn = before.run.compiled.turn
    turn.take()
    try:
        run = before.run if is_own else before.run.copy()
        run.consume(token_ids)
        state = _look(run)
        if not run.matcher.is_error():
            return state
        run.compiled.is_spent = True
    finally:
        turn.give()
    return _look(_Run.new(run.compiled.grammar, run.compiled.vocabulary, run.output))


def _look(run: _Run) -> FollowedGrammar:
    """Returns the state of a matcher, with the mask for the next token.

    EOS is allowed exactly when the text is complete. An EOS id with a text of its own is never a part of a text: the
    sequence would end there.
    """
    own, vocabulary = run.matcher, run.compiled.vocabulary
    vocab_size = 8 * len(vocabulary.texts)
    if own.is_error():
        return FollowedGrammar.failed(vocab_size)
    mask = np.zeros(len(vocabulary.texts), dtype=np.uint8)
    own.unsafe_compute_mask_ptr(mask.__array_interface__["data"][0], len(mask))  # `mask.ctypes` is slower
    mask &= vocabulary.texts
    if own.is_accepting():
        mask |= vocabulary.ends
    if own.is_error() or not np.count_nonzero(mask):
        return FollowedGrammar.failed(vocab_size)
    return FollowedGrammar(run, mask)


def _mask(token_ids: Sequence[int], vocab_size: int) -> Mask:
    bits = np.zeros(8 * _num_bytes(vocab_size), dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little")


def _num_bytes(vocab_size: int) -> int:
    """Returns the bytes of a mask, a multiple of four: matchers write int32."""
    return -(-vocab_size // 32) * 4
