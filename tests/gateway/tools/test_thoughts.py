"""Thoughts are told from answers, however the text is cut, and no character is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tools.events import Event, merged
from gateway.tools.formats import FORMATS
from gateway.tools.thoughts import MISTRAL, THINK, ThoughtReader, ThoughtTags, tags_of
from tests.gateway.tools.texts import USE, calls, content, cuts, one_call, reasoning, written

PIECES = ["<think>", "</think>", "<think", "</", "<", ">", " ", "\n", "x", "é😀", one_call("hermes"), "<tool_call>"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


def read(
    parts: str | list[str], *, is_within: bool = False, tags: ThoughtTags = THINK, name: str | None = None
) -> list[Event]:
    rest = None if name is None else FORMATS[name].reader(USE)
    reader = ThoughtReader(tags, rest, is_within=is_within)
    events = [event for part in ([parts] if isinstance(parts, str) else parts) for event in reader.feed(part)]
    return merged([*events, *reader.end()])


@pytest.mark.parametrize(
    ("text", "is_within", "thought", "answer"),
    [
        ("<think>\nHm, a < b.\n</think>\n\nYes.\n", False, "Hm, a < b.", "Yes.\n"),
        ("\n<think>Hm.</think>Yes.", False, "Hm.", "Yes."),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("Hm.\n</think>\n\nYes.", True, "Hm.", "Yes."),
        ("<think>Hm.</think>Yes.", True, "Hm.", "Yes."),  # although the prompt has opened it
        ("</think>Yes.", True, "", "Yes."),
        ("<think>Hm, it breaks of", False, "Hm, it breaks of", ""),
        ("Hm, it breaks of</thin", True, "Hm, it breaks of</thin", ""),
        ("<think>a <think> b </think> c </think> d", False, "a <think> b", "c </think> d"),
        (" Yes. ", False, "", " Yes. "),
        ("The tag <think> opens, </think> closes.", False, "", "The tag <think> opens, </think> closes."),
        ("<thinking>Yes.</thinking>", False, "", "<thinking>Yes.</thinking>"),
        ("<thi", False, "", "<thi"),
        ("", False, "", ""),
        ("", True, "", ""),
    ],
)
def test_thoughts(text: str, is_within: bool, thought: str, answer: str) -> None:
    for parts in ([text], list(text)):
        events = read(parts, is_within=is_within)
        assert (reasoning(events), content(events)) == (thought, answer)
        assert written(events) == text


def test_a_thought_arrives_while_it_is_written() -> None:
    reader = ThoughtReader(THINK, None)
    assert reasoning(reader.feed("<think>\nHm, a ")) == "Hm, a"
    assert reasoning(reader.feed("<b")) == " <b"
    assert reasoning(reader.feed(" </thi")) == ""
    assert content(reader.feed("nk> Yes")) == "Yes"
    assert content(reader.feed(" and")) == " and"


def test_calls_are_read_after_the_thought_only() -> None:
    thought = f"I could write {one_call('hermes')} here"
    events = read(f"<think>{thought}</think>\nI look.\n{one_call('hermes')}", name="hermes")
    assert reasoning(events) == thought
    assert content(events) == "I look."
    assert calls(events) == [("weather", '{"city": "Rome"}')]


def test_mistral_has_tags_of_its_own() -> None:
    events = read(f"[THINK]Hm [x].[/THINK]{one_call('mistral')}", tags=MISTRAL, name="mistral")
    assert reasoning(events) == "Hm [x]."
    assert calls(events) == [("weather", '{"city": "Rome"}')]


@given(
    text=TEXTS, positions=st.lists(st.integers(0, 200), max_size=6), is_within=st.booleans(), has_tools=st.booleans()
)
def test_cuts_change_nothing(text: str, positions: list[int], is_within: bool, has_tools: bool) -> None:
    name = "hermes" if has_tools else None
    whole = read(text, is_within=is_within, name=name)
    assert read(cuts(text, *positions), is_within=is_within, name=name) == whole
    assert written(whole) == text


@pytest.mark.parametrize("text", ["<" * 200_000, "<think>" + "</thin" * 50_000, " " * 200_000, "<think>" * 50_000])
def test_hostile_texts_cost_linear_work(text: str) -> None:
    assert written(read(cuts(text, *range(0, len(text), 1000)))) == text


@pytest.mark.parametrize(
    ("template", "tags"),
    [
        ("{{- '<|im_start|>assistant\\n<think>\\n' }}", THINK),
        ("{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}", THINK),
        ("{{ '[THINK]' + message.thinking + '[/THINK]' }}", MISTRAL),
        ("{{ messages }}", None),
        ("", None),
    ],
)
def test_the_template_tells_the_tags(template: str, tags: ThoughtTags | None) -> None:
    assert tags_of(template) is tags


@pytest.mark.parametrize(
    ("text", "is_open"),
    [("a<think>\n", True), ("a<think>\n\n</think>\n", False), ("a", False), ("<think></think><think>", True)],
)
def test_a_prompt_can_open_a_thought(text: str, is_open: bool) -> None:
    assert THINK.is_open(text) is is_open
