"""Pushes frames to the pages that are open; does nothing while there is none.

    while a page is open:   has anything changed? → snapshot → difference to the last one → bytes → every viewer

Snapshots take time on the engine's event loop. They are taken a few times a second at most, and less often if the pool
or the batch is so large that they would take more than MAX_SHARE of the time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quire.unexpected import unexpected
from scheduler.core import QueueFull
from scheduler.live.frames import encode_event, make_frame
from scheduler.live.snapshot import fingerprint, take_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from scheduler.engine.engine import Engine
    from scheduler.live.plan_log import PlanLog
    from scheduler.live.snapshot import Snapshot

log = logging.getLogger(__name__)

INTERVAL_S = 0.5
"""Shortest time between two frames."""
MAX_INTERVAL_S = 2.0
"""Longest time between two frames. An expensive frame, such as the first on a busy machine, must not stop the page."""
MAX_SHARE = 0.005
"""Share of the event loop's time that frames may take, for any number of viewers."""
MAX_VIEWERS = 32
MAX_PENDING = 4
"""Frames kept for one viewer. When there are more, they are dropped, and the viewer gets a key frame instead."""

NOTHING_NEW = b": nothing new\n\n"
"""A comment, which keeps a connection alive."""


class Viewer:
    """A reader of the feed: one open page."""

    def __init__(self, feed: LiveFeed) -> None:
        self._feed = feed
        self._pending: deque[bytes] = deque()
        self._needs_key = True
        self._has_news = asyncio.Event()
        self._has_news.set()
        self._is_closed = False

    async def next_event(self, timeout_s: float) -> bytes | None:
        """Returns the next event, a comment if there is none within `timeout_s`, or None if the feed has ended."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._has_news.wait()
        except TimeoutError:
            return NOTHING_NEW
        if self._is_closed:
            return None
        event = self._feed.key_event() if self._needs_key else self._pending.popleft()
        self._needs_key = False
        if not self._pending:
            self._has_news.clear()
        return event

    def offer(self, event: bytes) -> None:
        if self._needs_key:
            return
        if len(self._pending) < MAX_PENDING:
            self._pending.append(event)
        else:
            self._pending.clear()
            self._needs_key = True
        self._has_news.set()

    def close(self) -> None:
        self._is_closed = True
        self._has_news.set()


class LiveFeed:
    """The feed of one engine, on its event loop. `name_of` maps the engine's id of a request to the client's id."""

    def __init__(
        self,
        engine: Engine,
        plans: PlanLog,
        name_of: Callable[[int], str],
        *,
        interval_s: float = INTERVAL_S,
        max_share: float = MAX_SHARE,
    ) -> None:
        self._engine = engine
        self._plans = plans
        self._name_of_request = name_of
        self._interval_s = interval_s
        self._max_share = max_share
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._last: Snapshot | None = None
        self._last_fingerprint: tuple[object, ...] = ()
        self._last_planned_ns = 0  # when the newest step was planned whose duration was sent
        self._key_event: bytes | None = None

    @contextmanager
    def viewer(self) -> Iterator[Viewer]:
        """Yields a viewer that takes part until the context ends. Raises QueueFull if there are MAX_VIEWERS already."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise QueueFull(f"{MAX_VIEWERS} pages are open", retry_after_s=10.0)
        viewer = Viewer(self)
        self._viewers.add(viewer)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="live feed")
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)
            if not self._viewers:
                self._stop()

    def close(self) -> None:
        """Ends every viewer's stream."""
        for viewer in self._viewers:
            viewer.close()

    def key_event(self) -> bytes:
        """Returns the whole state as of the last frame, on which every later frame builds."""
        if self._last is None:
            self._send_frame()
        if self._key_event is None and self._last is not None:
            frame = make_frame(None, self._last, self._name_of, rows=self._plans.rows)
            self._key_event = encode_event(frame)
        return self._key_event or b""

    async def _run(self) -> None:
        try:
            while True:
                started_s = time.thread_time()
                if fingerprint(self._engine) != self._last_fingerprint:
                    self._send_frame()
                pause_s = (time.thread_time() - started_s) / self._max_share
                await asyncio.sleep(min(max(self._interval_s, pause_s), MAX_INTERVAL_S))
        except Exception:
            log.exception("the live page's feed failed")
            unexpected("live_feed")
            self._task = None  # the next viewer starts it again
            self.close()

    def _send_frame(self) -> None:
        """Takes a snapshot, and offers its difference to the last one to every viewer."""
        self._last_fingerprint = fingerprint(self._engine)
        if self._engine.core is not None:
            self._plans.watch(self._engine.core)
        rows, steps = self._plans.take()
        old, self._last = self._last, take_snapshot(self._engine)
        self._key_event = None
        durations = self._new_durations()
        frame = make_frame(old, self._last, self._name_of, rows=rows, steps=steps, durations=durations)
        if frame.get("is_key"):
            frame["rows"] = [[slot, key, num_tokens] for slot, (key, num_tokens) in self._plans.rows.items()]
            frame.pop("steps", None)
        event = encode_event(frame)
        for viewer in self._viewers:
            viewer.offer(event)

    def _new_durations(self) -> list[tuple[int, int]]:
        """Returns the step ids and durations, in microseconds on the executor, of new steps; oldest first."""
        durations: list[tuple[int, int]] = []
        newest_ns = self._last_planned_ns
        for trace in reversed(self._engine.traces):
            if trace.planned_ns <= self._last_planned_ns or len(durations) == 512:
                break
            newest_ns = max(newest_ns, trace.planned_ns)
            durations.append((trace.step_id, trace.timings.busy_ns // 1000))
        self._last_planned_ns = newest_ns
        return durations[::-1]

    def _name_of(self, key: str) -> str:
        return self._name_of_request(int(key.partition(".")[0]))

    def _stop(self) -> None:
        """Stops the feed and forgets its state, because there is no viewer any more."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._plans.unwatch()
        self._last = self._key_event = None
        self._last_fingerprint = ()
