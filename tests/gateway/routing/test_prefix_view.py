"""The mirror of a prefix index equals the index, whatever happens to the events on their way."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.holders import HolderIndex
from gateway.routing.prefix_view import PrefixView

DIGESTS = st.integers(0, 7)
SOME_DIGESTS = st.lists(DIGESTS, unique=True)


class Source:
    """A replica's index: it publishes batches of changes."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.next_number = 1

    def change(self, digests: list[int]) -> tuple[int, list[int], list[int]]:
        """Publishes the digests that it does not hold, and forgets the others."""
        published = [digest for digest in digests if digest not in self.held]
        forgotten = [digest for digest in digests if digest in self.held]
        batch = self.next_number, published, forgotten
        self.held ^= set(digests)
        self.next_number += len(digests)
        return batch

    def snapshot(self) -> tuple[int, set[int]]:
        return self.next_number - 1, set(self.held)


def held(view: PrefixView) -> set[int]:
    return {digest for digest in range(8) if view.num_cached([digest])}


def test_events_are_applied_in_order() -> None:
    view = PrefixView()
    assert view.apply(1, [10, 11, 12], [])
    assert view.apply(4, [13], [10])
    assert view.num_cached([11, 12, 13, 14]) == 3
    assert view.num_cached([10, 11]) == 0
    assert (len(view), view.sequence_number) == (3, 5)


def test_a_gap_changes_nothing_until_a_snapshot_comes() -> None:
    view = PrefixView()
    view.apply(1, [1, 2], [])
    assert not view.apply(4, [3], [1])
    assert held(view) == {1, 2}
    assert not view.apply(6, [4], [])
    view.replace(6, [2, 4])
    assert held(view) == {2, 4}
    assert view.apply(5, [7], [1])  # older than the snapshot
    assert held(view) == {2, 4}
    assert view.apply(7, [5], [2])
    assert held(view) == {4, 5}


def test_an_empty_batch_shows_a_gap() -> None:
    view = PrefixView()
    assert view.apply(1, [], [])
    assert not view.apply(3, [], [])


@given(st.lists(st.tuples(SOME_DIGESTS, st.sampled_from(["arrives", "twice", "lost"]))), st.integers(0, 3))
def test_the_view_equals_the_index_when_gaps_are_answered(changes: list[tuple[list[int], str]], num_late: int) -> None:
    """Batches arrive once, twice or not at all. A gap is answered by a snapshot `num_late` batches later."""
    source, view = Source(), PrefixView()
    pending: list[tuple[int, tuple[int, set[int]]]] = []
    for i, (digests, fate) in enumerate([*changes, *[([], "arrives")] * (num_late + 2)]):
        batch = source.change(digests)
        for _ in range({"arrives": 1, "twice": 2, "lost": 0}[fate]):
            if not view.apply(*batch) and not pending:
                pending.append((i + num_late, source.snapshot()))
        if pending and i >= pending[0][0]:
            view.replace(*pending.pop()[1])
        if view.sequence_number == source.next_number - 1:
            assert held(view) == source.held
    assert held(view) == source.held
    assert view.sequence_number == source.next_number - 1


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from("acreu"), SOME_DIGESTS)),
    st.lists(DIGESTS, max_size=4),
    st.integers(0, 7),
)
def test_the_joint_index_equals_the_views(
    actions: list[tuple[int, str, list[int]]], asked: list[int], among: int
) -> None:
    """Three views change one index: events, snapshots, clears, prompts that are expected and that have ended."""
    index = HolderIndex()
    views = [PrefixView(index, 1 << number) for number in range(3)]
    sources = [Source() for _ in views]
    expected: list[list[list[int]]] = [[], [], []]
    for number, action, digests in actions:
        view, source = views[number], sources[number]
        match action:
            case "a":
                assert view.apply(*source.change(digests))
            case "c":
                view.clear()
                sources[number], expected[number] = Source(), []
            case "r":
                source.change(digests)
                view.replace(*source.snapshot())
            case "e":
                view.expect(digests)
                expected[number].append(digests)
            case "u" if expected[number]:
                view.unexpect(expected[number].pop())
    wanted = [source.held.union(*lists) for source, lists in zip(sources, expected, strict=True)]
    assert [held(view) for view in views] == wanted
    assert len(index) == len(set().union(*wanted))

    def depth(digests: set[int]) -> int:
        return next((i for i, digest in enumerate(asked) if digest not in digests), len(asked))

    depths = [depth(digests) if among & 1 << number else 0 for number, digests in enumerate(wanted)]
    most = max(depths)
    holders = sum(1 << number for number, each in enumerate(depths) if most and each == most)
    assert index.longest(asked, among) == (holders, most)
    assert [view.num_cached(asked) for view in views] == [depth(digests) for digests in wanted]


@pytest.mark.parametrize("num_replicas", [2, 1000])
def test_a_lookup_reads_one_entry_for_each_block(num_replicas: int) -> None:
    """The time does not depend on the number of replicas that hold other prompts."""
    index, rng = HolderIndex(), random.Random(1)
    for number in range(num_replicas):
        index.add([*range(50), *(rng.getrandbits(64) for _ in range(20))], 1 << number)
    counting = CountingDict(index._holders)
    index._holders = counting
    assert index.longest([*range(50), -1, -2], (1 << num_replicas) - 1) == ((1 << num_replicas) - 1, 50)
    assert counting.num_reads == 51


class CountingDict(dict[int, int]):
    num_reads = 0

    def get(self, key: int, default: int = 0) -> int:  # type: ignore[override]
        self.num_reads += 1
        return super().get(key, default)
