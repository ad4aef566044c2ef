"""The command that runs Quire in another process."""

from pathlib import Path

import pytest

from quire.command import interpreter


def test_a_working_directory_that_was_removed_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed = tmp_path / "removed"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()
    assert interpreter()[-2:] == ("-X", "faulthandler")
