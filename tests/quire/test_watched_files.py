"""Changed files are read again, also if they could not be used for a moment."""

import logging
from pathlib import Path

import pytest

from quire import watched_files
from quire.watched_files import WatchedFiles


class Reader:
    """Reads a file, unless `error` is set."""

    def __init__(self, path: Path) -> None:
        self.path, self.error, self.num_reads = path, "", 0

    def __call__(self) -> str:
        self.num_reads += 1
        if self.error:
            raise ValueError(self.error)
        return self.path.read_text()


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    path = tmp_path / "file"
    path.write_text("old")
    return Reader(path)


def test_a_changed_file_is_read_again(reader: Reader) -> None:
    watched = WatchedFiles([str(reader.path)], reader)
    assert [watched.get(), watched.get()] == ["old", "old"]
    reader.path.write_text("newer")
    assert [watched.get(), watched.get()] == ["newer", "newer"]
    assert reader.num_reads == 2


def test_a_file_that_could_not_be_read_for_a_moment_is_read_later(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A revoked key would stay valid otherwise, until the file changes once more."""
    monkeypatch.setattr(watched_files, "RETRY_S", 0.0)
    watched = WatchedFiles([str(reader.path)], reader)
    reader.path.write_text("newer")
    reader.error = "too many open files"
    with caplog.at_level(logging.ERROR):
        assert [watched.get(), watched.get()] == ["old", "old"]
    assert len(caplog.records) == 1, "it is said once"
    reader.error = ""
    assert watched.get() == "newer"


def test_a_file_that_cannot_be_used_is_not_read_in_each_call(reader: Reader) -> None:
    watched = WatchedFiles([str(reader.path)], reader)
    reader.path.write_text("newer")
    reader.error = "no JSON"
    assert {watched.get() for _ in range(10)} == {"old"}
    assert reader.num_reads == 2
    reader.path.write_text("newest")
    reader.error = ""
    assert watched.get() == "newest", "another change counts at once"


def test_a_change_of_rights_is_a_change(reader: Reader) -> None:
    watched = WatchedFiles([str(reader.path)], reader)
    reader.path.chmod(0o640)
    watched.get()
    assert reader.num_reads == 2
