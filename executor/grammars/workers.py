"""Threads that compile and follow grammars, and the states that they compute.

The limits of llguidance count states and items, but the time for an item grows with the grammar: 2 KB of text can
occupy a thread for seconds at each token. Such a thread cannot be ended. So a step waits for a state only as long as
`state_by` says. A state that is late then is detached: its thread goes on with a low priority, and another one takes
over the rest of its batch. At a limit of CPU time the state is given up, and with it the grammar. CPU time does not
pass while the process is suspended or waits for a core, so the load of a machine ends no sequence.

The states of a step are handed over in batches of about a millisecond. With a small vocabulary, a state takes less
time than waking a thread, or than threads wait for each other's turn with the interpreter.
"""

import logging
import math
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
from executor.grammars.turn import Busy
from quire.grammars import FOLLOWER_STACK_BYTES
from quire.unexpected import unexpected

_log = logging.getLogger(__name__)

LIMIT_S = 2.0
"""CPU time for one state: to compile a grammar, or to replay an output."""

FOLLOW_LIMIT_S = 0.5
"""CPU time for the state after one token. `consume_tokens`, up to a fifth of it, keeps the interpreter."""

MAX_STUCK = 4
"""Detached threads in whose place others were started. Another one leaves its place empty until one of them ends."""

REFUSED_S = 60.0
"""Time for which a grammar is refused after one of its states was given up. Other outputs may be followed in time."""

_TOKENS_OF_A_BATCH = 1 << 21
"""States of a batch, times the size of the vocabulary: the time of a mask grows with the vocabulary."""

_LONG_S = 0.01
"""CPU time after which a state is detached if others wait for its thread."""

_POLL_S = 0.1

_DETACHED, _GIVEN_UP = 10, 19
"""The niceness of such threads. A detached one is still needed: it gets a tenth of a core that others want too."""

Work = Callable[[], FollowedGrammar]


class Pending:
    """A state that a worker computes. Any thread may wait for it."""

    __slots__ = ("_done", "_given_up_s", "_lock", "_origin", "_state", "_work", "_workers")

    def __init__(self, workers: "Workers", work: Work, origin: "Pending | None" = None) -> None:
        """Waits for nothing yet. If the wait is given up later, `origin`, the start of the grammar, fails too."""
        self._workers = workers
        self._work: Work | None = work
        self._origin = origin
        self._state: FollowedGrammar | None = None
        self._given_up_s = math.inf
        self._lock = threading.Lock()
        self._done = threading.Lock()  # held until there is a state; an Event would take a third of the time of a state
        self._done.acquire()

    @property
    def origin(self) -> "Pending":
        return self._origin or self

    @property
    def failed(self) -> FollowedGrammar:
        """The state of a grammar that cannot be followed."""
        return self._workers.failed

    @property
    def is_spent(self) -> bool:
        """True if its copies fail, or if it is the start of a grammar that was refused for long enough."""
        if time.monotonic() > self._given_up_s + REFUSED_S:
            return True
        return self._state is not None and self._state.is_spent

    def result(self) -> FollowedGrammar:
        """Waits for a state that is known, or that a thread has begun: then until the limit at most.

        It never raises: a grammar that cannot be followed is a state too.
        """
        while self._state is None:
            if self._done.acquire(timeout=_POLL_S):
                self._done.release()
                continue
            self._workers.give_up_late_ones()
        return self._state

    def state_by(self, deadline_s: float) -> FollowedGrammar | None:
        """Waits for the state until a time of `time.monotonic`. Returns None, and detaches it, if it is late."""
        while self._state is None:
            left_s = deadline_s - time.monotonic()
            if self._done.acquire(timeout=min(max(0.0, left_s), _POLL_S)):
                self._done.release()
                continue
            self._workers.give_up_late_ones()
            if left_s <= 0:
                self._workers.detach(self)
                break
        return self._state

    def run(self) -> None:
        """Computes the state, once, unless the wait for it is given up before. Called by a worker.

        If another thread follows the same grammar, a worker tries it again after that.
        """
        work, self._work = self._work, None  # it holds the state before, which is not needed any longer
        try:
            state = self._workers.failed if work is None else work()
        except Busy as busy:
            self._work = work
            busy.turn.when_given(self._try_again)
            return
        except BaseException:  # noqa: BLE001  # a panic of the library is none of Python's exceptions
            _log.exception("a grammar could not be followed")
            unexpected("grammar")
            state = self._workers.failed
        self.settle(state)

    def _try_again(self) -> None:
        self._workers.begin((self,))

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
        self.origin._given_up_s = time.monotonic()
        return True


@dataclass(slots=True)
class _Batch:
    """States that one thread computes, first to last.

    began_s      CPU time of the thread when it began the `current` one
    is_detached  the current one is late: the thread ends after it, and `left` belongs to another thread
    """

    left: deque[Pending]
    current: Pending | None = None
    began_s: float = 0.0
    is_detached: bool = False


class Workers:
    """Threads that compute states in the order in which they were submitted."""

    def __init__(self, num_threads: int, name: str, failed: FollowedGrammar, limit_s: float | None = None) -> None:
        """Starts the threads. `failed` is the state of a grammar that cannot be followed. limit_s: None is LIMIT_S."""
        self.failed = failed
        self._limit_s = LIMIT_S if limit_s is None else limit_s
        self._name = name
        self._batch_size = max(1, _TOKENS_OF_A_BATCH // (8 * len(failed.mask)))
        self._batches: queue.SimpleQueue[_Batch] = queue.SimpleQueue()
        self._running: dict[threading.Thread, _Batch] = {}
        self._num_stuck = 0
        self._num_missing = 0  # threads to start when detached ones have ended
        self._lock = threading.Lock()
        for _ in range(num_threads):
            self._start_thread()

    def submit(self, work: Work, origin: Pending | None = None) -> Pending:
        """Returns a state that a thread computes."""
        pending = Pending(self, work, origin)
        self.begin((pending,))
        return pending

    def begin(self, pending: Sequence[Pending]) -> None:
        """Lets the threads compute these states."""
        for first in range(0, len(pending), self._batch_size):
            self._batches.put(_Batch(deque(pending[first : first + self._batch_size])))

    def detach(self, pending: Pending) -> None:
        """Lets other threads compute what would wait for a state that is late, or for those that it waits for."""
        with self._lock:
            attached = [(thread, batch) for thread, batch in self._running.items() if not batch.is_detached]
            own = [(thread, batch) for thread, batch in attached if batch.current is pending]
            for thread, batch in own or attached:
                if own or _cpu_s(thread) - batch.began_s > _LONG_S:
                    self._detach(thread, batch)

    def give_up_late_ones(self) -> None:
        """Gives up the states that have reached the limit."""
        with self._lock:
            for thread, batch in list(self._running.items()):
                late = batch.current
                if late is None or _cpu_s(thread) - batch.began_s <= self._limit_s or not late.give_up():
                    continue
                _log.warning("following a grammar took more than %g s of CPU time: it is given up", self._limit_s)
                if not batch.is_detached:
                    self._detach(thread, batch)
                _set_priority(thread, _GIVEN_UP)

    def _detach(self, thread: threading.Thread, batch: _Batch) -> None:
        """Lets a thread end after its current state, and another one take its place. The caller has the lock.

        Until its batch has left `_running`, the thread is alive.
        """
        batch.is_detached = True
        if batch.left:
            self._batches.put(_Batch(batch.left))
        _set_priority(thread, _DETACHED)
        self._num_stuck += 1
        self._num_missing += 1
        if self._num_stuck <= MAX_STUCK:
            self._replace()

    def _replace(self) -> None:
        """Starts a thread that is missing, unless the system has no room for it now."""
        with suppress(RuntimeError):
            self._start_thread()
            self._num_missing -= 1

    def _start_thread(self) -> None:
        before = threading.stack_size(FOLLOWER_STACK_BYTES)
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        finally:
            threading.stack_size(before)

    def _run(self) -> None:
        """Computes batches until a state is detached: another thread has its place then."""
        thread = threading.current_thread()
        while self._finish(thread, self._batches.get()):
            pass

    def _finish(self, thread: threading.Thread, batch: _Batch) -> bool:
        """Computes the states of a batch. Returns False once one was detached."""
        while True:
            with self._lock:
                if batch.is_detached:
                    del self._running[thread]
                    self._num_stuck -= 1
                    if self._num_missing:
                        self._replace()
                    return False
                if not batch.left:
                    self._running.pop(thread, None)
                    return True
                batch.began_s = _own_cpu_s()
                current = batch.current = batch.left.popleft()
                self._running[thread] = batch
            current.run()


def refused(vocab_size: int) -> Pending:
    """Returns the state of a grammar that cannot be followed, which no thread computes."""
    failed = FollowedGrammar.failed(vocab_size)
    pending = Pending(Workers(0, "", failed), lambda: failed)
    pending.settle(failed)
    return pending


def _set_priority(thread: threading.Thread, niceness: int) -> None:
    with suppress(OSError):
        if thread.native_id is not None and sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, thread.native_id, niceness)


def _own_cpu_s() -> float:
    """Returns the CPU time of the calling thread, in half of the time that `_cpu_s` takes."""
    return time.thread_time() if hasattr(time, "pthread_getcpuclockid") else time.monotonic()


def _cpu_s(thread: threading.Thread) -> float:
    """Returns the CPU time of a thread; the time of the clock where the system does not tell it."""
    if thread.ident is None or not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic()
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
