"""The load of the core as a router needs it to choose among replicas."""

from dataclasses import dataclass
from itertools import chain

from scheduler.core.inspect.views import num_waiting_sequences
from scheduler.core.scheduler import Scheduler
from scheduler.core.sequence import Sequence
from scheduler.core.state import SchedulerState
from scheduler.core.timing.step_budget import MIN_PROMPT_TIME

_MAX_EXAMINED = 16
"""Most waiting sequences whose prefixes are looked up. The rest counts as the mean of these."""


@dataclass(frozen=True, slots=True)
class CoreLoad:
    """The load of one core.

    num_running          sequences that hold blocks
    num_waiting          sequences in the queue, and deferred ones that pause
    num_queued_tokens    known tokens that wait or are being computed, without cached ones. A block that several
                         sequences wait for counts once, because one computes it and the others share it
    prefill_s_per_token  seconds for one prompt token beside the decodes that run now; 0: not measured yet
    decode_step_s        seconds by which one more running sequence prolongs each step
    """

    num_running: int
    num_waiting: int
    num_queued_tokens: int
    prefill_s_per_token: float
    decode_step_s: float


def core_load(scheduler: Scheduler) -> CoreLoad:
    """Returns the load. Takes time proportional to the prompts that wait, at most 16 of them, and to the batch."""
    state = scheduler.state
    decoding = state.batch.decoding
    num_pairs = sum(sequence.num_planned_tokens for sequence in decoding)
    costs = state.costs
    decodes_s = costs.decodes_s(len(decoding), num_pairs)
    prompts_s = max(state.limits.target_inter_token_latency_s - decodes_s, MIN_PROMPT_TIME * decodes_s)
    slowdown = 1.0 + decodes_s / prompts_s if decoding and prompts_s else 1.0
    return CoreLoad(
        num_running=len(state.batch.running),
        num_waiting=(num_waiting := num_waiting_sequences(scheduler)),
        num_queued_tokens=_num_queued_tokens(state, num_waiting),
        prefill_s_per_token=costs.token_s * slowdown,
        decode_step_s=costs.decode_s + (costs.decode_pair_s * num_pairs / len(decoding) if decoding else 0.0),
    )


def _num_queued_tokens(state: SchedulerState, num_waiting: int) -> int:
    size = state.cache.block_size
    computing = dict.fromkeys(state.batch.prefilling)
    for step in state.in_flight:
        computing.update((sequence, None) for sequence in step.prefills if not sequence.is_finished)
    num_tokens = sum(max(0, sequence.num_tokens - sequence.num_computed_tokens) for sequence in computing)
    if not num_waiting:
        return num_tokens
    coming = {digest for sequence in computing for digest in sequence.digests[sequence.num_computed_tokens // size :]}
    num_examined = num_waiting_tokens = 0
    for sequence in chain(state.waiting, state.waiting.paused):
        num_waiting_tokens += _num_own_tokens(state, sequence, coming)
        num_examined += 1
        if num_examined == _MAX_EXAMINED:
            break
    return num_tokens + num_waiting_tokens * num_waiting // num_examined


def _num_own_tokens(state: SchedulerState, sequence: Sequence, coming: set[bytes]) -> int:
    """Returns the tokens that no other sequence has computed or will compute before; adds their digests to `coming`."""
    prefix = state.cache.find_prefix(sequence)
    num_full = (sequence.num_tokens - 1) // state.cache.block_size
    own = [digest for digest in sequence.digests[len(prefix) : num_full] if digest not in coming]
    coming.update(own)
    if not sequence.digests:
        return sequence.num_tokens
    return sequence.num_tokens - state.cache.block_size * (num_full - len(own))
