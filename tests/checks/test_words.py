"""The check of docstrings, comments and names finds what CONTRIBUTING.md forbids, and nothing else."""

from pathlib import Path

import pytest

from checks.words import check_python, check_text, main

HERE = Path("example.py")


def rules(source: str) -> list[str]:
    return [finding.rule for finding in check_python(HERE, source)]


@pytest.mark.parametrize(
    "opening",
    [
        "Returns the blocks that hold the head of a sequence.",
        "Called when a request ends; wakes drain().",
        "Defaults from generation_config.json.",
        "`quire serve`: starts both services.",
        "Offers a block; an official one.",
        "Returns the token ids,\n    one list for each sequence.",
    ],
)
def test_sentences_pass(opening: str) -> None:
    assert rules(f'"""{opening}"""') == []


@pytest.mark.parametrize(
    "opening",
    [
        "Of this epoch.",
        "Who is next, with the blocks that its prompt shares.",
        "What leaves the core.",
        "So many tokens more.",
        "Whether a request has not ended.",
        "the next step",
        "Returns the next step",
    ],
)
def test_riddles_and_fragments_are_found(opening: str) -> None:
    assert "W1" in rules(f'def f() -> None:\n    """{opening}"""')


@pytest.mark.parametrize(
    "text",
    ["sequences who wait", "nobody waits for this thread", "Whoever calls it.", "so that nobody's block is freed"],
)
def test_components_are_no_people(text: str) -> None:
    assert rules(f"x = 1  # {text}") == ["W2"]
    assert rules(f"x = {text!r}") == ["W2"]
    assert [finding.rule for finding in check_text(HERE, text)] == ["W2"]


@pytest.mark.parametrize(
    "text", ["a user who waits", "operators, who restart it", "those to whom it matters", "a sequence whose blocks"]
)
def test_people_are_people(text: str) -> None:
    assert rules(f"x = 1  # {text}") == []


@pytest.mark.parametrize("opening", ["Of the pool.", "What a client needs.", "So many tokens."])
def test_descriptions_of_constants_are_no_riddles(opening: str) -> None:
    assert rules(f'LIMIT = 1\n"""{opening}"""') == ["W1"]
    assert rules(f'class Limits:\n    most: int = 1\n    """{opening}"""') == ["W1"]
    assert rules('LIMIT = 1\n"""maximum number of tokens, by tenant"""') == []


def test_names_are_read_too() -> None:
    assert rules("def test_nobody_waits() -> None: ...") == ["W2"]
    assert rules("def test_whole_blocks() -> None: ...") == []


def test_lines_are_counted_behind_a_phrase_that_runs_over_two() -> None:
    findings = list(check_text(HERE, "a user\nwho waits\nand a thread who waits"))
    assert [finding.line for finding in findings] == [3]


def test_a_path_without_a_file_does_not_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs/glosary.md"]) == 2
    assert capsys.readouterr().out == "words: no file to check in docs/glosary.md\n"
    assert main(["docs/glossary.md"]) == 0
