"""The block pool: which blocks are handed out, in which order, and when they are free again."""

import pytest

from scheduler.core import InvariantViolation
from scheduler.core.block_pool import BlockPool


def take_all(pool: BlockPool) -> list[int]:
    return [pool.take() for _ in range(pool.num_free_blocks)]


def test_a_new_pool_hands_out_its_blocks_in_order_and_never_the_null_block() -> None:
    pool = BlockPool(5)
    assert pool.num_usable_blocks == pool.num_free_blocks == 4
    assert take_all(pool) == [1, 2, 3, 4]
    assert pool.ref_counts == [0, 1, 1, 1, 1]
    assert 0 not in pool.free_blocks()


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_needs_a_block_beside_the_null_block(num_blocks: int) -> None:
    with pytest.raises(ValueError, match="null block"):
        BlockPool(num_blocks)


def test_an_empty_pool_raises() -> None:
    pool = BlockPool(2)
    pool.take()
    with pytest.raises(InvariantViolation, match="empty pool"):
        pool.take()


def test_a_block_is_free_when_its_last_reference_is_gone() -> None:
    pool = BlockPool(3)
    block = pool.take()
    pool.retain(block)
    pool.release(block, findable=False)
    assert pool.num_free_blocks == 1
    pool.release(block, findable=False)
    assert pool.num_free_blocks == 2


def test_releasing_too_often_violates_an_invariant() -> None:
    pool = BlockPool(3)
    block = pool.take()
    pool.release(block, findable=False)
    with pytest.raises(InvariantViolation, match="more often"):
        pool.release(block, findable=False)
    with pytest.raises(InvariantViolation, match="more often"):
        pool.release(0, findable=False)


def test_the_free_queue_is_the_lru_of_findable_blocks() -> None:
    pool = BlockPool(5)
    take_all(pool)
    for block in (3, 1, 4, 2):
        pool.release(block, findable=True)
    assert take_all(pool) == [3, 1, 4, 2]


def test_a_block_that_cannot_be_found_is_reused_before_findable_ones() -> None:
    pool = BlockPool(5)
    take_all(pool)
    pool.release(1, findable=True)
    pool.release(2, findable=False)
    pool.release(3, findable=True)
    pool.release(4, findable=False)
    assert list(pool.free_blocks()) == [4, 2, 1, 3]


def test_a_revived_block_leaves_the_free_queue_and_returns_to_its_end() -> None:
    pool = BlockPool(4)
    take_all(pool)
    for block in (1, 2, 3):
        pool.release(block, findable=True)
    pool.retain(1)
    assert list(pool.free_blocks()) == [2, 3]
    assert pool.ref_counts[1] == 1
    pool.release(1, findable=True)
    assert list(pool.free_blocks()) == [2, 3, 1]
