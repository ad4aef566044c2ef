"""The turn of a thread to follow the copies of a grammar."""

from collections import deque
from collections.abc import Callable
from threading import Lock


class Busy(Exception):
    """Another thread has the turn. `turn.when_given` says when to try again."""

    def __init__(self, turn: "Turn") -> None:
        super().__init__()
        self.turn = turn


class Turn:
    """A lock for which no thread waits: what finds it taken is called later.

    Copies of a matcher share a lexer with a lock. A thread that waits for it inside llguidance keeps the interpreter,
    and a thread that waited here could not follow other grammars.
    """

    __slots__ = ("_later", "_lock")

    def __init__(self) -> None:
        self._lock = Lock()
        self._later: deque[Callable[[], None]] = deque()

    def take(self) -> None:
        """Takes the turn. Raises Busy."""
        if not self._lock.acquire(blocking=False):
            raise Busy(self)

    def give(self) -> None:
        """Gives the turn back, and calls what has waited for longest."""
        self._lock.release()
        if self._later:
            try:
                later = self._later.popleft()
            except IndexError:  # another thread was faster
                return
            later()

    def when_given(self, later: Callable[[], None]) -> None:
        """Calls a function once the turn is free, perhaps at once. It does not have the turn then."""
        self._later.append(later)
        if self._lock.acquire(blocking=False):  # the turn was given before this call was known
            self.give()
