"""Copies of a grammar share limits of work: what one output has used up fails no other."""

from __future__ import annotations

import random

import pytest
from llguidance import LLMatcher, LLParserLimits

from executor.grammars.followed import FollowedGrammar, Vocabulary, begin, follow
from executor.grammars.grammar_cache import Grammars
from quire import grammars as shared
from quire.grammars import grammar_tokenizer
from tests.support.executor.letters import EOS, VOCAB_SIZE, tokenizer_json

LETTERS = range(2, 5)
PATTERN = LLMatcher.grammar_from_regex("(a|b|c){0,40}a(a|b|c){5}")
"""Its lexer has a state for each of the last five letters that were read, and for each length."""


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a lexer have as many states as one output needs, but not as many as a dozen outputs need."""
    monkeypatch.setattr(shared, "_LIMITS", LLParserLimits(max_lexer_states=150, verbose_errors=False))


def output(seed: int) -> list[int]:
    return random.Random(seed).choices(LETTERS, k=30)


def spend(start: FollowedGrammar) -> tuple[list[int], FollowedGrammar]:
    """Follows outputs from one start until its copies fail. Returns the output that met the limit, and its state."""
    for seed in range(500):
        token_ids = output(seed)
        state = follow(start, token_ids[:1], is_own=False)
        for token_id in token_ids[1:]:
            state = follow(state, (token_id,), is_own=True)
        if start.is_spent:
            return token_ids, state
    raise AssertionError("the limit was never met")


@pytest.mark.usefixtures("few_states")
def test_an_output_that_meets_the_limit_of_others_goes_on_as_if_it_were_alone() -> None:
    vocabulary = Vocabulary.of(grammar_tokenizer(tokenizer_json(), VOCAB_SIZE, (EOS,)), VOCAB_SIZE, (EOS,))
    token_ids, state = spend(begin(vocabulary, PATTERN))
    alone = follow(begin(vocabulary, PATTERN), token_ids, is_own=False)
    assert alone.run is not None
    assert state.run is not None
    assert state.mask.tolist() == alone.mask.tolist()


@pytest.mark.usefixtures("few_states")
def test_a_grammar_whose_copies_fail_is_compiled_again_for_the_next_request() -> None:
    grammars = Grammars(tokenizer_json(), VOCAB_SIZE)
    start = grammars.start((PATTERN, (EOS,)))
    spend(start.result())
    again = grammars.start((PATTERN, (EOS,)))
    assert again is not start
    assert not again.result().is_spent
    assert again.result().run is not None
    assert grammars.start((PATTERN, (EOS,))) is again
    assert grammars.counts.num_compiled == 2


@pytest.mark.usefixtures("few_states")
def test_an_output_that_needs_more_than_the_limit_alone_fails() -> None:
    vocabulary = Vocabulary.of(grammar_tokenizer(tokenizer_json(), VOCAB_SIZE, (EOS,)), VOCAB_SIZE, (EOS,))
    hungry = LLMatcher.grammar_from_regex("(a|b|c){0,400}a(a|b|c){9}")
    state = begin(vocabulary, hungry)
    for token_id in random.Random(1).choices(LETTERS, k=400):
        state = follow(state, (token_id,), is_own=True)
    assert state.run is None
