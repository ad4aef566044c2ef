"""Lines to a stream that may be slow or stuck, by a thread of its own: nobody who logs waits for whoever reads.

The thread writes what there is a few times a second. To wake it for each line would cost more than the line: it would
fight the thread that logs for the interpreter.
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
"""That wait to be written; what comes then is lost, and counted."""

INTERVAL_S = 0.05
FLUSH_TIMEOUT_S = 1.0


class LineWriter:
    """Takes lines; its thread writes them, all there are at once. `put` neither blocks nor raises, whoever reads."""

    def __init__(
        self, stream: TextIO, format_loss: Callable[[str], str] | None = None, max_lines: int = MAX_LINES
    ) -> None:
        """format_loss: given the line that tells how many lines were lost, for it to look like the others."""
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
        """Waits until all is written, FLUSH_TIMEOUT_S at most."""
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
            self._has_lines.clear()  # before the lines are taken: what comes now sets it again
            self._write_lines([self._lines.popleft() for _ in range(len(self._lines))])
            self._is_writing = False

    def _write_lines(self, lines: list[str]) -> None:
        if self._num_lost:
            num_lost, self._num_lost = self._num_lost, 0
            loss = f"{num_lost} lines of the log were lost: it was not read"
            lines.append(loss if self._format_loss is None else self._format_loss(loss))
        with suppress(OSError, ValueError):  # whoever read it has gone; there is nobody to tell
            self._put("".join(f"{line}\n" for line in lines))

    def _put(self, text: str) -> None:
        """Past the stream's buffer, where it has a file: a process that ends while this is stuck could not close it."""
        if self._file_descriptor is None:
            self._stream.write(text)
            return
        rest = memoryview(text.encode(errors="backslashreplace"))
        while rest:
            rest = rest[os.write(self._file_descriptor, rest) :]


class WritingHandler(logging.Handler):
    """Formats where a record is made, so that it knows its task; a LineWriter writes."""

    def __init__(self, stream: TextIO, max_lines: int = MAX_LINES) -> None:
        super().__init__()
        self._writer = LineWriter(stream, self._format_loss, max_lines)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001  (what a handler must do: a bad record is reported, and breaks nothing)
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


def _file_descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except io.UnsupportedOperation:
        return None
