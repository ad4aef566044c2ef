"""The accounts of all tenants: opens and forgets them, and charges service."""

from collections.abc import Iterable, Iterator
from heapq import nsmallest

from scheduler.core.sequence import Sequence
from scheduler.core.tenants.account import (
    GENERATED_TOKEN_COST,
    PROMPT_LOGPROBS_COST,
    PROMPT_TOKEN_COST,
    Account,
    TermsOf,
)

MAX_IDLE_ACCOUNTS = 1024
"""Accounts of tenants without requests that are kept; beyond it, those with the least service are forgotten."""


class Accounts:
    """The accounts by name of the tenant. `active` are those of tenants that have requests, an ordered set."""

    def __init__(self, terms_of: TermsOf) -> None:
        self._terms_of = terms_of
        self._accounts: dict[str, Account] = {}
        self.active: dict[Account, None] = {}

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def __len__(self) -> int:
        return len(self._accounts)

    def of(self, tenant: str) -> Account:
        """Returns the account of a tenant. If there is none, returns a new one, which is not kept."""
        return self._accounts.get(tenant) or Account(tenant, self._terms_of(tenant))

    def request_added(self, tenant: str) -> Account:
        """Returns the account of the tenant of a new request, and opens it if there is none."""
        account = self._accounts[tenant] = self.of(tenant)
        account.num_requests += 1
        if account.num_requests == 1:
            self.active[account] = None
            self._forget_idle()  # not this one, which is not idle any more
        return account

    def request_ended(self, account: Account) -> None:
        account.num_requests -= 1
        if account.num_requests == 0:
            del self.active[account]

    def charge_admission(self, sequence: Sequence) -> None:
        """Charges the given tokens that an admitted sequence computes.

        What is computed again is charged to the tenant that displaced the sequence, if one did, or else to none. What a
        deferred sequence computes again is charged to its own tenant.
        """
        account = sequence.account
        if (claimant := self.settle(sequence)) is not None:
            claimant.cost += (sequence.num_tokens - sequence.num_computed_tokens) * PROMPT_TOKEN_COST
        elif not sequence.is_charged:
            has_reports = sequence.params.num_prompt_logprobs > 0
            num_tokens = sequence.num_given_tokens - sequence.num_computed_tokens
            account.cost += num_tokens * (PROMPT_TOKEN_COST + PROMPT_LOGPROBS_COST * has_reports)
        sequence.is_charged = True
        account.mark = account.level

    def displace(self, sequence: Sequence, claimant: Account) -> None:
        """Called when a sequence was preempted to give another tenant a slot or blocks."""
        sequence.displaced_by = claimant
        claimant.num_displaced += 1

    def settle(self, sequence: Sequence) -> Account | None:
        """Called when a sequence leaves the queue. Returns the tenant that displaced it, if one did."""
        claimant, sequence.displaced_by = sequence.displaced_by, None
        if claimant is not None:
            claimant.num_displaced -= 1
        return claimant

    def charge_tokens(self, sequences: Iterable[Sequence], num_tokens: int = 1) -> None:
        """Charges the generated tokens of sequences or beams: `num_tokens` for each."""
        cost = GENERATED_TOKEN_COST * num_tokens
        for sequence in sequences:
            sequence.account.cost += cost

    def highest_level(self, priority: int) -> float:
        """Returns the largest counter of all tenants of a priority."""
        levels = (account.level for account in self if account.terms.priority == priority)
        return max(levels, default=0.0)

    def share(self, account: Account) -> float:
        """Returns the part of the service that a tenant with requests is entitled to, between 0 and 1."""
        return account.terms.weight / sum(other.terms.weight for other in self.active)

    def _forget_idle(self) -> None:
        """Bounds the number of accounts. Tenants that are forgotten would probably be lifted anyway."""
        num_too_many = len(self._accounts) - len(self.active) - MAX_IDLE_ACCOUNTS
        if num_too_many > 0:
            idle = (account for account in self._accounts.values() if not account.num_requests)
            for account in nsmallest(num_too_many, idle, key=lambda account: account.level):
                del self._accounts[account.name]
