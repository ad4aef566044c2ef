"""Threads that compile and follow grammars, and the states that they compute.

The limits of llguidance count states and items, but the time for an item grows with the grammar: a few kilobytes of
text can occupy a thread for minutes. Such a thread cannot be ended. After LIMIT_S of its CPU time for one state the
wait for it is given up, and with it the grammar; another thread takes over the rest of its batch, and it goes on with
the lowest priority. CPU time does not pass while the process is suspended or waits for a core, so the load of a machine
ends no sequence.

The states of a step are handed over in batches of about a millisecond. With a small vocabulary, a state takes less
time than waking a thread, or than threads wait for each other's turn with the interpreter.
"""

import logging
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from executor.grammars.followed import FollowedGrammar
from quire.unexpected import unexpected

_log = logging.getLogger(__name__)

LIMIT_S = 2.0
"""CPU time for one state: to compile a grammar, to replay an output, to follow one token."""

MAX_STUCK = 4
"""Threads that may be given up at once. While there are so many, no grammar is followed."""

_TOKENS_OF_A_BATCH = 1 << 21
"""States of a batch, times the size of the vocabulary: the time of a mask grows with the vocabulary."""

_POLL_S = 0.1
_LOWEST_PRIORITY = 19

Work = Callable[[], FollowedGrammar]


class Pending:
    """A state that a worker computes. Any thread may wait for it."""

    __slots__ = ("_done", "_lock", "_origin", "_state", "_work", "_workers")

    def __init__(self, workers: "Workers", work: Work, origin: "Pending | None" = None) -> None:
        """Waits for nothing yet. If the wait is given up later, `origin`, the start of the grammar, fails too."""
        self._workers = workers
        self._work: Work | None = work
        self._origin = origin
        self._state: FollowedGrammar | None = None
        self._lock = threading.Lock()
        self._done = threading.Lock()  # held until there is a state; an Event would take a third of the time of a state
        self._done.acquire()

    @property
    def origin(self) -> "Pending":
        return self._origin or self

    @property
    def is_spent(self) -> bool:
        """True if it has a state whose copies fail."""
        return self._state is not None and self._state.is_spent

    def result(self) -> FollowedGrammar:
        """Waits for the state, within the limit. It never raises: a grammar that cannot be followed is a state too."""
        while self._state is None:
            if self._done.acquire(timeout=_POLL_S):
                self._done.release()
            else:
                self._workers.give_up_late_ones()
        return self._state

    def run(self) -> bool:
        """Computes the state, once. Returns False if the wait for it was given up meanwhile. Called by a worker."""
        work, self._work = self._work, None  # it holds the state before, which is not needed any longer
        try:
            state = self._workers.failed if work is None else work()
        except BaseException:  # noqa: BLE001  # a panic of the library is none of Python's exceptions
            _log.exception("a grammar could not be followed")
            unexpected("grammar")
            state = self._workers.failed
        return self.settle(state)

    def settle(self, state: FollowedGrammar) -> bool:
        """Sets the state. Returns False if it has one."""
        with self._lock:
            if self._state is not None:
                return False
            self._state = state
        self._done.release()
        return True

    def give_up(self) -> bool:
        """Lets the grammar fail. Returns False if there is a state."""
        if not self.settle(self._workers.failed):
            return False
        self.origin._state = self._workers.failed
        return True


@dataclass(slots=True)
class _Batch:
    """States that one thread computes, first to last.

    began_s  CPU time of the thread when it began the `current` one
    """

    left: deque[Pending]
    current: Pending | None = None
    began_s: float = 0.0


class Workers:
    """Threads that compute states in the order in which they were submitted."""

    def __init__(self, num_threads: int, name: str, failed: FollowedGrammar) -> None:
        """Starts the threads. `failed` is the state of a grammar that cannot be followed."""
        self.failed = failed
        self._name = name
        self._batch_size = max(1, _TOKENS_OF_A_BATCH // (8 * len(failed.mask)))
        self._batches: queue.SimpleQueue[_Batch] = queue.SimpleQueue()
        self._running: dict[threading.Thread, _Batch] = {}
        self._num_stuck = 0
        self._lock = threading.Lock()
        for _ in range(num_threads):
            self._start_thread()

    @property
    def is_overloaded(self) -> bool:
        """True while so many threads are given up that no grammar is followed."""
        return self._num_stuck >= MAX_STUCK

    def submit(self, work: Work, origin: Pending | None = None) -> Pending:
        """Returns a state that a thread computes. While they are overloaded, the grammar cannot be followed."""
        pending = Pending(self, work, origin)
        self.begin((pending,))
        return pending

    def begin(self, pending: Sequence[Pending]) -> None:
        """Lets the threads compute these states."""
        if self.is_overloaded:
            for each in pending:
                each.settle(self.failed)
            return
        for first in range(0, len(pending), self._batch_size):
            self._batches.put(_Batch(deque(pending[first : first + self._batch_size])))

    def give_up_late_ones(self) -> None:
        """Gives up the states that take too long, and starts threads in place of theirs."""
        for thread, batch in list(self._running.items()):
            with self._lock:  # until its batch has left `_running`, the thread is alive
                late = batch.current if self._running.get(thread) is batch else None
                if late is None or _cpu_s(thread) - batch.began_s <= LIMIT_S or not late.give_up():
                    continue
                del self._running[thread]
                self._num_stuck += 1
            _log.warning("following a grammar took more than %g s of CPU time: it is given up", LIMIT_S)
            with suppress(OSError):
                if thread.native_id is not None and sys.platform == "linux":
                    os.setpriority(os.PRIO_PROCESS, thread.native_id, _LOWEST_PRIORITY)
            self._batches.put(_Batch(batch.left))
            self._start_thread()

    def _start_thread(self) -> None:
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        """Computes batches until a state is given up: another thread has its place then."""
        thread = threading.current_thread()
        while self._finish(thread, self._batches.get()):
            pass
        with self._lock:
            self._num_stuck -= 1

    def _finish(self, thread: threading.Thread, batch: _Batch) -> bool:
        """Computes the states of a batch. Returns False once one was given up."""
        with self._lock:
            self._running[thread] = batch
        while batch.left:
            batch.began_s = _own_cpu_s()
            batch.current = batch.left.popleft()
            if not batch.current.run():
                return False
        del self._running[thread]
        return True


def refused(vocab_size: int) -> Pending:
    """Returns the state of a grammar that cannot be followed, which no thread computes."""
    failed = FollowedGrammar.failed(vocab_size)
    pending = Pending(Workers(0, "", failed), lambda: failed)
    pending.settle(failed)
    return pending


def _own_cpu_s() -> float:
    """Returns the CPU time of the calling thread, in half of the time that `_cpu_s` takes."""
    return time.thread_time() if hasattr(time, "pthread_getcpuclockid") else time.monotonic()


def _cpu_s(thread: threading.Thread) -> float:
    """Returns the CPU time of a thread; the time of the clock where the system does not tell it."""
    if thread.ident is None or not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic()
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
