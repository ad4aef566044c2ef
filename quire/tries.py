"""Decides when a stream that broke off is begun again, and when a client gives up."""

import logging
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from quire import messages
from quire.errors import (
    DeadlineExceededError,
    InternalError,
    QueueFullError,
    QuireError,
    RequestCancelledError,
    UnavailableError,
)
from quire.events import Event
from quire.resumption import ResumableRequest
from quire.status import is_lost_connection
from quire.v1 import generation_pb2

DEFAULT_RESUME_TIMEOUT_S = 60.0
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
MAX_FRUITLESS = 20
"""Maximum number of breaks in a row without progress in between: the request may be what ends the server."""
MIN_PROGRESS = 2
"""Tokens of a sequence that are progress: to compute the received ones again yields one, if decodes end servers."""

BROKE_OFF = "the stream broke off (%s): trying to continue it for up to %g s"
CONTINUES = "the stream continues"

log = logging.getLogger(__name__)


class Wake(Protocol):
    """A `threading.Event` or an `asyncio.Event`, which ends a pause."""

    def set(self) -> None: ...


class ServerContact:
    """The knowledge of a client about its server. Its streams share it, in any thread.

    resume_timeout_s  see `quire.Client`
    has_answered      this client has received a message from the server, so a server that is gone is expected back
    num_resumptions   number of times that a stream was continued, or a request sent again
    """

    def __init__(self, resume_timeout_s: float) -> None:
        """Raises ValueError for a negative time."""
        if math.isnan(resume_timeout_s) or resume_timeout_s < 0:
            raise ValueError("resume_timeout_s must not be negative")
        self.resume_timeout_s = resume_timeout_s
        self.has_answered = False
        self.num_resumptions = 0
        self.is_closed = False
        self._lock = threading.Lock()
        self._paused: set[Wake] = set()

    def check_open(self) -> None:
        """Raises RequestCancelledError if the client is closed."""
        if self.is_closed:
            raise RequestCancelledError("the connection was closed")

    def count_resumption(self) -> None:
        with self._lock:
            self.num_resumptions += 1

    @contextmanager
    def pausing(self, wake: Wake) -> Iterator[None]:
        """Sets `wake` if the client is closed within the context or was closed before."""
        with self._lock:
            self._paused.add(wake)
            if self.is_closed:
                wake.set()
        try:
            yield
        finally:
            with self._lock:
                self._paused.discard(wake)

    def close(self) -> None:
        """Ends all pauses."""
        with self._lock:
            self.is_closed = True
            for wake in self._paused:
                wake.set()


class Tries:
    """The tries of one request: what to send, what each message means, and how long to wait after a break.

    arguments  the arguments of the first call; its timeout is the deadline of all calls together
    """

    def __init__(
        self, request: generation_pb2.GenerateRequest, arguments: dict[str, Any], contact: ServerContact
    ) -> None:
        self._contact = contact
        self._arguments = arguments
        self._request = request
        self._resumable = ResumableRequest(request) if contact.resume_timeout_s else None
        self._deadline_s = math.inf if arguments["timeout"] is None else time.monotonic() + arguments["timeout"]
        self._broken_since_s: float | None = None
        self._num_fruitless = 0
        self._last_error: QuireError | None = None
        self._pause_s = FIRST_PAUSE_S
        self._num_new: Counter[int] | None = None  # tokens by sequence since the last break or move; None: progress
        self.has_moved = False
        """True if the stream was moved and has made no progress since."""

    def next_call(self) -> tuple[generation_pb2.GenerateRequest, dict[str, Any]]:
        """Returns the request of the next call, and its arguments. Raises DeadlineExceededError."""
        request = self._resumable.next_request() if self._resumable else self._request
        if self._last_error is None:
            return request, self._arguments
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceededError(f"the deadline passed during a break: {self._last_error.message}")
        # With wait_for_ready, gRPC would wait without a bound for a server that cannot be reached.
        return request, self._arguments | {"timeout": None if left_s == math.inf else left_s, "wait_for_ready": False}

    @property
    def can_continue(self) -> bool:
        """True if another call can continue the stream from what was received."""
        return self._resumable is not None and self._resumable.can_continue

    def event(self, message: generation_pb2.GenerateResponse, close: Callable[[], None]) -> Event | None:
        """Returns the event of a message, or None if it has nothing for the user.

        Calls `close` before it raises InternalError, because the server goes on with an answer that cannot be used.
        """
        try:
            return messages.event(message) if self.accept(message) else None
        except QuireError:
            close()
            raise

    def accept(self, message: generation_pb2.GenerateResponse) -> bool:
        """Adds a message to what was received. Returns False if it has nothing for the user.

        Raises InternalError if the server ignores the request's grammar.
        """
        is_start = message.HasField("started")
        if is_start and self._request.HasField("structured_output") and not message.started.follows_grammar:
            raise InternalError("the server is too old for structured output: it ignores the grammar")
        self._contact.has_answered = True
        if self._broken_since_s is not None:
            self._broken_since_s = None
            self._contact.count_resumption()
            log.info(CONTINUES)
        if self._resumable is not None and not self._resumable.accept(message):
            return False
        if self._num_new is not None and _is_progress(message, self._num_new):
            self._num_new = None
            self._num_fruitless = 0
            self._pause_s = FIRST_PAUSE_S
            self.has_moved = False
        return True

    def moved(self, error: QuireError) -> None:
        """Called when the stream was left at its server: a full queue at the next one is a reason to come again."""
        self._last_error = error
        self._num_new = Counter()
        self.has_moved = True

    def pause_s(self, error: QuireError) -> float:
        """Returns how long to wait before the next call. Raises the error of the last call if there is no next one."""
        if not self._is_break(error):
            raise error
        now_s = time.monotonic()
        if self._broken_since_s is None:
            self._broken_since_s = now_s
            self._num_new = Counter()
            self._num_fruitless += 1
            if self._num_fruitless > MAX_FRUITLESS:
                # UNAVAILABLE would be a break to a client of this process, which would begin to count again.
                raise InternalError(f"{error.message} ({self._num_fruitless} breaks in a row without progress)")
            limit_s = self._contact.resume_timeout_s
            log.info(BROKE_OFF, error.message, limit_s)
        self._last_error = error
        tried_s = now_s - self._broken_since_s
        if tried_s >= self._contact.resume_timeout_s:
            if isinstance(error, QueueFullError):
                raise error
            raise UnavailableError(f"{error.message} (tried again for {tried_s:.1f} s)")
        longest_s = min(self._contact.resume_timeout_s - tried_s, max(0.0, self._deadline_s - now_s))
        pause_s = max(self._pause_s, error.retry_after_s if isinstance(error, QueueFullError) else 0.0)
        pause_s *= random.uniform(0.5, 1.0)  # so that not all clients come at once
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return min(pause_s, longest_s)

    def _is_break(self, error: QuireError) -> bool:
        """Returns True if the stream can go on after this error.

        A request fails at once if no server was ever there, unless the caller asked to wait for it.
        """
        if not self.can_continue:
            return False
        if isinstance(error, QueueFullError):  # after a restart, the streams of all clients come back at once
            return self._last_error is not None
        return isinstance(error, UnavailableError) and (
            self._contact.has_answered
            or self._arguments["wait_for_ready"]
            or self._last_error is not None
            or is_lost_connection(error)
        )


def _is_progress(message: generation_pb2.GenerateResponse, num_new: Counter[int]) -> bool:
    """Adds the tokens of a new message to `num_new`, and returns whether the stream has made progress."""
    if not message.HasField("delta"):
        return True
    num_new[message.delta.index] += len(message.delta.token_ids)
    return num_new[message.delta.index] >= MIN_PROGRESS
