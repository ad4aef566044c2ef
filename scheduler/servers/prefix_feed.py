"""Follows the changes of the prefix index for routers, each of which reads at its own speed.

    PrefixIndex.on_change ──► PrefixFeed ──► PrefixSubscription: what has changed since it was last read

A subscription keeps the last change of each digest. If more digests have changed than it may keep, or the index was
replaced because the executor was, the reader gets a snapshot instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler.core.prefix_index import PrefixIndex

DIGEST_BYTES = 8
"""Bytes of a digest that routers get. Two of a million digests are equal in them with a probability of 3 in 10^8."""

MAX_CHANGES = 1 << 16
"""Changes that wait for a reader, about 8 MB. A snapshot of as many blocks takes no longer to read."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All digests, after the event with this number."""

    sequence_number: int
    digests: bytes


@dataclass(frozen=True, slots=True)
class Changes:
    """Digests that were published and forgotten: as many events, from this number on."""

    first_sequence_number: int
    published: bytes
    forgotten: bytes


class PrefixFeed:
    """Passes the changes of one index on to all subscriptions."""

    def __init__(self) -> None:
        self.index: PrefixIndex | None = None
        self._subscriptions: set[PrefixSubscription] = set()

    def follow(self, index: PrefixIndex | None) -> None:
        """Follows an index from now on. Another one than before is read from its beginning."""
        if index is self.index:
            return
        if self.index is not None:
            self.index.on_change = _ignore
        self.index = index
        if index is not None:
            index.on_change = self._changed
        for subscription in self._subscriptions:
            subscription.restart()

    def subscribe(self) -> PrefixSubscription:
        subscription = PrefixSubscription(self)
        self._subscriptions.add(subscription)
        return subscription

    def unsubscribe(self, subscription: PrefixSubscription) -> None:
        self._subscriptions.discard(subscription)

    def _changed(self, digest: bytes, is_published: bool) -> None:
        for subscription in self._subscriptions:
            subscription.changed(digest, is_published)


class PrefixSubscription:
    """Keeps the changes that one reader has not read yet. The first thing that it reads is a snapshot."""

    def __init__(self, feed: PrefixFeed, max_changes: int = MAX_CHANGES) -> None:
        self._feed = feed
        self._max_changes = max_changes
        self._changes: dict[bytes, bool] = {}
        self._needs_snapshot = True
        self._num_events = 0

    def restart(self) -> None:
        """Has the reader get a snapshot."""
        self._needs_snapshot = True
        self._changes.clear()

    def changed(self, digest: bytes, is_published: bool) -> None:
        if self._needs_snapshot:
            return
        self._changes[digest[:DIGEST_BYTES]] = is_published
        if len(self._changes) > self._max_changes:
            self.restart()

    def read(self) -> Snapshot | Changes | None:
        """Returns what has changed since the last call; None: nothing."""
        if self._needs_snapshot:
            self._needs_snapshot = False
            index = self._feed.index
            digests = () if index is None else [digest[:DIGEST_BYTES] for digest, _ in index.items()]
            return Snapshot(self._num_events, b"".join(digests))
        if not self._changes:
            return None
        changes, self._changes = self._changes, {}
        first = self._num_events + 1
        self._num_events += len(changes)
        published = b"".join([digest for digest, is_published in changes.items() if is_published])
        forgotten = b"".join([digest for digest, is_published in changes.items() if not is_published])
        return Changes(first, published, forgotten)


def _ignore(digest: bytes, is_published: bool) -> None:
    pass
