"""Input files are read up to a bound: a device never ends, and was read until the memory was full."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

import quire.cli.main
from planning import measured_steps, request_file
from planning.bounded_file import read_text
from planning.errors import PlanningError


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "/dev/zero"),
        ("simulate", "qwen3-0.6b", "--lengths", "/dev/zero"),
        ("simulate", "qwen3-0.6b", "--tenants", "/dev/zero"),
        ("simulate", "qwen3-0.6b", "--rate", "1", "--fit", "/dev/zero"),
    ],
)
def test_a_device_that_never_ends_is_refused(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (measured_steps, request_file):
        monkeypatch.setattr(module, "_MAX_BYTES", 1000)
    result = CliRunner().invoke(quire.cli.main.app, words)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    assert "/dev/zero: longer than" in result.stderr


def test_a_file_may_be_as_long_as_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("äb\n")
    assert read_text(path, 4) == "äb\n"
    with pytest.raises(PlanningError, match="longer than 3 bytes"):
        read_text(path, 3)
