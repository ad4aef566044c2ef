"""Tests with handmade snapshots that frames contain what the page needs, and no more."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core import KVUsage, SequenceView
from scheduler.engine.model_description import ModelDescription
from scheduler.live.frames import block_runs, encode_event, make_frame
from scheduler.live.plan_log import LoggedStep
from scheduler.live.snapshot import CACHED, ContiguousUsage, Snapshot, WaitingSequence
from tests.support.live.page_state import PageState

MODEL = ModelDescription("tiny", "float32", "cpu", 400, 100, 16, 9, 4, 64)


def snapshot(blocks: list[int], *sequences: SequenceView, state: str = "serving") -> Snapshot:
    """Returns a snapshot of a pool with these blocks, block 1 first."""
    return Snapshot(
        state=state,
        model=replace(MODEL, num_blocks=len(blocks)),
        blocks=np.array([0, *blocks], np.int32),
        sequences={f"{view.request_id}.{view.index}": view for view in sequences},
        waiting=[],
        num_waiting=0,
        num_waiting_prompt_tokens=0,
        oldest_waiting_s=0.0,
        usage=KVUsage(1, 2, 3, 4, 5, 6),
        contiguous=ContiguousUsage.of(sequences, 100, 16 * len(blocks)),
        num_steps=1,
        num_generated_tokens=2,
        num_preemptions=3,
        num_cow_copies=4,
        num_prefix_queried_tokens=5,
        num_prefix_hit_tokens=6,
    )


def view(request_id: int, *block_table: int, index: int = 0, num_tokens: int = 20) -> SequenceView:
    return SequenceView(request_id, index, request_id, 10, num_tokens, num_tokens - 1, block_table)


def name_of(key: str) -> str:
    return f"client-{key}"


def check(page_state: PageState, expected: Snapshot) -> None:
    assert page_state.blocks == expected.blocks.tolist()
    assert page_state.sequences == expected.sequences


def test_block_runs_are_gap_length_and_value() -> None:
    old = np.zeros(10, np.int32)
    #                  0  1  2  3  4  5       6  7  8  9
    new = np.array([0, 0, 1, 1, 2, CACHED, 0, 0, 1, 1], np.int32)
    assert block_runs(old, new) == [1, 2, 1, 0, 1, 2, 0, 1, CACHED, 2, 2, 1]
    assert block_runs(new, new) == []
    assert block_runs(new, old) == [1, 4, 0, 2, 2, 0]  # equal new values are one run


@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(-1, 3)), min_size=1, max_size=60))
def test_block_runs_turn_any_pool_into_any_other(values: list[tuple[int, int]]) -> None:
    old, new = snapshot([one for one, _ in values]), snapshot([other for _, other in values])
    page_state = PageState()
    page_state.take(make_frame(None, old, name_of))
    page_state.take(make_frame(old, new, name_of))
    assert page_state.blocks == new.blocks.tolist()
    assert page_state.num_key_frames == 1


def test_the_size_of_a_frame_depends_on_the_changes_not_on_the_pool() -> None:
    old = snapshot([0] * 100_000)
    new = snapshot([1] * 3 + [0] * 99_996 + [CACHED])
    assert len(encode_event(make_frame(None, old, name_of))) < 1000
    assert make_frame(old, new, name_of)["blocks"] == [0, 3, 1, 99_996, 1, CACHED]


def test_block_tables_are_sent_from_the_first_changed_entry_on() -> None:
    snapshots = [
        snapshot([1, 1, 0, 0, 0], view(1, 1, 2)),
        snapshot([2, 2, 0, 0, 0], view(1, 1, 2), view(1, 1, 2, index=1)),  # forked
        snapshot([2, 1, 1, 0, 0], view(1, 1, 2), view(1, 1, 3, index=1)),  # copied on write
        snapshot([2, 1, 1, 1, 0], view(1, 1, 2, 4, num_tokens=33), view(1, 1, 3, index=1)),  # grown
        snapshot([CACHED, 0, 1, 0, 0], view(1, 3, index=1)),  # preempted and back, shorter, between two frames
        snapshot([CACHED, 0, 0, 0, 0]),
    ]
    page_state = PageState()
    for old, new in zip([None, *snapshots], snapshots, strict=False):
        page_state.take(make_frame(old, new, name_of))
        check(page_state, new)
    grown = make_frame(snapshots[2], snapshots[3], name_of)
    assert grown["sequences"] == [["1.0", 1, 33, 32, 2, 4]]
    assert make_frame(snapshots[1], snapshots[2], name_of)["sequences"] == [["1.1", 1, 20, 19, 1, 3]]
    assert page_state.names == {"1.0": "client-1.0", "1.1": "client-1.1"}
    assert page_state.num_key_frames == 1


def test_unchanged_fields_are_not_sent() -> None:
    found = snapshot([1, 2, CACHED], view(1, 1))
    assert set(make_frame(found, found, name_of)) == {"numbers"}
    assert make_frame(found, replace(found, state="draining"), name_of)["server"]["state"] == "draining"


def test_another_pool_starts_with_a_key_frame() -> None:
    page_state = PageState()
    old, new = snapshot([1, 1, CACHED], view(1, 1, 2)), snapshot([0, 1], view(2, 2))
    page_state.take(make_frame(None, old, name_of))
    page_state.take(make_frame(old, new, name_of))
    assert page_state.num_key_frames == 2
    check(page_state, new)


def test_steps_leave_out_empty_lists_at_their_end() -> None:
    steps = [
        LoggedStep(1, 8, [], [(0, "1.0")], [0, 8], []),
        LoggedStep(2, 1, [], [], [0, 1], [(1, "1.1")]),
        LoggedStep(3, 2, [], [], [], []),
        LoggedStep(4, 1, [1], [], [], []),
        LoggedStep(5, 2, [], [(1, "2.0")], [1, 1], [], [1]),
    ]
    found = snapshot([1])
    frame = make_frame(found, found, name_of, steps=steps, durations=[(1, 700)])
    assert frame["steps"] == [
        [1, 8, [], [0, "1.0"], [0, 8]],
        [2, 1, [], [], [0, 1], [1, "1.1"]],
        [3, 2],
        [4, 1, [1]],
        [5, 2, [], [1, "2.0"], [1, 1], [], [1]],
    ]
    assert frame["durations"] == [(1, 700)]
    page_state = PageState()
    page_state.take(frame)
    assert page_state.rows == {0: ("1.0", 1), 1: ("2.0", 0)}


def test_the_head_of_the_queue_is_sent() -> None:
    found = replace(snapshot([0]), waiting=[WaitingSequence("7.0", 12, is_preempted=True)], num_waiting=5)
    frame = make_frame(found, found, name_of)
    assert frame["waiting"] == [["7.0", "client-7.0", 12, 1]]
    assert frame["numbers"]["waiting"] == 5


def test_before_the_first_executor_only_the_state_is_sent() -> None:
    nothing = replace(snapshot([]), model=None, usage=None, blocks=np.zeros(0, np.int32), state="waiting for executor")
    frame = make_frame(None, nothing, name_of)
    assert frame["server"] == {"state": "waiting for executor"}
    page_state = PageState()
    page_state.take(frame)
    assert page_state.blocks == []


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        ([], ContiguousUsage(0, 0, 10)),
        ([1], ContiguousUsage(100, 1, 10)),
        ([20, 50], ContiguousUsage(200, 70, 10)),
        ([100], ContiguousUsage(100, 100, 10)),
        ([101], ContiguousUsage(100, 100, 10)),  # the last token's KV is never needed
    ],
)
def test_the_usage_of_contiguous_reservations(num_tokens: list[int], expected: ContiguousUsage) -> None:
    """Without a paged cache, prefixes are not shared: each sequence has its own copy."""
    views = [view(i, 1, 2, num_tokens=count) for i, count in enumerate(num_tokens)]
    assert ContiguousUsage.of(views, max_model_len=100, num_pool_token_slots=1090) == expected


def test_names_with_invalid_characters_can_be_sent() -> None:
    frame = make_frame(None, snapshot([1], view(1, 1)), lambda key: "a\ud800\n\n")
    event = encode_event(frame)
    assert event.count(b"\n") == 2
    assert event.endswith(b"\n\n")
