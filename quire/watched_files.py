"""A value made from files, which is made again when the files change."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

_Signatures: TypeAlias = tuple[tuple[int, ...] | None, ...]
"""Numbers that change when a file is replaced or written, or gets other rights; None for a missing file."""

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Changed files that could not be used are read again after this time, also if they have not changed since."""


class WatchedFiles(Generic[T]):
    """Looks at the files when the value is asked for, so it needs no thread. Any thread may call `get`.

    paths       the files; they may be replaced, written in place, or be links that are changed
    load        makes the value; raises ValueError, whose message names the file, if it cannot
    interval_s  the files are looked at only if they were last looked at this long ago, in seconds
    """

    def __init__(self, paths: Sequence[str], load: Callable[[], T], interval_s: float = 0.0) -> None:
        """Raises what `load` raises."""
        self._paths = tuple(paths)
        self._load = load
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._looked_s = time.monotonic()
        # Read before the files are: a file that changes after this is loaded again next time.
        self._signature = self._sign()
        self._value = load()
        self._failed: _Signatures | None = None
        self._failed_s = 0.0

    def get(self) -> T:
        """Returns the value of the files as they are, or if these cannot be used, the value before that."""
        now_s = time.monotonic()
        if now_s - self._looked_s < self._interval_s:
            return self._value
        with self._lock:
            self._looked_s = now_s
            signature = self._sign()
            is_failure = signature == self._failed and now_s - self._failed_s < RETRY_S
            if signature != self._signature and not is_failure:
                self._reload(signature, now_s)
            return self._value

    def _reload(self, signature: _Signatures, now_s: float) -> None:
        try:
            self._value = self._load()
        except ValueError as error:  # perhaps for the moment only: a descriptor may be missing, or a right
            if signature != self._failed:
                log.error("the changed files cannot be used, what was read before stays in use: %s", error)
            self._failed, self._failed_s = signature, now_s
        else:
            log.info("read the changed files: %s", ", ".join(self._paths))
            self._signature, self._failed = signature, None

    def _sign(self) -> _Signatures:
        return tuple(_signature(path) for path in self._paths)


def _signature(path: str) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
