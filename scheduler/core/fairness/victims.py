"""Chooses which running sequence is preempted: for lack of blocks, or because its tenant is ahead of one that waits."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping

from scheduler.core.errors import InvariantViolation
from scheduler.core.fairness.accounts import Accounts
from scheduler.core.kv_cache import KVCache
from scheduler.core.limits import SchedulerLimits
from scheduler.core.policy import Policy
from scheduler.core.running_batch import RunningBatch
from scheduler.core.sequence import Sequence
from scheduler.core.tenants.account import Account

_FREES_NOTHING = 1 << 62


def victim_of_shortage(running: Iterable[Sequence], cache: KVCache, policy: Policy) -> Sequence:
    """Returns the sequence to preempt if blocks are short.

    Raises InvariantViolation if all sequences have their blocks promised.
    """
    candidates = [sequence for sequence in running if not sequence.is_guaranteed]
    if not candidates:
        raise InvariantViolation("the pool is short, and every running sequence has its blocks promised")
    return _choose(candidates, cache, policy)


def victim_of_shares(
    batch: RunningBatch,
    cache: KVCache,
    left_behind: Sequence,
    num_slots: int,
    limits: SchedulerLimits,
    accounts: Accounts,
    policy: Policy,
) -> Sequence | None:
    """Returns the sequence to preempt so that a tenant that waits gets its share; None if there is no need.

    `left_behind` is first in the queue, and either the last plan had no place for it or all slots are taken. It takes
    `num_slots`. There is a need if another tenant is far ahead, or if slots or blocks are short and the tenant that
    waits holds less than its part of them.
    """
    if left_behind.account.num_displaced >= limits.max_num_seqs:
        return None
    over = _far_ahead(batch, left_behind.account, limits.max_ahead)
    lacks_blocks = cache.num_available_blocks() < cache.num_blocks_for(left_behind.num_tokens)
    if lacks_blocks or batch.num_free_slots < num_slots:
        over |= _beyond_their_parts(batch, cache, left_behind, num_slots, limits.max_num_seqs, accounts)
    candidates = [s for s in batch.running if s.account in over and not s.is_guaranteed]
    return _choose(candidates, cache, policy) if candidates else None


def _far_ahead(batch: RunningBatch, account: Account, max_ahead: float) -> set[Account]:
    """Returns the tenants that are too far ahead of a tenant that waits.

    Such a tenant is ahead by more than `max_ahead`, and generates more tokens a step than the waiting one, in relation
    to its weight. If its priority is lower (a higher number), its rate does not matter.
    """
    generating = Counter(sequence.account for sequence in batch.running)
    generating.subtract(sequence.account for sequence in batch.prefilling)
    return {
        other
        for other in generating
        if _ahead(other, account) > max_ahead
        and (other.terms.priority > account.terms.priority or _rate(other, generating) > _rate(account, generating))
    }


def _beyond_their_parts(
    batch: RunningBatch, cache: KVCache, left_behind: Sequence, num_wanted: int, most_slots: int, accounts: Accounts
) -> set[Account]:
    """Returns the tenants that hold more than their part of the slots or blocks, and are not behind one that waits.

    There are none if the tenant that waits would hold more than its own part, or if as many sequences as its part were
    preempted for it and still wait: so it never displaces more than it is entitled to.
    """
    num_slots = Counter(sequence.account for sequence in batch.running)
    num_blocks: Counter[Account] = Counter()
    for sequence in batch.running:
        num_blocks[sequence.account] += len(sequence.block_table)

    def is_beyond(account: Account, num_slots: int, num_blocks: int) -> bool:
        share = accounts.share(account)
        return num_slots > share * most_slots or num_blocks > share * cache.pool.num_usable_blocks

    account = left_behind.account
    most_held = max(num_slots[account], account.num_displaced) + num_wanted
    if is_beyond(account, most_held, num_blocks[account] + cache.num_blocks_for(left_behind.num_tokens)):
        return set()
    standing = (account.terms.priority, account.level)
    return {
        other
        for other in num_slots
        if (other.terms.priority, other.level) >= standing and is_beyond(other, num_slots[other], num_blocks[other])
    }


def _choose(candidates: list[Sequence], cache: KVCache, policy: Policy) -> Sequence:
    """Returns the victim (I23).

    It belongs to the tenant with the highest priority number, then with the most service, and has the highest rank
    there. Of these sequences the first in order is spared if there is another, so that it can end. The victim is the
    cheapest of the rest, and among equals the last in order.
    """
    standing = max(_standing(sequence, policy) for sequence in candidates)
    equals = [sequence for sequence in candidates if _standing(sequence, policy) == standing]
    first = min(equals, key=policy.order).leader
    others = [sequence for sequence in equals if sequence.leader is not first]
    return min(others or equals, key=lambda s: (_cost(s, cache), [-number for number in policy.order(s)]))


def _standing(sequence: Sequence, policy: Policy) -> tuple[int, float, str, int]:
    account = sequence.account
    return (account.terms.priority, account.level, account.name, policy.rank(sequence.request.priority))


def _cost(sequence: Sequence, cache: KVCache) -> tuple[int, int]:
    """Returns what it costs to preempt a sequence: tokens for each block that becomes free, then tokens.

    The first number is in blocks of tokens, rounded up: it is 1 unless the sequence shares blocks. Shared full blocks
    stay in the prefix cache, so if it may read them, they are not computed again; nor do they become free. The search
    for the first block of its own assumes that each block has as many references as the next one or more. If a prompt
    was computed twice at once, this can be wrong, and the number of blocks is an estimate.

    The second number is the number of binary digits of the computed tokens. The exact number would preempt the same
    short sequences until they have their blocks reserved, after which fewer sequences fit. (In the worlds of
    `test_victims.py`, which count recomputed tokens alone, it would recompute 4 % fewer.)
    """
    table, size, references = sequence.block_table, cache.block_size, cache.pool.ref_counts
    num_shared = bisect_left(table, True, key=lambda block: references[block] == 1)
    num_own = len(table) - num_shared
    num_tokens = sequence.num_computed_tokens
    is_found_again = cache.reads_prefixes(sequence) and not sequence.is_beam
    num_lost = num_tokens - min(num_shared, num_tokens // size) * size * is_found_again
    return (-(-num_lost // (num_own * size)) if num_own else _FREES_NOTHING, num_tokens.bit_length())


def _ahead(account: Account, behind: Account) -> float:
    """Returns the service that `account` has received since its last admission, as far as it is ahead of `behind`."""
    if account is behind or account.terms.priority < behind.terms.priority:
        return 0.0
    if account.terms.priority > behind.terms.priority:
        return account.level - account.mark
    return account.level - max(account.mark, behind.level)


def _rate(account: Account, generating: Mapping[Account, int]) -> float:
    return generating[account] / account.terms.weight
