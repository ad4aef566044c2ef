"""Checks, when a request arrives, that it can be served at all."""

from scheduler.core.beams.group import BeamGroup
from scheduler.core.errors import CapacityExceeded
from scheduler.core.request import Request
from scheduler.core.sequence import Sequence
from scheduler.core.state import SchedulerState


def max_tokens_per_sequence(state: SchedulerState) -> int:
    """Returns the most tokens, prompt and output, that one sequence can reach. The last one's KV is never needed."""
    return min(state.limits.max_model_len, state.cache.pool.num_usable_blocks * state.cache.block_size + 1)


def check_fits(state: SchedulerState, request: Request) -> None:
    """Raises CapacityExceeded if the request could not even run alone.

    All beams must fit at once: they are only preempted together, so preemption cannot make room for some of them.
    """
    min_total, max_total = request.params.min_total_tokens, request.params.max_total_tokens
    most_tokens = max_tokens_per_sequence(state)
    if max_total <= len(request.prompt_token_ids):
        raise CapacityExceeded(
            f"the prompt has {len(request.prompt_token_ids)} tokens, which leaves no room for output in {max_total}"
        )
    if max_total > most_tokens:
        raise CapacityExceeded(f"prompt and output may reach {max_total} tokens, one sequence can hold {most_tokens}")
    if request.is_open_ended and min_total > max_total:
        raise CapacityExceeded(f"prompt and output are to reach {min_total} tokens, one sequence can hold {max_total}")
    if request.num_slots > state.limits.max_num_seqs:
        raise CapacityExceeded(
            f"{request.num_slots} sequences in one request, at most {state.limits.max_num_seqs} can run"
        )
    state.cache.check_fits(request)
    if request.beam:
        num_blocks = BeamGroup(Sequence(request, 0, 0), request.beam).num_worst_case_blocks(state.cache)
        if num_blocks > (num_usable_blocks := state.cache.pool.num_usable_blocks):
            raise CapacityExceeded(
                f"{request.beam.width} beams may come to hold {num_blocks} blocks, the pool has {num_usable_blocks}"
            )


def fits(state: SchedulerState, request: Request) -> bool:
    try:
        check_fits(state, request)
    except CapacityExceeded:
        return False
    return True
