"""The log: one line for each record, in both formats, whatever the record contains."""

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from quire.log_writer import WritingHandler
from quire.logs import FORMATS, as_json_line, configure, event_of, log_as, printable

HOSTILE = 'mine\n2026-01-01 [info] request ended\r\x1b[31m\x1b]0;title\x07\x00\u202e reason=eos "quoted"\u2028end'
log = logging.getLogger("scheduler.test")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Restores the logging of the process, which all tests share."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    log_as(request_id="", trace_id="")


def configured(log_format: str, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    configure("scheduler", level, log_format, stream)
    return stream


def text(stream: io.StringIO) -> str:
    for handler in logging.getLogger().handlers:
        handler.flush()
    return stream.getvalue()


def records(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text(stream).splitlines()]


def test_json_records() -> None:
    stream = configured("json")
    log.info("request %s", "ended", extra={"num_tokens": 3, "ttft_s": 0.25, "trace_id": None, "client": ""})
    (record,) = records(stream)
    assert record.pop("timestamp").endswith("Z")
    assert record == {
        "event": "request ended",
        "level": "info",
        "logger": "scheduler.test",
        "service": "scheduler",
        "num_tokens": 3,
        "ttft_s": 0.25,
    }


def test_console_records() -> None:
    stream = configured("console")
    log.warning("executor lost: %s", "cut", extra={"num_tokens": 3})
    line = text(stream)
    assert line.endswith("executor lost: cut [scheduler.test] num_tokens=3\n")
    assert "warning" in line
    assert "\x1b" not in line, "no colours without a terminal"


@pytest.mark.parametrize("log_format", FORMATS)
def test_control_characters_are_escaped(log_format: str) -> None:
    stream = configured(log_format)
    log.info("of %s", HOSTILE, extra={"request_id": HOSTILE, "others": [HOSTILE], HOSTILE: 1})
    written = text(stream)
    assert len(written.splitlines()) == 1
    assert written[:-1].isprintable()


def test_values_with_spaces_are_quoted() -> None:
    stream = configured("console")
    log.info("ended", extra={"request_id": 'a reason="eos"'})
    assert text(stream).endswith(" request_id='a reason=\"eos\"'\n")


@pytest.mark.parametrize("log_format", FORMATS)
def test_tracebacks(log_format: str) -> None:
    stream = configured(log_format)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.exception("broke")
    written = text(stream)
    if log_format == "json":
        (record,) = records(stream)
        assert record["event"] == "broke"
        assert record["exception"].startswith("Traceback")
    else:
        head, *rest = written.splitlines()
        assert head.endswith("broke [scheduler.test]")
        assert len(rest) > 3
        assert all(line.startswith("    ") and line.isprintable() for line in rest), "a client forged a line"


@pytest.mark.parametrize("log_format", FORMATS)
def test_libraries_and_warnings_use_the_same_pipeline(log_format: str) -> None:
    stream = configured(log_format)
    logging.getLogger("asyncio").error("something in a library")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    lines = text(stream).splitlines()
    assert len(lines) == 2
    assert "something in a library" in lines[0]
    assert "DeprecationWarning: old" in lines[1]


def test_levels() -> None:
    stream = configured("json", level="error")
    log.info("no")
    log.warning("no")
    log.error("yes")
    assert [record["event"] for record in records(stream)] == ["yes"]


def test_configuring_twice_does_not_duplicate_lines() -> None:
    configured("console")
    stream = configured("json")
    log.info("once")
    assert len(records(stream)) == 1


async def test_lines_of_a_task_have_the_fields_of_its_request() -> None:
    stream = configured("json")

    async def handle(request_id: str) -> None:
        log_as(request_id=request_id, trace_id="")
        await asyncio.sleep(0)
        log.info("in its task")
        await asyncio.create_task(deeper())

    async def deeper() -> None:
        log.info("in a task of its task")

    await asyncio.gather(handle("a"), handle("b"))
    log.info("about none")
    told = [(record["event"], record.get("request_id")) for record in records(stream)]
    assert sorted(told, key=str) == sorted(
        [(event, name) for name in "ab" for event in ("in its task", "in a task of its task")] + [("about none", None)],
        key=str,
    )
    assert all("trace_id" not in record for record in records(stream))


def test_printed_lines_become_records() -> None:
    logged = '{"event": "x", "service": "executor"}'
    assert as_json_line("executor", logged) == logged
    for line in ("ready 127.0.0.1:1", "{not json}", '{"a": 1} and more', "Traceback\x1b"):
        record = json.loads(as_json_line("executor", line))
        assert (record["event"], record["service"], record["level"]) == (line, "executor", "info")
        assert {"timestamp", "level", "service", "logger", "event"} <= record.keys()


def test_the_event_of_a_line_is_found_again() -> None:
    for line in ("ready 127.0.0.1:1", "{not json}", '{"a": 1}', "{}", "[1]", "Traceback", ""):
        assert event_of(as_json_line("executor", line)) in (line, as_json_line("executor", line))
        assert event_of(line) == line
    assert event_of(as_json_line("executor", "the reason")) == "the reason"
    assert event_of(deep := '{"event":' + "[" * 9999) == deep


@pytest.mark.parametrize("made_up", ["", "plain", "ünï 漢字 🙂", HOSTILE, "\ud800", "\\n"])
def test_printable(made_up: str) -> None:
    assert printable(made_up).isprintable()
    if made_up.isprintable():
        assert printable(made_up) == made_up


def test_logging_does_not_wait_for_a_stuck_reader() -> None:
    num_lines = 5000  # far more than a pipe and the queue hold
    reader, writer = os.pipe()
    with open(writer, "w") as stream:
        handler = WritingHandler(stream, max_lines=100)
        others = logging.getLogger("stuck")
        others.addHandler(handler)
        others.propagate = False
        try:
            for number in range(num_lines):
                others.warning("%d %s", number, "x" * 100)
            lines: list[str] = []
            num_lost, rest = 0, ""
            while len(lines) + num_lost < num_lines:
                *complete, rest = (rest + os.read(reader, 1 << 16).decode()).split("\n")
                lines += [line for line in complete if line.endswith("x")]
                num_lost += sum(int(line.split()[0]) for line in complete if line.endswith("lost: it was not read"))
        finally:
            others.removeHandler(handler)
            handler.close()
            os.close(reader)
    assert num_lost > 0
    assert len(lines) + num_lost == num_lines
    numbers = [int(line.split()[0]) for line in lines]
    assert numbers == sorted(numbers)


def test_a_process_ends_although_its_log_is_not_read() -> None:
    script = """
import logging
from quire.logs import configure
configure("scheduler", "info", "json")
for number in range(5000):
    logging.getLogger("x").info("%d %s", number, "x" * 100)
"""
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) as process:
        assert process.wait(60) == 0


def test_the_last_line_is_written() -> None:
    script = """
import logging
from quire.logs import configure
configure("scheduler", "info", "json")
logging.getLogger("x").critical("the end")
raise SystemExit(3)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert json.loads(done.stderr)["event"] == "the end"


@pytest.mark.parametrize("log_format", FORMATS)
def test_the_reason_for_the_end_comes_after_the_log(log_format: str) -> None:
    script = f"""
import logging
from quire.logs import configure, put_last_line
configure("scheduler", "info", {log_format!r})
logging.getLogger("x").info("before")
put_last_line("scheduler", ValueError("the reason"), {log_format!r})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    before, reason = done.stderr.splitlines()
    assert "before" in before
    if log_format == "console":
        assert reason == "quire scheduler: the reason"
        return
    record = json.loads(reason)
    assert (record["event"], record["level"], record["service"]) == ("the reason", "critical", "scheduler")
    assert record.keys() == json.loads(before).keys()
