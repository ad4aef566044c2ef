"""The output of `quire serve`, with and without a reader."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.cli.serve_output import lines_to
from quire.logs import FORMATS
from tests.support.paths import ROOT
from tests.support.waiting import WAIT_S, until

SERVE = """
import sys
import quire.cli.main
from tests.support.client import fake_pair
log_format, scheduler, executor = sys.argv[1:]
children = getattr(fake_pair, scheduler), (sys.executable, "-c", executor)
pair = fake_pair.FakePair(*children, log_format=log_format)
quire.cli.main.service_pair = lambda values: pair
quire.cli.main.app(["serve"])
"""
NOISE = """
for _ in range(2000):  # far more than a pipe holds
    print("x" * 200, flush=True)
"""
PERSISTENT = """
import os, sys, time
with open({path!r}, "a") as file:
    print(os.getpid(), file=file)
time.sleep(600)
"""


@contextmanager
def unread(how: str, log_format: str, scheduler: str, executor: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs `quire serve` without a reader of its standard error: the reader has `left`, or is `paused`."""
    command = [sys.executable, "-c", SERVE, log_format, scheduler, NOISE + executor]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        if how == "left" and process.stderr is not None:
            process.stderr.close()
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("log_format", FORMATS)
@pytest.mark.parametrize("how", ["left", "paused"])
async def test_without_a_reader_children_are_restarted_and_a_signal_ends_all(
    how: str, log_format: str, tmp_path: Path
) -> None:
    path = tmp_path / "executors"
    path.touch()

    def executors() -> list[str]:
        return path.read_text().splitlines()

    with unread(how, log_format, "SERVING", PERSISTENT.format(path=str(path))) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"ready ")
        await until(lambda: len(executors()) == 1)
        os.kill(int(executors()[0]), signal.SIGKILL)
        await until(lambda: len(executors()) == 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0


@pytest.mark.parametrize("how", ["left", "paused"])
def test_without_a_reader_the_exit_code_is_that_of_the_child(how: str) -> None:
    with unread(how, "console", "IDLE", "raise SystemExit(2)") as process:
        assert process.wait(WAIT_S) == 2


def printed(log_format: str, *lines: tuple[str, str]) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    with lines_to(out, err, log_format) as (say, log):
        say("ready")
        for name, line in lines:
            log(name, line)
    return out.getvalue(), err.getvalue()


def test_each_line_begins_with_the_name_of_its_child() -> None:
    out, err = printed("console", ("executor", "loading [bold]"), ("supervisor", "draining " * 30))
    assert out == "ready\n"
    assert err.splitlines() == ["  executor | loading [bold]", f"supervisor | {'draining ' * 30}"]


def test_all_lines_are_json_if_the_children_log_as_json() -> None:
    _, err = printed("json", ("executor", '{"event": "loading"}'), ("supervisor", "draining"))
    assert [json.loads(line)["event"] for line in err.splitlines()] == ["loading", "draining"]


def test_a_terminal_that_closes_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor logs that it drains, because the terminal has closed."""
    monkeypatch.setenv("TERM", "xterm")
    terminal, ours = os.openpty()
    err = io.TextIOWrapper(io.FileIO(ours, "w"), write_through=True)  # as Python opens standard error
    with err, lines_to(io.StringIO(), err, "console") as (_, log):
        log("scheduler", "before")
        assert b"scheduler | \x1b[0mbefore" in os.read(terminal, 100)
        os.close(terminal)
        log("supervisor", "draining")
