"""Mistakes in the accounting of shares, each of which a test of I22 has to find."""

import pytest

from scheduler.core import SchedulerState, Sequence
from scheduler.core.fairness.accounts import Accounts
from scheduler.core.fairness.fair_queue import FairQueue
from scheduler.core.tenants.account import GENERATED_TOKEN_COST, Account


def charge_no_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Accounts, "charge_tokens", lambda accounts, sequences, num_tokens=1: None)


def charge_no_prompts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Accounts, "charge_admission", lambda accounts, sequence: None)


def ignore_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Account, "level", property(lambda account: account.lift + account.cost))


def save_service_for_later(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Account, "raise_to", lambda account, level: None)


def admit_in_order_of_arrival(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FairQueue, "first", lambda queue: min(queue, key=lambda sequence: sequence.arrival, default=None))


def never_preempt_for_shares(patch: pytest.MonkeyPatch) -> None:
    choose_victim = FairQueue.choose_victim
    patch.setattr(
        FairQueue, "choose_victim", lambda queue, is_short: choose_victim(queue, is_short=True) if is_short else None
    )


def charge_at_the_end(patch: pytest.MonkeyPatch) -> None:
    """Charges neither prompts nor tokens until a sequence ends."""
    charge_no_tokens(patch)
    charge_no_prompts(patch)
    finish = SchedulerState.finish

    def mutant(state: SchedulerState, sequence: Sequence) -> None:
        num_generated = sequence.num_tokens - sequence.num_given_tokens
        sequence.account.cost += sequence.num_given_tokens + GENERATED_TOKEN_COST * num_generated
        finish(state, sequence)

    patch.setattr(SchedulerState, "finish", mutant)


def multiply_by_the_weight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Account, "level", property(lambda account: account.lift + account.cost * account.terms.weight))


MUTATIONS = [
    charge_at_the_end,
    multiply_by_the_weight,
    charge_no_tokens,
    charge_no_prompts,
    ignore_weights,
    save_service_for_later,
    admit_in_order_of_arrival,
    never_preempt_for_shares,
]
