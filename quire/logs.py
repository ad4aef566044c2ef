"""The log of a service: one line a record, for people or for machines, on standard error.

Everything that is logged in the process, by libraries too, goes through one pipeline:

    logging.getLogger(…) → the fields of its `extra` → of whom the task is about (`log_as`) → made harmless → rendered

Whatever a client made up can stand in a record. So in each text of a record control characters are escaped, line feeds
among them, and what follows the first line of a traceback is indented: no client writes a line of its own, moves a
cursor or changes a colour.
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

from quire.log_writer import WritingHandler

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor, WrappedLogger

FORMATS = ("console", "json")
LEVELS = ("debug", "info", "warning", "error")

_MULTILINE = "exception"
"""The one field with line feeds of its own."""


def configure(service: str, level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Puts the pipeline in the place of whatever handlers the process had. `level` and `log_format` are of the above.

    JSON lines have at least timestamp (ISO 8601, UTC), level, service, logger and event.
    """
    stream = stream or sys.stderr
    handler = WritingHandler(stream)
    handler.setFormatter(_formatter(service, log_format, is_terminal=stream.isatty()))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    # No line says from which thread, process or line of code it comes: to find out is a quarter of what a record costs.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # nobody looks up the caller


def log_as(**fields: str) -> None:
    """From now on, lines of this task, and of those that it starts, have these fields; empty ones are left out."""
    bind_contextvars(**fields)


def printable(text: str) -> str:
    """The text, with a backslash escape for each character that a terminal would not print as one."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode()
        for character in text
    )


def as_json_line(service: str, line: str) -> str:
    """A line of a service that logs as JSON: as it is; if it is no JSON (it was printed), as a record's event."""
    if line.startswith("{"):
        try:
            json.loads(line)
        except ValueError:
            pass
        else:
            return line
    timestamp = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return json.dumps({"event": line, "level": "info", "timestamp": timestamp, "service": service})


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
        after += [add_service, _without_blanks, structlog.processors.JSONRenderer(default=repr)]
    else:
        plain = structlog.dev.ConsoleRenderer(
            colors=is_terminal, pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
        )
        after += [_without_blanks, _made_harmless, plain]
    return ProcessorFormatter(foreign_pre_chain=before, processors=after, use_get_message=True)


def _without_blanks(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    """What is not known is not there."""
    return {key: value for key, value in event.items() if value is not None and value != ""}


def _made_harmless(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    return {printable(key): _harmless(key, value) for key, value in event.items()}


def _harmless(key: str, value: Any) -> Any:
    if key == _MULTILINE:
        return "\n".join(f"    {printable(line)}" for line in str(value).splitlines())
    if value is None or isinstance(value, int | float):
        return value
    return printable(str(value))
