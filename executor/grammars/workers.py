"""Threads that compile and follow grammars, and the states that they compute.

The limits of llguidance count states and items, but the time for an item grows with the grammar: a few kilobytes of
text can occupy a thread for minutes. Such a thread cannot be ended. After LIMIT_S of its CPU time the wait for it is
given up, and with it the grammar; another thread takes its place, and it goes on with the lowest priority. CPU time
does not pass while the process is suspended or waits for a core, so the load of a machine ends no sequence.
"""

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from executor.grammars.followed import FollowedGrammar
from quire.unexpected import unexpected

_log = logging.getLogger(__name__)

LIMIT_S = 2.0
"""CPU time for one state: to compile a grammar, to replay an output, to follow one token."""

MAX_STUCK = 4
"""Threads that may be given up at once. While there are so many, no grammar is followed."""

_POLL_S = 0.1
_LOWEST_PRIORITY = 19

Work = Callable[[], FollowedGrammar]


class Pending:
    """A state that a worker computes. Any thread may wait for it."""

    def __init__(self, workers: "Workers", work: Work, origin: "Pending | None" = None) -> None:
        """Waits for nothing yet. If the wait is given up later, `origin`, the start of the grammar, fails too."""
        self._workers = workers
        self._work: Work | None = work
        self._origin = origin
        self._lock = threading.Lock()
        self._is_done = threading.Event()
        self._state: FollowedGrammar | None = None
        # The thread and its CPU time at the beginning.
        self._began: tuple[threading.Thread, float] | None = None

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
            if not self._is_done.wait(_POLL_S):
                self._give_up_if_late()
        return self._state

    def run(self) -> bool:
        """Computes the state, once. Returns False if the wait for it was given up meanwhile. Called by a worker."""
        work, self._work = self._work, None  # it holds the state before, which is not needed any longer
        thread = threading.current_thread()
        self._began = thread, _cpu_s(thread)
        try:
            state = self._workers.failed if work is None else work()
        except BaseException:  # noqa: BLE001  # a panic of the library is none of Python's exceptions
            _log.exception("a grammar could not be followed")
            unexpected("grammar")
            state = self._workers.failed
        return self._finish(state)

    def refuse(self, state: FollowedGrammar) -> bool:
        """Sets the state without computing it. Returns False if it has one."""
        return self._finish(state)

    def _finish(self, state: FollowedGrammar) -> bool:
        with self._lock:
            if self._state is not None:
                return False
            self._state = state
        self._is_done.set()
        return True

    def _give_up_if_late(self) -> None:
        with self._lock:  # until it has a state, its thread is alive
            if self._state is not None or self._began is None:
                return
            thread, began_s = self._began
            if _cpu_s(thread) - began_s <= LIMIT_S:
                return
            self._state = self._workers.failed
        self.origin._state = self._workers.failed
        self._is_done.set()
        self._workers.replace(thread)


class Workers:
    """Threads that compute states in the order in which they were submitted."""

    def __init__(self, num_threads: int, name: str, failed: FollowedGrammar) -> None:
        """Starts the threads. `failed` is the state of a grammar that cannot be followed."""
        self.failed = failed
        self._name = name
        self._pending: queue.SimpleQueue[Pending] = queue.SimpleQueue()
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
        if self.is_overloaded:
            pending.refuse(self.failed)
        else:
            self._pending.put(pending)
        return pending

    def replace(self, stuck: threading.Thread) -> None:
        """Starts a thread in place of one that is given up."""
        _log.warning("following a grammar took more than %g s of CPU time: it is given up", LIMIT_S)
        with self._lock:
            self._num_stuck += 1
        with suppress(OSError):
            if stuck.native_id is not None and sys.platform == "linux":
                os.setpriority(os.PRIO_PROCESS, stuck.native_id, _LOWEST_PRIORITY)
        self._start_thread()

    def _start_thread(self) -> None:
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while self._pending.get().run():
            pass
        with self._lock:
            self._num_stuck -= 1


def refused(vocab_size: int) -> Pending:
    """Returns the state of a grammar that cannot be followed, which no thread computes."""
    failed = FollowedGrammar.failed(vocab_size)
    pending = Pending(Workers(0, "", failed), lambda: failed)
    pending.refuse(failed)
    return pending


def _cpu_s(thread: threading.Thread) -> float:
    """Returns the CPU time of a thread; the time of the clock where the system does not tell it."""
    if thread.ident is None or not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic()
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
