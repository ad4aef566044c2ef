"""Contiguous KV allocation, to compare with paging: a request holds one run of consecutive blocks.

    contiguous                for max_model_len tokens
    contiguous-power-of-two   for the prompt and the power of two that its output needs
    contiguous-exact          for exactly the tokens that it will write: an oracle

These are the baselines of Kwon et al., SOSP 2023, section 6.1: Orca (Max), Orca (Pow2) and Orca (Oracle). Here they use
the same pool as paging: a run is a number of consecutive blocks, placed first-fit. The last two know the length of an
output in advance; `max_total_tokens` stands for it, which is exact for requests that ignore EOS.

Runs are not shared, so prefixes are not cached and a request has one sequence. A sequence never outgrows its run, so no
admitted sequence is preempted.
"""

import re
from collections.abc import Callable, Iterator
from operator import not_

from scheduler.core.block_pool import BlockPool
from scheduler.core.errors import CapacityExceeded, InvariantViolation
from scheduler.core.kv_cache import KVCache
from scheduler.core.limits import SchedulerLimits
from scheduler.core.modes import PAGED, KVAllocation
from scheduler.core.request import Request
from scheduler.core.sequence import Sequence

ReservedTokens = Callable[[Request, int], int]
"""Returns the number of token slots that a request reserves, given max_model_len."""


class RunPool(BlockPool):
    """A block pool that also hands out runs of consecutive blocks."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._missing_run = num_blocks  # no run is this long; valid until a block is released

    def find_run(self, length: int) -> int | None:
        """Returns the first block of the first run of `length` free blocks; None if there is none."""
        if length >= self._missing_run:
            return None
        first = self._free_map().find(b"\x01" * length, 1)
        if first < 0:
            self._missing_run = length
            return None
        return first

    def take_run(self, length: int) -> list[int]:
        """Hands out the first run of `length` blocks, with ref_count 1. The caller has checked that there is one."""
        first = self.find_run(length)
        if first is None:
            raise InvariantViolation(f"a run of {length} blocks was taken, and there is none")
        run = list(range(first, first + length))
        for block in run:
            self.retain(block)
        return run

    def free_runs(self) -> Iterator[int]:
        """Returns the lengths of the longest runs of consecutive free blocks, from the first to the last."""
        return (len(run.group()) for run in re.finditer(b"\x01+", self._free_map()[1:]))

    def release(self, block: int, *, findable: bool) -> None:
        super().release(block, findable=findable)
        self._missing_run = self.num_blocks

    def _free_map(self) -> bytes:
        """Returns a byte for each block, the null block included: 1 where ref_count is 0."""
        return bytes(map(not_, self.ref_counts))


class ContiguousKVCache(KVCache):
    """A cache in which a sequence takes all its blocks at admission, in one run.

    The block table is then longer than the tokens need, and never grows.
    """

    pool: RunPool

    def __init__(
        self, mode_name: str, num_reserved_tokens: ReservedTokens, max_model_len: int, num_blocks: int, block_size: int
    ) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching=False)
        self.pool = RunPool(num_blocks)
        self._mode_name = mode_name
        self._num_reserved_tokens = num_reserved_tokens
        self._max_model_len = max_model_len

    def run_length(self, request: Request) -> int:
        """Returns the number of blocks in the run of a request."""
        return self.num_blocks_for(self._num_reserved_tokens(request, self._max_model_len))

    def check_fits(self, request: Request) -> None:
        if request.num_sequences > 1 or request.beam:
            raise CapacityExceeded(
                f"samples and beams of one request share blocks, which {self._mode_name} memory cannot"
            )
        num_blocks, num_usable_blocks = self.run_length(request), self.pool.num_usable_blocks
        if num_blocks > num_usable_blocks:
            raise CapacityExceeded(
                f"the request reserves a run of {num_blocks} blocks, the pool has {num_usable_blocks}"
            )

    def num_blocks_to_admit(self, sequence: Sequence, prefix: list[int], num_promised: int = 0) -> int:
        return super().num_blocks_to_admit(sequence, prefix, max(num_promised, self.run_length(sequence.request)))

    def can_admit(self, sequence: Sequence, num_blocks: int) -> bool:
        return super().can_admit(sequence, num_blocks) and self.has_run_for(sequence)

    def has_run_for(self, sequence: Sequence) -> bool:
        return self.pool.find_run(self.run_length(sequence.request)) is not None

    def adopt(self, sequence: Sequence, prefix: list[int]) -> None:
        super().adopt(sequence, prefix)
        sequence.block_table = self.pool.take_run(self.run_length(sequence.request))
        sequence.write_limit = len(sequence.block_table) * self.block_size
        sequence.is_guaranteed = True  # not even for another tenant


def run_length(cache: KVCache, request: Request) -> int:
    """Returns the number of blocks that a request takes in one run; 0 if the cache is paged."""
    return cache.run_length(request) if isinstance(cache, ContiguousKVCache) else 0


def longest(request: Request, max_model_len: int) -> int:
    return max_model_len


def power_of_two(request: Request, max_model_len: int) -> int:
    num_prompt_tokens = len(request.prompt_token_ids)
    num_output_tokens = request.params.max_total_tokens - num_prompt_tokens
    return min(num_prompt_tokens + (1 << (num_output_tokens - 1).bit_length()), max_model_len)


def exact(request: Request, max_model_len: int) -> int:
    """Returns the tokens of the request but the last, whose KV is never needed."""
    return request.params.max_total_tokens - 1


def _contiguous(name: str, num_reserved_tokens: ReservedTokens) -> KVAllocation:
    def build_cache(
        limits: SchedulerLimits, block_size: int, namespace: str, enable_prefix_caching: bool, num_blocks: int
    ) -> KVCache:
        return ContiguousKVCache(name, num_reserved_tokens, limits.max_model_len, num_blocks, block_size)

    return KVAllocation(name, build_cache)


CONTIGUOUS = _contiguous("contiguous", longest)
CONTIGUOUS_POWER_OF_TWO = _contiguous("contiguous-power-of-two", power_of_two)
CONTIGUOUS_EXACT = _contiguous("contiguous-exact", exact)

KV_ALLOCATIONS = {mode.name: mode for mode in (PAGED, CONTIGUOUS, CONTIGUOUS_POWER_OF_TWO, CONTIGUOUS_EXACT)}
