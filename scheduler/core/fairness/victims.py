"""Chooses which running sequence is preempted: for lack of blocks, or because its tenant is ahead of one that waits."""

from collections import Counter
from collections.abc import Iterable, Mapping

from scheduler.core.errors import InvariantViolation
from scheduler.core.policy import Policy
from scheduler.core.running_batch import RunningBatch
from scheduler.core.sequence import Sequence
from scheduler.core.tenants.account import Account


def victim_of_shortage(running: Iterable[Sequence], policy: Policy) -> Sequence:
    """Returns the sequence to preempt if blocks are short.

    It belongs to the tenant with the highest priority number, then with the most service; of its sequences it is the
    last in the policy's order. The sequence with the fewest computed tokens would lose less at once, but in a pool that
    is always short more tokens are then recomputed. Raises InvariantViolation if all sequences have their blocks
    promised.
    """
    candidates = [sequence for sequence in running if not sequence.is_guaranteed]
    if not candidates:
        raise InvariantViolation("the pool is short, and every running sequence has its blocks promised")
    return _last(candidates, policy)


def victim_of_shares(batch: RunningBatch, left_behind: Sequence, max_ahead: float, policy: Policy) -> Sequence | None:
    """Returns the sequence to preempt so that a tenant that waits gets its share; None if there is no need.

    `left_behind` is first in the queue, and the last plan had no place for it. There is a need if another tenant has
    received more than `max_ahead` since its last admission by which it is ahead, and still generates more tokens a
    step, in relation to its weight. For a tenant of a lower priority (a higher number) only the first part counts.
    """
    account = left_behind.account
    generating = Counter(sequence.account for sequence in batch.running)
    generating.subtract(sequence.account for sequence in batch.prefilling)
    over = {
        other
        for other in generating
        if _ahead(other, account) > max_ahead
        and (other.terms.priority > account.terms.priority or _rate(other, generating) > _rate(account, generating))
    }
    candidates = [s for s in batch.running if s.account in over and not s.is_guaranteed]
    return _last(candidates, policy) if candidates else None


def _last(candidates: list[Sequence], policy: Policy) -> Sequence:
    return max(candidates, key=lambda s: (s.account.terms.priority, s.account.level, policy.order(s)))


def _ahead(account: Account, behind: Account) -> float:
    """Returns the service that `account` has received since its last admission, as far as it is ahead of `behind`."""
    if account is behind or account.terms.priority < behind.terms.priority:
        return 0.0
    if account.terms.priority > behind.terms.priority:
        return account.level - account.mark
    return account.level - max(account.mark, behind.level)


def _rate(account: Account, generating: Mapping[Account, int]) -> float:
    return generating[account] / account.terms.weight
