"""The command that runs Quire in another process."""

import subprocess
import sys
from pathlib import Path

import pytest

from quire.command import interpreter, lifeline


def test_a_working_directory_that_was_removed_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed = tmp_path / "removed"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()
    assert interpreter()[-2:] == ("-X", "faulthandler")


def test_a_service_starts_in_another_directory_if_its_own_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (*lifeline(), sys.executable, "-c", "import os; print(os.getcwd())")
    monkeypatch.chdir(tmp_path)
    assert subprocess.check_output(command, text=True).strip() == str(tmp_path)
    tmp_path.rmdir()
    assert subprocess.check_output(command, text=True).strip() == "/"
