"""The matcher agrees with a search of the whole text, whatever pieces the text arrives in."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.text.stop_strings import StopMatcher

letters = st.text(st.sampled_from("ab"), max_size=24)
stop_lists = st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=5), min_size=1, max_size=4)
cuts = st.lists(st.integers(0, 4), max_size=12)


def naive(text: str, stops: list[str], include_stop: bool) -> str | None:
    """Returns the text up to the first complete match (the longest of several), or None without a match."""
    matches = [(start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0]
    if not matches:
        return None
    end, start = min(matches)
    return text[: end if include_stop else start]


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, text]


@settings(max_examples=1000)
@given(text=letters, stops=stop_lists, sizes=cuts, include_stop=st.booleans())
def test_matches_equal_a_search_of_the_text(text: str, stops: list[str], sizes: list[int], include_stop: bool) -> None:
    matcher = StopMatcher(stops, include_stop=include_stop)
    sent, num_fed = "", 0
    for piece in cut(text, sizes):
        num_fed += 1
        sent += matcher.feed(piece)
        if matcher.has_matched:
            break
    expected = naive(text, stops, include_stop)
    assert matcher.has_matched == (expected is not None)
    if expected is None:
        sent += matcher.flush()
        assert sent == text
    else:
        assert sent == expected
        fed = "".join(cut(text, sizes)[:num_fed])
        before = "".join(cut(text, sizes)[: num_fed - 1])
        assert naive(fed, stops, include_stop) is not None
        assert naive(before, stops, include_stop) is None
        assert matcher.num_tokens == num_fed


@settings(max_examples=500)
@given(text=letters, stops=stop_lists, sizes=cuts)
def test_only_text_that_may_become_a_stop_string_is_held_back(text: str, stops: list[str], sizes: list[int]) -> None:
    matcher = StopMatcher(stops)
    fed = sent = ""
    for piece in cut(text, sizes):
        fed += piece
        sent += matcher.feed(piece)
        if matcher.has_matched:
            return
        held = fed[len(sent) :]
        assert fed == sent + held
        prefixes = {stop[:k] for stop in stops for k in range(len(stop))}
        longest = max((fed[i:] for i in range(len(fed) + 1) if fed[i:] in prefixes), key=len)
        assert held == longest


def test_longest_of_simultaneous_matches_wins() -> None:
    assert StopMatcher(["b", "ab"]).feed("xab") == "x"
    assert StopMatcher(["b", "ab"], include_stop=True).feed("xab") == "xab"


def test_match_that_completes_first_wins() -> None:
    whole, by_character = StopMatcher(["abc", "b"]), StopMatcher(["abc", "b"])
    assert whole.feed("abc") == "a"
    assert [by_character.feed(character) for character in "ab"] == ["", "a"]
    assert by_character.has_matched


def test_search_starts_at_min_tokens() -> None:
    matcher = StopMatcher(["a"], min_tokens=3)
    assert matcher.feed("a") == "a"
    assert matcher.feed("a") == "a"
    assert not matcher.has_matched
    assert matcher.feed("xa") == "x"
    assert matcher.has_matched
    assert matcher.num_tokens == 3


def test_flushed_text_can_complete_a_match() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.feed("xa") == "x"
    assert matcher.flush("b!") == ""
    assert matcher.has_matched


@pytest.mark.parametrize("include_stop", [True, False])
def test_characters_beyond_ascii_match(include_stop: bool) -> None:
    matcher = StopMatcher(["。\n"], include_stop=include_stop)
    assert matcher.feed("好。") == "好"
    assert matcher.feed("\n再") == ("。\n" if include_stop else "")
