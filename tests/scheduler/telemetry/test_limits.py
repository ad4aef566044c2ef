"""The number of open files."""

import errno
import os
import resource
from contextlib import suppress

import pytest

from scheduler.telemetry.limits import num_open_files


def test_open_files_are_counted() -> None:
    before = num_open_files()
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    try:
        assert num_open_files() == before + 3
    finally:
        for each in opened:
            os.close(each)


def test_as_many_files_are_open_as_may_be_when_no_descriptor_is_left() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 10
    opened = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        number = num_open_files()
    finally:
        for each in opened:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert number == limit


def test_a_system_that_does_not_say_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: str) -> list[str]:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    monkeypatch.setattr("os.listdir", fails)
    assert num_open_files() == 0
