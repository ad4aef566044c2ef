"""Checks I23 at each preemption: which sequence is taken, by counts of its own."""

from collections import Counter

from scheduler.core import Scheduler, Sequence
from scheduler.core.state import SchedulerState


def check_victims(scheduler: Scheduler) -> None:
    """Makes a scheduler check each victim before it is preempted. Raises AssertionError if I23 is broken."""
    state = scheduler.state
    choose_victim = state.waiting.choose_victim

    def choose(*, is_short: bool) -> Sequence | None:
        victim = choose_victim(is_short=is_short)
        if victim is not None and not state.in_flight:  # with plans in flight, none is preempted yet
            _check(state, victim, is_short=is_short)
        return victim

    state.waiting.choose_victim = choose  # type: ignore[method-assign]


def _check(state: SchedulerState, victim: Sequence, *, is_short: bool) -> None:
    assert not victim.is_guaranteed, f"I23: {victim!r} has its blocks promised"
    running = [sequence for sequence in state.batch.running if not sequence.is_guaranteed]
    most = max(map(_standing, running))
    assert not is_short or _standing(victim) == most, f"I23: {victim!r} is not of the tenant with the most service"
    of_tenant = [sequence for sequence in running if sequence.account is victim.account]

    def rank(sequence: Sequence) -> int:
        return state.policy.rank(sequence.request.priority)

    assert rank(victim) == max(map(rank, of_tenant)), f"I23: {victim!r} is more urgent than another sequence"
    equals = [sequence for sequence in of_tenant if rank(sequence) == rank(victim)]
    first = min(equals, key=state.policy.order).leader
    others = [sequence for sequence in equals if sequence.leader is not first]
    assert victim.leader is not first or not others, f"I23: {victim!r} is the first in order"
    num_references = Counter(block for sequence in state.batch.running for block in sequence.block_table)
    if others and all(_shares_a_prefix(sequence, num_references) for sequence in others):
        least = min(_cost(state, sequence, num_references) for sequence in others)
        assert _cost(state, victim, num_references) == least, f"I23: {victim!r} costs more than another sequence"


def _standing(sequence: Sequence) -> tuple[int, float]:
    return (sequence.account.terms.priority, sequence.account.level)


def _shares_a_prefix(sequence: Sequence, num_references: Counter[int]) -> bool:
    """Returns whether the blocks that a sequence shares are the first of its table, which the cost assumes."""
    is_own = [num_references[block] == 1 for block in sequence.block_table]
    return is_own == sorted(is_own)


def _cost(state: SchedulerState, sequence: Sequence, num_references: Counter[int]) -> tuple[float, int]:
    """Returns the blocks of tokens to compute again for each block that becomes free, and the magnitude of tokens."""
    size, num_tokens = state.cache.block_size, sequence.num_computed_tokens
    own = [block for block in sequence.block_table if num_references[block] == 1]
    if not own:
        return (float("inf"), num_tokens.bit_length())
    num_lost = num_tokens
    if state.cache.reads_prefixes(sequence) and not sequence.is_beam:
        full = sequence.block_table[: num_tokens // size]
        num_lost -= size * sum(num_references[block] != 1 for block in full)
    return (-(-num_lost // (len(own) * size)), num_tokens.bit_length())
