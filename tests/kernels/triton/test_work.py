"""The work lists of a step, read back from the device and compared with a plain implementation of the rule."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kernels import AttentionShape
from kernels import triton as triton_kernels
from kernels.triton.decode_work import MAX_CHUNKS
from tests.support.triton.places import DEVICE

SHAPE = AttentionShape(torch.float16, 8, 2, 64, 16)


def chunks(context_len: int, window: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """Returns [begin, end) of each chunk of a context."""
    begin = max(0, context_len - window) if window else 0
    while -(-context_len // chunk_tokens) - begin // chunk_tokens > MAX_CHUNKS:
        chunk_tokens *= 2
    starts = range(begin // chunk_tokens * chunk_tokens, context_len, chunk_tokens)
    cut = [(max(begin, start), min(context_len, start + chunk_tokens)) for start in starts]
    return cut or [(0, 0)]


@pytest.mark.parametrize(("max_context_len", "has_slots"), [(200, False), (3000, False), (3000, True), (70000, False)])
def test_decodes_are_cut_into_chunks(max_context_len: int, has_slots: bool) -> None:
    pick = random.Random(max_context_len)
    windows = (0, max_context_len // 2, 100)[: 2 if max_context_len > 3000 else 3]
    planner = triton_kernels.DecodePlanner(SHAPE, DEVICE, 20, max_context_len, windows)
    tables = torch.zeros((30, 1), dtype=torch.int32, device=DEVICE)
    for num_rows in (20, 7):
        lengths = [pick.choice((0, 1, 255, 256, 257, pick.randint(1, max_context_len))) for _ in range(num_rows)]
        lengths = [min(length, max_context_len) for length in lengths]
        slots = pick.sample(range(30), num_rows) if has_slots else list(range(num_rows))
        work = planner.plan(
            tables,
            torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
            torch.tensor(slots, dtype=torch.int32, device=DEVICE) if has_slots else None,
        )
        for window in windows:
            own = work.lists[window]
            expected = []
            first_items = [0]
            for row, length in enumerate(lengths):
                cut = chunks(length, window, planner.tuning.chunk_tokens)
                expected += [[row, slots[row], begin, end, int(len(cut) == 1)] for begin, end in cut]
                first_items.append(len(expected))
            assert own.num_items.tolist() == [len(expected)]
            assert own.first_items[: num_rows + 1].tolist() == first_items
            assert own.items[: len(expected), :5].tolist() == expected


def test_a_planner_reports_its_memory_and_refuses_too_many_rows() -> None:
    planner = triton_kernels.DecodePlanner(SHAPE, DEVICE, 4, 1000)
    parts = 4 * 4 * 8 * (64 + 1) * 4
    assert parts < planner.num_bytes < parts + 2000
    tables = torch.zeros((5, 1), dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="5 rows"):
        planner.plan(tables, torch.zeros(5, dtype=torch.int32, device=DEVICE))
    assert triton_kernels.DecodePlanner(SHAPE, DEVICE, 4, 256).num_bytes < 1000  # a single chunk needs no parts


def test_the_memory_for_parts_is_bounded() -> None:
    sizes = [
        triton_kernels.DecodePlanner(SHAPE, torch.device("meta"), 64, length).num_bytes for length in (1 << 15, 1 << 20)
    ]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("group", [1, 4, 7])
def test_prefills_are_cut_into_tiles_with_the_longest_first(group: int) -> None:
    pick = random.Random(group)
    shape = AttentionShape(torch.float16, 2 * group, 2, 64, 16)
    num_queries = [pick.choice((0, 1, 2, 31, 32, 33, 500)) for _ in range(12)]
    contexts = np.array([count + pick.choice((0, 1, 700)) for count in num_queries], dtype=np.int32)
    starts = np.concatenate(([0], np.cumsum(num_queries))).astype(np.int32)
    slots = np.array(pick.sample(range(40), 12), dtype=np.int32)
    tables = torch.zeros((40, 1), dtype=torch.int32, device=DEVICE)
    items = triton_kernels.plan_prefill(shape, tables, starts, contexts, slots).items.tolist()

    ends = [first + count for _, _, count, first in items]
    assert ends == sorted(ends, reverse=True)
    covered = {}
    for slot, first_row, count, first in items:
        assert 0 < count <= 128 // group
        for i in range(count):
            assert first_row + i not in covered
            covered[first_row + i] = (slot, first + i)
    expected = [
        (int(slots[s]), int(contexts[s]) - count + i) for s, count in enumerate(num_queries) for i in range(count)
    ]
    assert [covered[row] for row in sorted(covered)] == expected
    assert sorted(covered) == list(range(len(expected)))
