"""The KV cache: which blocks a sequence gets, shares, copies and finds again."""

import pytest

from scheduler.core import Sequence
from scheduler.core.kv_cache import Allocation, KVCache
from tests.support.core.letter_tokens import make_sequence

BLOCK_SIZE = 4


def cache_of(num_usable_blocks: int, *, enable_prefix_caching: bool = True) -> KVCache:
    return KVCache(num_usable_blocks + 1, BLOCK_SIZE, enable_prefix_caching=enable_prefix_caching)


def admit(cache: KVCache, prompt: str, *, salt: bytes = b"") -> Sequence:
    """Admits a sequence and plans its whole prompt."""
    sequence = make_sequence(prompt, salt=salt)
    cache.adopt(sequence, cache.find_prefix(sequence))
    assert write(cache, sequence, sequence.num_uncomputed_tokens)
    return sequence


def write(cache: KVCache, sequence: Sequence, num_tokens: int) -> Allocation | None:
    """Plans `num_tokens` more tokens; unknown ones are 'z'."""
    allocation = cache.try_allocate(sequence, num_tokens)
    if allocation:
        sequence.num_planned_tokens += num_tokens
        sequence.token_ids += [25] * (sequence.num_planned_tokens - sequence.num_tokens)
    return allocation


def commit(cache: KVCache, sequence: Sequence) -> None:
    """Commits the results of all planned tokens."""
    sequence.num_computed_tokens = sequence.num_planned_tokens
    if sequence.num_computed_tokens >= sequence.publish_at:
        cache.publish(sequence)


def fork(cache: KVCache, parent: Sequence) -> Sequence:
    child = Sequence(parent.request, index=0, arrival=parent.arrival)
    child.token_ids = list(parent.token_ids)
    cache.fork(parent, child)
    return child


# --- writing --------------------------------------------------------------------------------------------------


def test_takes_a_block_only_when_a_token_needs_it() -> None:
    cache = cache_of(4)
    sequence = admit(cache, "abcde")
    assert sequence.block_table == [1, 2]
    assert [write(cache, sequence, 1) for _ in range(3)] == [Allocation()] * 3
    assert write(cache, sequence, 1) == Allocation(table_updates=((2, 3),))
    assert sequence.block_table == [1, 2, 3]


def test_writes_up_to_the_write_limit_need_no_allocation() -> None:
    cache = cache_of(4)
    sequence = admit(cache, "abcde")
    assert (sequence.num_planned_tokens, sequence.write_limit) == (5, 8)


def test_allocates_all_blocks_or_none() -> None:
    cache = cache_of(3)
    sequence = admit(cache, "abcde")
    assert write(cache, sequence, 8) is None
    assert (sequence.block_table, cache.pool.num_free_blocks, sequence.write_limit) == ([1, 2], 1, 8)
    assert write(cache, sequence, 7) is not None


# --- copy-on-write --------------------------------------------------------------------------------------------


def test_a_fork_shares_every_block_and_copies_none() -> None:
    cache = cache_of(4)
    parent = admit(cache, "abcdef")
    child = fork(cache, parent)
    assert child.block_table == parent.block_table == [1, 2]
    assert cache.pool.ref_counts[1:3] == [2, 2]
    assert cache.pool.num_free_blocks == 2
    assert parent.write_limit == child.write_limit == 6, "neither writes without asking"


def test_the_first_writer_to_a_shared_block_copies_it_and_the_last_writes_in_place() -> None:
    cache = cache_of(5)
    parent = admit(cache, "abcdef")
    child, other = fork(cache, parent), fork(cache, parent)
    assert write(cache, parent, 1) == Allocation(table_updates=((1, 3),), block_copy=(2, 3))
    assert write(cache, child, 1) == Allocation(table_updates=((1, 4),), block_copy=(2, 4))
    assert write(cache, other, 1) == Allocation()
    assert [s.block_table for s in (parent, child, other)] == [[1, 3], [1, 4], [1, 2]]
    assert cache.pool.ref_counts[1:] == [3, 1, 1, 1, 0]


def test_allocates_a_copy_and_a_new_block_together_or_neither() -> None:
    cache = cache_of(3)
    parent = admit(cache, "abcdef")
    child = fork(cache, parent)
    assert write(cache, child, 3) is None
    assert (child.block_table, cache.pool.ref_counts[2]) == ([1, 2], 2)
    assert write(cache, child, 2) == Allocation(table_updates=((1, 3),), block_copy=(2, 3))


def test_full_blocks_are_shared_and_never_copied() -> None:
    cache = cache_of(4)
    parent = admit(cache, "abcd")
    child = fork(cache, parent)
    assert write(cache, parent, 1) == Allocation(table_updates=((1, 2),))
    assert write(cache, child, 1) == Allocation(table_updates=((1, 3),))
    assert cache.pool.ref_counts[1] == 2


def test_counts_the_blocks_that_sharers_need_to_append_one_token_each() -> None:
    cache = cache_of(8)
    alone, full = admit(cache, "ab"), admit(cache, "wxyz")
    parent = admit(cache, "abcdef")
    sharers = [parent, fork(cache, parent), fork(cache, parent)]
    assert cache.num_blocks_to_append([]) == 0
    assert cache.num_blocks_to_append([full]) == 1
    assert cache.num_blocks_to_append(sharers[:1]) == 1
    assert cache.num_blocks_to_append(sharers) == 2, "the last one writes in place"
    assert cache.num_blocks_to_append([alone, full, *sharers]) == 3


# --- prefix hits ----------------------------------------------------------------------------------------------


def test_a_block_is_found_once_its_result_is_committed() -> None:
    cache = cache_of(8)
    first = admit(cache, "abcdefghij")
    assert cache.find_prefix(make_sequence("abcdefghxx")) == []
    commit(cache, first)
    assert cache.find_prefix(make_sequence("abcdefghxx")) == [1, 2]
    assert cache.find_prefix(make_sequence("abcdefghijxx")) == [1, 2], "the third block is not full"


def test_a_hit_is_shared_and_only_the_rest_is_computed() -> None:
    cache = cache_of(8)
    commit(cache, admit(cache, "abcdefghij"))
    second = make_sequence("abcdefghxx")
    cache.adopt(second, cache.find_prefix(second))
    assert second.block_table == [1, 2]
    assert (second.num_computed_tokens, second.num_planned_tokens, second.write_limit) == (8, 8, 8)
    assert cache.pool.ref_counts[1:4] == [2, 2, 1]
    assert cache.index.hits == {1: 1, 2: 1}


def test_a_hit_leaves_the_last_token_to_compute() -> None:
    cache = cache_of(8)
    commit(cache, admit(cache, "abcdefgh"))
    assert cache.find_prefix(make_sequence("abcdefgh")) == [1]
    assert cache.find_prefix(make_sequence("abcdefghi")) == [1, 2]


def test_requests_with_different_salts_share_no_blocks() -> None:
    cache = cache_of(8)
    commit(cache, admit(cache, "abcdef", salt=b"alice"))
    assert cache.find_prefix(make_sequence("abcdef")) == []
    assert cache.find_prefix(make_sequence("abcdef", salt=b"bob")) == []
    assert cache.find_prefix(make_sequence("abcdef", salt=b"alice")) == [1]


def test_without_prefix_caching_nothing_is_found_and_nothing_published() -> None:
    cache = cache_of(8, enable_prefix_caching=False)
    commit(cache, admit(cache, "abcdefgh"))
    assert len(cache.index) == 0
    assert cache.find_prefix(make_sequence("abcdefgh")) == []


def test_a_block_stays_cached_until_it_is_reused() -> None:
    cache = cache_of(3)
    first = admit(cache, "abcdefgh")
    commit(cache, first)
    cache.release(first.block_table)
    assert cache.pool.num_free_blocks == 3
    assert cache.find_prefix(make_sequence("abcdefghi")) == [1, 2]
    admit(cache, "xxxxxxxx")  # takes the unused block and the tail of the cached prefix
    assert cache.find_prefix(make_sequence("abcdefghi")) == [1]


def test_heads_of_prefixes_stay_cached_longest() -> None:
    cache = cache_of(4)
    sequence = admit(cache, "abcdefghijklmnop")
    commit(cache, sequence)
    cache.release(sequence.block_table)
    assert list(cache.pool.free_blocks()) == [4, 3, 2, 1]


def test_admission_counts_the_cached_blocks_it_revives() -> None:
    cache = cache_of(4)
    first = admit(cache, "abcdefgh")
    commit(cache, first)
    again = make_sequence("abcdefghij")
    assert cache.num_blocks_to_admit(again, cache.find_prefix(again)) == 1, "two are shared with the first"
    cache.release(first.block_table)
    assert cache.num_blocks_to_admit(again, cache.find_prefix(again)) == 3, "two would stop being free"
    assert cache.num_blocks_to_admit(again, []) == 3


def test_generated_tokens_are_found_again_after_a_preemption() -> None:
    cache = cache_of(4)
    sequence = admit(cache, "abcdef")
    write(cache, sequence, 6)
    commit(cache, sequence)
    cache.release(sequence.block_table)
    sequence.forget_kv()
    assert cache.find_prefix(sequence) == [1, 2]


def test_equal_contents_computed_twice_are_published_once() -> None:
    cache = cache_of(4)
    first, second = admit(cache, "abcdef"), admit(cache, "abcdxx")
    commit(cache, first)
    commit(cache, second)
    assert cache.find_prefix(make_sequence("abcdyy")) == [1]
    cache.release(second.block_table)
    assert next(iter(cache.pool.free_blocks())) == 3, "the twin cannot be found, so it is the first to be reused"


def test_forgets_cached_prefixes_but_not_those_in_use() -> None:
    cache = cache_of(4)
    gone, stays = admit(cache, "abcd"), admit(cache, "wxyz")
    for sequence in (gone, stays):
        commit(cache, sequence)
    cache.release(gone.block_table)
    assert cache.forget_prefixes() == 1
    assert cache.find_prefix(make_sequence("abcde")) == []
    assert cache.find_prefix(make_sequence("wxyza")) == [2]
    assert cache.forget_prefixes() == 0


# --- reservations ---------------------------------------------------------------------------------------------


def test_reserved_blocks_are_available_to_one_sequence_only() -> None:
    cache = cache_of(4)
    guaranteed, other = admit(cache, "abcd"), admit(cache, "wxyz")
    cache.reserve(guaranteed, 2)
    assert cache.num_available_blocks() == cache.num_available_blocks(other) == 0
    assert cache.num_available_blocks(guaranteed) == 2
    assert write(cache, other, 1) is None
    assert write(cache, guaranteed, 8) is not None
    assert (guaranteed.num_reserved_blocks, cache.num_reserved_blocks) == (0, 0)


def test_a_reservation_is_drawn_block_by_block_and_can_be_cancelled() -> None:
    cache = cache_of(4)
    guaranteed, other = admit(cache, "abcd"), admit(cache, "wxyz")
    cache.reserve(guaranteed, 2)
    write(cache, guaranteed, 1)
    assert (guaranteed.num_reserved_blocks, cache.num_available_blocks(other)) == (1, 0)
    cache.cancel_reservation(guaranteed)
    assert (guaranteed.num_reserved_blocks, cache.num_available_blocks(other)) == (0, 1)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for_tokens(num_tokens: int, num_blocks: int) -> None:
    assert cache_of(1).num_blocks_for(num_tokens) == num_blocks
