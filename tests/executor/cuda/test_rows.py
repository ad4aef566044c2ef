"""Opening rows from slots, closing tokens into slots, and sending arrays."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from executor.cuda.graphs import bucket_sizes
from executor.cuda.upload import Upload
from kernels.triton import RESULT_FIELDS, STATE_FIELDS, close_rows, open_rows
from tests.support.cuda.runner_pair import DEVICE

pytestmark = pytest.mark.usefixtures("working")
BLOCK_SIZE = 4
LENGTH, NOT_FINITE = 2, 4


def numbers(*values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def states() -> torch.Tensor:
    """Returns three slots with at most eight tokens: token 50 at position 6, an ended one, token 9 at position 0."""
    rows = [[50, 7, 0, 8], [60, 3, 1, 8], [9, 1, 0, 8]]
    return numbers(*[row + [-7] * (STATE_FIELDS - 4) for row in rows])


def opened(slots: torch.Tensor, known: torch.Tensor | None) -> list[list[int]]:
    tables = numbers([11, 1 << 28, 13], [1 << 30] * 3, [31, 32, 33])
    outputs = [torch.full_like(slots, -5) for _ in range(3)]
    mapping = torch.full((len(slots),), -5, dtype=torch.int64, device=DEVICE)
    open_rows(states(), tables, slots, *outputs, mapping, BLOCK_SIZE, known)
    return [output.tolist() for output in (*outputs, mapping)]


def test_rows_open_with_last_tokens() -> None:
    """Covers token slots past 2**31 and an ended slot with an invalid table."""
    tokens, positions, lengths, slots = opened(numbers(2, 0, 1, 1), None)
    assert tokens[:2] == [9, 50]
    assert positions == [0, 6, 0, 0]
    assert lengths == [1, 7, 0, 0]
    assert slots == [31 * 4, (1 << 28) * 4 + 2, 0, 0]


def test_rows_open_with_known_tokens() -> None:
    known = numbers([70, -1, 71], [9, 99, 5])
    tokens, positions, lengths, slots = opened(numbers(2, 0, 2), known)
    assert tokens == [70, 50, 71]
    assert positions == [9, 6, 5]
    assert lengths == [10, 7, 6]
    assert slots == [33 * 4 + 1, (1 << 28) * 4 + 2, 32 * 4 + 1]


def test_rows_may_exceed_a_tile() -> None:
    num_rows = 600
    tokens, _, lengths, slots = opened(numbers(*[2, 1] * (num_rows // 2)), None)
    assert tokens[::2] == [9] * (num_rows // 2)
    assert lengths == [1, 0] * (num_rows // 2)
    assert slots == [31 * 4, 0] * (num_rows // 2)


def close(
    slots: list[int], token_ids: list[int], peaks: list[float] | None = None
) -> tuple[torch.Tensor, list[list[int]]]:
    after = states()
    end_kinds = torch.zeros((3, 100), dtype=torch.uint8, device=DEVICE)
    end_kinds[0, 5], end_kinds[2, 5], end_kinds[2, 6], end_kinds[1] = 1, 3, 1, 3
    results = torch.full((len(slots) + 1, RESULT_FIELDS), -5, dtype=torch.int32, device=DEVICE)
    highest = numbers(*(peaks or [1.5] * len(slots)), dtype=torch.float32)
    own = results[: len(slots)]
    close_rows(after, end_kinds, numbers(*slots), numbers(*token_ids), highest, own, LENGTH, NOT_FINITE)
    assert results[-1].tolist() == [-5] * RESULT_FIELDS
    return after, results[:-1].tolist()


def test_end_tokens_end_slots() -> None:
    after, results = close([2, 1, 0], [5, 5, 5])
    assert results == [[5, 3, 0], [0, 0, 1], [5, 1, 0]], "an end id comes before length"
    assert after[:, :4].tolist() == [[5, 8, 1, 8], [60, 3, 1, 8], [5, 2, 1, 8]]
    assert (after[:, 4:] == -7).all()


def test_length_ends_slots() -> None:
    after, results = close([0, 2], [4, 4])
    assert results == [[4, LENGTH, 0], [4, 0, 0]]
    assert after[:, 2].tolist() == [1, 1, 0]


@pytest.mark.parametrize("peak", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_ends_its_slot(peak: float) -> None:
    """Also if its token would end the slot for another reason; the token can be any number, and is never looked up."""
    for token_id in (5, 1 << 30):
        after, results = close([2, 1, 0], [token_id, 7, 7], [peak, peak, 0.0])
        assert results == [[0, NOT_FINITE, 0], [0, 0, 1], [7, LENGTH, 0]]
        assert after[:, 2].tolist() == [1, 1, 1]


def test_sent_arrays_arrive_and_are_not_overwritten(working) -> None:
    """With more sends than buffers, the first arrays are still intact."""
    random, upload = np.random.default_rng(1), Upload(working)
    sent = []
    for num in (1, 3, 200, 20_000, 5, 7, 1, 2):
        arrays = [
            random.integers(-9, 9, (num, 3)).astype(np.int32),
            random.integers(-(1 << 60), 1 << 60, num),
            random.random(num, dtype=np.float32),
            np.empty((0, 2), dtype=np.int32),
            random.integers(-9, 9, (num, 2)).astype(np.int32).T,
        ]
        sent.append((arrays, upload.send(arrays)))
    for arrays, on_device in sent:
        for array, tensor in zip(arrays, on_device, strict=True):
            assert np.array_equal(tensor.cpu().numpy(), array)
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % 16 == 0


def test_bucket_sizes_ascend_to_max_num_seqs() -> None:
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(6) == (1, 2, 4, 6)
    assert bucket_sizes(64)[:6] == (1, 2, 4, 8, 16, 24)
    for most in (1, 2, 3, 63, 64, 65, 256, 257, 1000):
        sizes = bucket_sizes(most)
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] == most
        assert len(sizes) < 20 + most // 32
