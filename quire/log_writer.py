"""Writes lines to a stream from a separate thread, so that a slow or stuck reader never delays the code that logs.

The thread writes a few times a second. Waking it for each line would cost more than the line, because both threads
would compete for the interpreter.
"""

import io
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

MAX_LINES = 10_000
"""Maximum number of lines that wait. Further lines are lost, and counted."""

INTERVAL_S = 0.05
FLUSH_TIMEOUT_S = 1.0


def put_line(stream: TextIO | None, line: str) -> None:
    """Writes one line at once. Raises nothing: a service goes on if its output is closed or the disk is full.

    stream  None: the process was started without it
    """
    if stream is not None:
        with suppress(OSError, ValueError):
            _put(stream, _file_descriptor(stream), f"{line}\n")


class LineWriter:
    """A queue of lines and the thread that writes them. `put` neither blocks nor raises."""

    def __init__(
        self, stream: TextIO | None, format_loss: Callable[[str], str] | None = None, max_lines: int = MAX_LINES
    ) -> None:
        """Starts the thread. `format_loss` formats the line that reports lost lines like the other lines.

        Without a stream, because the process was started without it, all lines are dropped.
        """
        self._stream = stream
        self._file_descriptor = _file_descriptor(stream)
        self._format_loss = format_loss
        self._max_lines = max_lines
        self._lines: deque[str] = deque()
        self._num_lost = 0
        self._has_lines = threading.Event()
        self._is_writing = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        if len(self._lines) >= self._max_lines:
            self._num_lost += 1
            return
        self._lines.append(line)
        if not self._has_lines.is_set():
            self._has_lines.set()

    def flush(self) -> None:
        """Waits until all lines are written, for FLUSH_TIMEOUT_S at most."""
        until_s = time.monotonic() + FLUSH_TIMEOUT_S
        while (self._lines or self._is_writing) and time.monotonic() < until_s:
            time.sleep(0.002)

    def close(self) -> None:
        if not self._is_closing:
            self.flush()
            self._is_closing = True
            self._has_lines.set()

    def _write(self) -> None:
        while not self._is_closing:
            self._has_lines.wait()
            time.sleep(INTERVAL_S)
            self._is_writing = True
            self._has_lines.clear()  # cleared before the lines are taken, so that a later line sets it again
            self._write_lines([self._lines.popleft() for _ in range(len(self._lines))])
            self._is_writing = False

    def _write_lines(self, lines: list[str]) -> None:
        if self._num_lost:
            num_lost, self._num_lost = self._num_lost, 0
            loss = f"{num_lost} lines of the log were lost: it was not read"
            lines.append(loss if self._format_loss is None else self._format_loss(loss))
        if self._stream is not None:
            with suppress(OSError, ValueError, MemoryError):  # the reader has closed its end, or the disk is full
                _put(self._stream, self._file_descriptor, "".join(f"{line}\n" for line in lines))


class WritingHandler(logging.Handler):
    """Formats each record in the task that logs it, for its context variables, and passes it to a LineWriter."""

    def __init__(self, stream: TextIO | None, max_lines: int = MAX_LINES) -> None:
        super().__init__()
        self._writer = LineWriter(stream, self._format_loss, max_lines)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001  (a handler reports a bad record and raises nothing)
            self.handleError(record)
            return
        self._writer.put(line)

    def flush(self) -> None:
        """Called when the process ends."""
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
        super().close()

    def _format_loss(self, loss: str) -> str:
        return self.format(logging.LogRecord("quire.log_writer", logging.WARNING, __file__, 0, loss, (), None))


def _put(stream: TextIO, file_descriptor: int | None, text: str) -> None:
    """Writes to the file itself if there is one: at exit, Python would wait for the buffer of a stuck stream.

    For the same reason, a failed write leaves nothing in a buffer that Python would try to write again at exit.
    """
    if file_descriptor is None:
        stream.write(text)
        return
    rest = memoryview(text.encode(errors="backslashreplace"))
    while rest:
        rest = rest[os.write(file_descriptor, rest) :]


def _file_descriptor(stream: TextIO | None) -> int | None:
    try:
        return None if stream is None else stream.fileno()
    except (io.UnsupportedOperation, ValueError):  # ValueError: the stream is closed
        return None
