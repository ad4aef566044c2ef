"""Masks against brute force: a token is allowed exactly if the output can go on with it."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from executor.grammars.followed import FollowedGrammar, Vocabulary, begin, follow
from executor.grammars.masks import GrammarCounts, Masks
from executor.grammars.slot_grammar import Patience, SlotGrammar
from executor.grammars.workers import Workers
from quire.grammars import grammar_tokenizer
from tests.support.executor.letters import EOS, OTHER_EOS, TEXTS, VOCAB_SIZE, tokenizer_json

Expression = tuple[str, frozenset[str]]
"""A regular expression, and all of its texts."""


@cache
def vocabulary(*eos: int) -> Vocabulary:
    return Vocabulary.of(grammar_tokenizer(tokenizer_json(), VOCAB_SIZE, eos), VOCAB_SIZE, eos)


def regex(pattern: str, *eos: int) -> FollowedGrammar:
    return begin(vocabulary(*(eos or (EOS,))), LLMatcher.grammar_from_regex(pattern))


def allowed(state: FollowedGrammar) -> set[int]:
    return {token for token in range(8 * len(state.mask)) if state.allows(token)}


def concatenated(parts: list[Expression]) -> Expression:
    texts = frozenset("".join(each) for each in product(*(texts for _, texts in parts)))
    return "".join(f"({pattern})" for pattern, _ in parts), texts


def repeated(part: Expression, most: int) -> Expression:
    pattern, texts = part
    repeats = ["".join(each) for count in range(most + 1) for each in product(texts, repeat=count)]
    return f"({pattern}){{0,{most}}}", frozenset(repeats)


def either(parts: list[Expression]) -> Expression:
    return "|".join(f"({pattern})" for pattern, _ in parts), frozenset().union(*(texts for _, texts in parts))


letters = st.sampled_from("abc").map(lambda letter: (letter, frozenset(letter)))
expressions = st.recursive(
    letters,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(concatenated),
        st.lists(inner, min_size=1, max_size=3).map(either),
        st.builds(repeated, inner, st.integers(1, 3)),
    ),
    max_leaves=5,
).filter(lambda expression: len(expression[1]) < 3000 and expression[1] != {""})


@given(expressions, st.sampled_from([(EOS,), (EOS, OTHER_EOS), (OTHER_EOS,), ()]), st.data())
def test_masks_equal_brute_force(expression, eos, data) -> None:
    """Follows random outputs. Every way to split a text into tokens is allowed, with one exception.

    Where only one letter can come next, llguidance allows only the token that the tokenizer would choose.
    """
    pattern, texts = expression
    beginnings = {text[:length] for text in texts for length in range(len(text) + 1)}
    state = begin(vocabulary(*eos), LLMatcher.grammar_from_regex(pattern))
    output = ""
    while True:
        expected = {token for token, text in enumerate(TEXTS) if text and output + text in beginnings}
        expected |= set(eos) if output in texts else set()
        found, next_letters = allowed(state), {text[len(output)] for text in texts if begins(text, output)}
        is_forced = len(next_letters) == 1 and output not in texts
        assert found == expected or (is_forced and len(found) == 1 and found < expected), (pattern, output)
        if not expected - set(eos):
            break
        token = data.draw(st.sampled_from(sorted(expected - set(eos))))
        output += TEXTS[token]
        state = follow(state, (token,), is_own=data.draw(st.booleans()))


def begins(text: str, output: str) -> bool:
    """Returns whether a text is longer than the output, and begins with it."""
    return text.startswith(output) and text != output


def test_a_state_that_is_shared_stays_as_it_is() -> None:
    start = regex("(ab)*c")
    before = allowed(start)
    first, second = follow(start, (2,), is_own=False), follow(start, (4,), is_own=False)
    assert allowed(start) == before
    assert allowed(first) != allowed(second) == {EOS}
    assert allowed(follow(start, (2, 3), is_own=False)) == before


def test_a_long_output_is_followed_as_token_by_token() -> None:
    output = (2, 3) * 25 + (2,)
    one_by_one = regex("(ab){0,30}c")
    for token in output:
        one_by_one = follow(one_by_one, (token,), is_own=True)
    at_once = follow(regex("(ab){0,30}c"), output, is_own=True)
    assert 3 in allowed(at_once) == allowed(one_by_one)
    assert at_once.run is not None
    assert at_once.run.output == list(output)


@pytest.mark.parametrize("output", [(3,), (2, 2), (EOS, 2), (20,), (2, EOS)])
def test_an_output_that_the_grammar_forbids_cannot_be_followed(output) -> None:
    state = follow(regex("abc"), output, is_own=True)
    assert state.run is None
    assert not allowed(state)
    assert follow(state, (2,), is_own=True).run is None
    assert (state.mask == 0xFF).all(), "there is a token to sample"


@pytest.mark.parametrize("grammar", ["", "x", "{}", '{"grammars": 3}', LLMatcher.grammar_from_regex("(")])
def test_a_grammar_that_does_not_compile_cannot_be_followed(grammar) -> None:
    assert begin(vocabulary(EOS), grammar).run is None


def test_a_letter_without_a_token_cannot_be_followed() -> None:
    """No token can come next, although the grammar compiles."""
    assert regex("d").run is None
    assert follow(regex("ad"), (2,), is_own=True).run is None


def test_an_eos_id_with_a_text_is_not_a_part_of_a_text() -> None:
    letter_b = 3
    assert allowed(regex("ab?c?", letter_b)) == {2, 5, 9}
    assert letter_b in allowed(follow(regex("ab?c?", letter_b), (2,), is_own=True))
    assert letter_b not in allowed(follow(regex("abc", letter_b), (2,), is_own=True))


def test_an_eos_id_that_tokenizer_json_lacks_ends_a_text() -> None:
    """Some checkpoints name the token that ends an answer only in tokenizer_config.json."""
    unlisted = VOCAB_SIZE - 1
    assert unlisted >= LLTokenizer(tokenizer_json()).vocab_size
    assert allowed(regex("ab?", EOS, unlisted)) == allowed(regex("ab?", EOS))
    for eos in ((EOS, unlisted), (unlisted,)):
        assert allowed(follow(regex("ab?", *eos), (2,), is_own=True)) & {EOS, unlisted} == set(eos)


def test_forbidden_logits_are_minus_infinity_and_all_others_are_kept() -> None:
    patterns = ["a", "(b|c)+", "abc"]
    workers = Workers(1, "test", FollowedGrammar.failed(VOCAB_SIZE))
    own = tuple(SlotGrammar(workers.submit(lambda each=each: regex(each))) for each in patterns)
    masks = Masks(np.array([1, 2, 4]), own, GrammarCounts(), Patience())
    logits = torch.randn(6, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    for part, rows in ((masks, slice(0, 6)), (masks.between(2, 5), slice(2, 5)), (masks.between(5, 6), slice(5, 6))):
        changed = logits[rows].clone()
        part.forbid(changed)
        for row, own in enumerate(range(rows.start, rows.stop)):
            keeps = allowed(regex(dict(zip((1, 2, 4), patterns, strict=True))[own])) if own in (1, 2, 4) else None
            for token in range(VOCAB_SIZE):
                is_kept = keeps is None or token in keeps
                assert changed[row, token] == (logits[own, token] if is_kept else -torch.inf)
    assert masks.counts.waited_ns > 0
