"""Output that cannot be written is dropped: nothing raises, and the writer goes on."""

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

import pytest

from quire.log_writer import LineWriter, put_line
from tests.support.paths import ROOT
from tests.support.waiting import wait_until


def full() -> TextIO:
    return open("/dev/full", "w", encoding="utf-8")


def without_reader() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def closed() -> TextIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.fixture(params=[full, without_reader, closed, lambda: None], ids=["full", "left", "closed", "absent"])
def stream(request: pytest.FixtureRequest) -> Iterator[TextIO | None]:
    make: Callable[[], TextIO | None] = request.param
    stream = make()
    yield stream
    if stream is not None:
        stream.close()  # raises if anything was left in its buffer


def test_a_line_that_cannot_be_written_is_dropped(stream: TextIO | None) -> None:
    put_line(stream, "ready")


def test_a_writer_goes_on_after_a_failure(stream: TextIO | None) -> None:
    writer = LineWriter(stream)
    for _ in range(3):
        writer.put("a line")
        wait_until(lambda: not writer._lines and not writer._is_writing)
    assert writer._thread.is_alive()
    writer.close()


def test_lines_are_written_at_once() -> None:
    out = io.StringIO()
    put_line(out, "ready")
    assert out.getvalue() == "ready\n"


@pytest.mark.parametrize("how", ["full", "left", "closed"])
def test_the_exit_code_of_a_service_does_not_depend_on_its_output(how: str) -> None:
    """A scheduler that finds no model ends with status 2, even if it cannot say so."""
    redirections = {"full": ">/dev/full 2>&1", "left": "2>&1 | true", "closed": ">&- 2>&-"}
    arguments = "scheduler --model /no/such/model --listen 127.0.0.1:0 --http-listen 127.0.0.1:0"
    command = f"set -o pipefail; sleep 0.1; {sys.executable} -m quire {arguments} {redirections[how]}"
    assert subprocess.run(["bash", "-c", command], cwd=ROOT, check=False).returncode == 2
