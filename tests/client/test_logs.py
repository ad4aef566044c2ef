"""The log: one line a record, in both formats, whatever clients make up and libraries say."""

import asyncio
import io
import json
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from quire.logs import FORMATS, as_json_line, configure, log_as, printable

HOSTILE = 'mine\n2026-01-01 [info] request ended\r\x1b[31m\x1b]0;title\x07\x00\u202e reason=eos "quoted"\u2028end'
log = logging.getLogger("scheduler.test")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """The process's logging is one for all tests."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    log_as()


def configured(log_format: str, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    configure("scheduler", level, log_format, stream)
    return stream


def records(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_for_machines() -> None:
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


def test_a_console_for_people() -> None:
    stream = configured("console")
    log.warning("executor lost: %s", "cut", extra={"num_tokens": 3})
    line = stream.getvalue()
    assert line.endswith("executor lost: cut [scheduler.test] num_tokens=3\n")
    assert "warning" in line
    assert "\x1b" not in line, "colours, and this is no terminal"


@pytest.mark.parametrize("log_format", FORMATS)
def test_a_record_is_a_line_whatever_is_in_it(log_format: str) -> None:
    stream = configured(log_format)
    log.info("of %s", HOSTILE, extra={"request_id": HOSTILE, "others": [HOSTILE], HOSTILE: 1})
    text = stream.getvalue()
    assert len(text.splitlines()) == 1
    assert text[:-1].isprintable()


def test_a_value_cannot_look_like_two() -> None:
    stream = configured("console")
    log.info("ended", extra={"request_id": 'a reason="eos"'})
    assert stream.getvalue().endswith(" request_id='a reason=\"eos\"'\n")


@pytest.mark.parametrize("log_format", FORMATS)
def test_tracebacks(log_format: str) -> None:
    stream = configured(log_format)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.exception("broke")
    text = stream.getvalue()
    if log_format == "json":
        (record,) = records(stream)
        assert record["event"] == "broke"
        assert record["exception"].startswith("Traceback")
    else:
        head, *rest = text.splitlines()
        assert head.endswith("broke [scheduler.test]")
        assert len(rest) > 3
        assert all(line.startswith("    ") and line.isprintable() for line in rest), "a line of the client's own"


@pytest.mark.parametrize("log_format", FORMATS)
def test_libraries_and_warnings_go_the_same_way(log_format: str) -> None:
    stream = configured(log_format)
    logging.getLogger("asyncio").error("something in a library")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert "something in a library" in lines[0]
    assert "DeprecationWarning: old" in lines[1]


def test_levels() -> None:
    stream = configured("json", level="error")
    log.info("no")
    log.warning("no")
    log.error("yes")
    assert [record["event"] for record in records(stream)] == ["yes"]


def test_configured_again_there_is_still_one_line_each() -> None:
    configured("console")
    stream = configured("json")
    log.info("once")
    assert len(records(stream)) == 1


async def test_lines_of_a_task_are_about_its_request() -> None:
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


def test_what_is_printed_becomes_a_record() -> None:
    logged = '{"event": "x", "service": "executor"}'
    assert as_json_line("executor", logged) == logged
    for line in ("ready 127.0.0.1:1", "{not json}", '{"a": 1} and more', "Traceback\x1b"):
        record = json.loads(as_json_line("executor", line))
        assert (record["event"], record["service"], record["level"]) == (line, "executor", "info")


@pytest.mark.parametrize("text", ["", "plain", "ünï 漢字 🙂", HOSTILE, "\ud800", "\\n"])
def test_printable(text: str) -> None:
    assert printable(text).isprintable()
    if text.isprintable():
        assert printable(text) == text
