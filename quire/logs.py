"""The log of a service: one line for each record, as text or JSON, on standard error.

All records of the process, including those of libraries, go through one pipeline:

    logging.getLogger(…) → fields of `extra` → fields of the task (`log_as`) → control characters escaped → rendered

A record can contain any text that a client sent. Control characters, including line feeds, are therefore escaped, and
the lines of a traceback are indented, so that no client can forge a line, move the cursor or change a colour.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

import structlog
from structlog.contextvars import bind_contextvars, merge_contextvars
from structlog.stdlib import ExtraAdder, ProcessorFormatter

from quire.log_writer import WritingHandler, put_line

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor, WrappedLogger

FORMATS = ("console", "json")
LEVELS = ("debug", "info", "warning", "error")

_MULTILINE = "exception"
"""The only field that keeps its line feeds."""


def configure(service: str, level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Replaces the handlers of the process with the pipeline. `level` is one of LEVELS, `log_format` one of FORMATS.

    JSON lines have at least timestamp (ISO 8601, UTC), level, service, logger and event.
    """
    stream = stream or sys.stderr  # None if the process was started without it
    handler = WritingHandler(stream)
    handler.setFormatter(_formatter(service, log_format, is_terminal=stream is not None and stream.isatty()))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    # Lines do not name their thread, process or line of code: looking them up takes a quarter of the time of a record.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # skips looking up the caller


def put_last_line(service: str, error: Exception, log_format: str) -> None:
    """Writes the reason for the end of a service to standard error, after all lines of the log.

    Commands show the last line of a service that could not start, and log lines that wait would come after it.
    """
    for handler in logging.getLogger().handlers:
        handler.flush()
    is_json = log_format == "json"
    put_line(sys.stderr, as_json_line(service, str(error), "critical") if is_json else f"quire {service}: {error}")


def log_as(**fields: str) -> None:
    """Adds fields to all further lines of this task and of the tasks that it starts. Empty fields are left out."""
    bind_contextvars(**fields)


def printable(text: str) -> str:
    """Returns the text with a backslash escape for each character that a terminal would not print."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode()
        for character in text
    )


def event_of(line: str) -> str:
    """Returns the event of a line that `as_json_line` or the log has written as JSON, and other lines as they are."""
    try:
        record = json.loads(line) if line.startswith("{") else None
    except (ValueError, RecursionError):
        return line
    return str(record["event"]) if isinstance(record, dict) and "event" in record else line


def as_json_line(service: str, line: str, level: str = "info") -> str:
    """Returns a line of a service that logs as JSON. A line that is not JSON becomes the event of a record."""
    if line.startswith("{"):
        try:
            json.loads(line)
        except ValueError:
            pass
        else:
            return line
    timestamp = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return json.dumps({"event": line, "level": level, "logger": service, "timestamp": timestamp, "service": service})


def _formatter(service: str, log_format: str, *, is_terminal: bool) -> logging.Formatter:
    def add_service(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
        event["service"] = service
        return event

    before: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        merge_contextvars,
        ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    after: list[Processor] = [ProcessorFormatter.remove_processors_meta, structlog.processors.format_exc_info]
    if log_format == "json":
        after += [add_service, _without_empty, structlog.processors.JSONRenderer(default=repr)]
    else:
        plain = structlog.dev.ConsoleRenderer(
            colors=is_terminal, pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
        )
        after += [_without_empty, _escaped, plain]
    return ProcessorFormatter(foreign_pre_chain=before, processors=after, use_get_message=True)


def _without_empty(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    """Drops the fields that have no value."""
    return {key: value for key, value in event.items() if value is not None and value != ""}


def _escaped(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    return {printable(key): _escaped_value(key, value) for key, value in event.items()}


def _escaped_value(key: str, value: Any) -> Any:
    if key == _MULTILINE:
        return "\n".join(f"    {printable(line)}" for line in str(value).splitlines())
    if value is None or isinstance(value, int | float):
        return value
    return printable(str(value))
