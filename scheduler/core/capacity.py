"""What can be served at all, and what the queue takes: every request is measured once, when it arrives."""

from scheduler.core.beam_group import BeamGroup
from scheduler.core.errors import CapacityExceeded, QueueFull
from scheduler.core.kv_cache import KVCache
from scheduler.core.limits import Limits
from scheduler.core.request import Request
from scheduler.core.sequence import Sequence
from scheduler.core.waiting_queue import WaitingQueue


def max_tokens_per_sequence(limits: Limits, cache: KVCache) -> int:
    """Most tokens (prompt and output) that one sequence can reach. The KV of the last one is never needed."""
    return min(limits.max_model_len, cache.pool.num_usable_blocks * cache.block_size + 1)


def check_fits(request: Request, limits: Limits, cache: KVCache) -> None:
    """Raises CapacityExceeded if this request could not even run alone. Beams must fit together: they are preempted
    together, so nothing else makes sure that they end."""
    min_total, max_total = request.params.min_total_tokens, request.params.max_total_tokens
    most_tokens = max_tokens_per_sequence(limits, cache)
    if max_total <= len(request.prompt_token_ids):
        raise CapacityExceeded(
            f"the prompt has {len(request.prompt_token_ids)} tokens, which leaves no room for output in {max_total}"
        )
    if max_total > most_tokens:
        raise CapacityExceeded(f"prompt and output may reach {max_total} tokens, one sequence can hold {most_tokens}")
    if request.is_open_ended and min_total > max_total:
        raise CapacityExceeded(f"prompt and output are to reach {min_total} tokens, one sequence can hold {max_total}")
    num_sequences = request.beam.width if request.beam else request.num_sequences
    if num_sequences > limits.max_num_seqs:
        raise CapacityExceeded(f"{num_sequences} sequences in one request, at most {limits.max_num_seqs} can run")
    if cache.memory.is_contiguous:
        _check_fits_run(request, cache)
    if request.beam:
        num_blocks = BeamGroup(Sequence(request, 0, 0), request.beam).num_worst_case_blocks(cache)
        if num_blocks > cache.pool.num_usable_blocks:
            raise CapacityExceeded(
                f"{num_sequences} beams may come to hold {num_blocks} blocks, the pool has "
                f"{cache.pool.num_usable_blocks}"
            )


def _check_fits_run(request: Request, cache: KVCache) -> None:
    if request.num_sequences > 1 or request.beam:
        raise CapacityExceeded(
            f"samples and beams of one request share blocks, which {cache.memory.name} memory cannot"
        )
    num_blocks, num_usable_blocks = cache.run_length(request), cache.pool.num_usable_blocks
    if num_blocks > num_usable_blocks:
        raise CapacityExceeded(f"the request reserves a run of {num_blocks} blocks, the pool has {num_usable_blocks}")


def fits(request: Request, limits: Limits, cache: KVCache) -> bool:
    try:
        check_fits(request, limits, cache)
    except CapacityExceeded:
        return False
    return True


def check_queue_takes(request: Request, limits: Limits, waiting: WaitingQueue) -> None:
    """Raises QueueFull."""
    if len(waiting) >= limits.max_waiting_requests:
        raise QueueFull(f"{len(waiting)} requests are waiting")
    num_tokens = waiting.num_prompt_tokens + len(request.prompt_token_ids)
    if waiting and num_tokens > limits.max_waiting_prompt_tokens:
        raise QueueFull(f"{waiting.num_prompt_tokens} prompt tokens are waiting")
