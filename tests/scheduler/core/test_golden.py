"""Golden transcripts: scripts of events in golden/*.txt, each event followed by the effects on the scheduler.

`pytest tests/scheduler/core --regenerate` writes them again; then review the difference.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.core.transcript import Transcript

GOLDEN = Path(__file__).parent / "golden"
SCRIPTS = sorted(GOLDEN.glob("*.txt"))
RULER = "----"


def paragraphs(text: str) -> Iterator[list[str]]:
    """Yields the lines between empty lines."""
    for paragraph in text.split("\n\n"):
        lines = paragraph.strip("\n").splitlines()
        if lines:
            yield lines


def perform(text: str) -> str:
    """Returns the script with its current outputs. A paragraph is a comment, or a command with its output."""
    transcript = Transcript()
    performed = []
    for lines in paragraphs(text):
        is_comment = lines[0].startswith("#")
        performed.append("\n".join(lines) if is_comment else f"{lines[0]}\n{RULER}\n{transcript.perform(lines[0])}")
    return "\n\n".join(performed) + "\n"


@pytest.mark.parametrize("path", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_equals_the_transcript(path: Path, regenerate: bool) -> None:
    text = path.read_text()
    performed = perform(text)
    if regenerate:
        path.write_text(performed)
    assert performed == path.read_text()


def test_there_are_transcripts() -> None:
    assert len(SCRIPTS) >= 11


def test_a_script_with_a_mistake_is_not_performed() -> None:
    for script in ("dance", "schedule", "start blocks=4 block_size=4 seqs=2 budget=8 colour=red"):
        with pytest.raises(KeyError):
            perform(script)
