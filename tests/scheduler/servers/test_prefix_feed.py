"""Readers of the prefix index's changes end up with its digests, however slow they are."""

import random

import pytest

from gateway.routing.prefix_view import PrefixView
from gateway.schedulers.watch import numbers
from scheduler.core.prefix_index import PrefixIndex
from scheduler.servers.prefix_feed import DIGEST_BYTES, Changes, PrefixFeed, PrefixSubscription, Snapshot


def digest(number: int) -> bytes:
    return number.to_bytes(8) + bytes(24)


def followed() -> tuple[PrefixIndex, PrefixFeed]:
    index, feed = PrefixIndex(16), PrefixFeed()
    feed.follow(index)
    return index, feed


def read_into(view: PrefixView, subscription: PrefixSubscription) -> bool:
    """Applies what has changed. Returns False if the view has a gap."""
    match subscription.read():
        case Snapshot(number, digests):
            view.replace(number, numbers(digests))
        case Changes(first, published, forgotten):
            return view.apply(first, numbers(published), numbers(forgotten))
    return True


def holds(view: PrefixView, index: PrefixIndex) -> bool:
    return {*view._held} == {int.from_bytes(each[:DIGEST_BYTES]) for each, _ in index.items()}


def test_the_first_reading_is_a_snapshot_and_then_only_changes_come() -> None:
    index, feed = followed()
    index.publish(1, digest(7))
    subscription = feed.subscribe()
    assert subscription.read() == Snapshot(0, digest(7)[:8])
    assert subscription.read() is None
    index.publish(2, digest(8))
    index.forget(1)
    assert subscription.read() == Changes(1, digest(8)[:8], digest(7)[:8])
    index.forget(1)  # it is not published, so nothing changes
    assert subscription.read() is None


def test_of_several_changes_of_a_digest_the_last_one_counts() -> None:
    index, feed = followed()
    subscription = feed.subscribe()
    subscription.read()
    index.publish(1, digest(7))
    index.forget(1)
    index.publish(2, digest(8))
    index.forget(2)
    index.publish(3, digest(8))
    assert subscription.read() == Changes(1, digest(8)[:8], digest(7)[:8])


@pytest.mark.parametrize("max_changes", [1, 5, 1000])
def test_readers_of_any_speed_end_with_the_same_digests(max_changes: int) -> None:
    rng, (index, feed) = random.Random(max_changes), followed()
    subscriptions = [PrefixSubscription(feed, max_changes) for _ in range(3)]
    feed._subscriptions.update(subscriptions)
    views = [PrefixView() for _ in subscriptions]
    for step in range(2000):
        block = rng.randrange(40)
        if rng.random() < 0.5:
            index.publish(block, digest(rng.randrange(60)))
        else:
            index.forget(block)
        if step == 1000:  # another executor
            index = PrefixIndex(16)
            feed.follow(index)
        for speed, (subscription, view) in enumerate(zip(subscriptions, views, strict=True)):
            if rng.random() < 0.4**speed:
                assert read_into(view, subscription), "a reader that misses nothing sees no gap"
    for subscription, view in zip(subscriptions, views, strict=True):
        assert read_into(view, subscription)
        assert holds(view, index)


def test_what_waits_for_a_slow_reader_is_bounded() -> None:
    index, feed = followed()
    subscription = PrefixSubscription(feed, 10)
    feed._subscriptions.add(subscription)
    subscription.read()
    for block in range(10_000):
        index.publish(block, digest(block))
        assert len(subscription._changes) <= 10
    assert isinstance(subscription.read(), Snapshot)


def test_a_lost_message_is_a_gap() -> None:
    index, feed = followed()
    subscription, view = feed.subscribe(), PrefixView()
    assert read_into(view, subscription)
    index.publish(1, digest(1))
    subscription.read()  # lost on its way
    index.publish(2, digest(2))
    assert not read_into(view, subscription)


def test_nothing_is_followed_without_readers() -> None:
    index, feed = followed()
    subscription = feed.subscribe()
    subscription.read()
    feed.unsubscribe(subscription)
    feed.follow(None)
    index.publish(1, digest(1))
    assert subscription.read() is None or isinstance(subscription.read(), Snapshot)
