"""A world of adversarial tenants, in which the service of each is counted from the results, not from its account.

ShareWorld(...)     one scheduler and an executor that answers every plan at once, with `max_in_flight` plans ahead
GapWatch            checks I22: the service gap of two tenants that are both backlogged never exceeds its bound
"""

from collections import Counter
from collections.abc import Callable
from itertools import combinations
from random import Random

from scheduler.core import (
    Events,
    QueueFull,
    ReceivedOutput,
    Request,
    Scheduler,
    SchedulerLimits,
    Sequence,
    SequenceParams,
    StepPlan,
    StepResult,
    TenantTerms,
    check_invariants,
)
from scheduler.core.tenants.account import GENERATED_TOKEN_COST, PROMPT_TOKEN_COST
from tests.support.core.victim_check import check_victims

Draw = Callable[[Random], tuple[int, int, int]]
"""Draws a request: prompt tokens, output tokens, and number of samples."""

KINDS: dict[str, Draw] = {
    "short": lambda random: (random.randint(1, 4), random.randint(1, 3), 1),
    "one token each": lambda random: (1, 1, 1),
    "long output": lambda random: (random.randint(1, 4), 10**6, 1),
    "long prompt": lambda random: (10**6, 1, 1),
    "all slots": lambda random: (1, 10**6, 10**6),
    "mixed": lambda random: (random.randint(1, 60), random.randint(1, 60), random.randint(1, 2)),
}


def gap_bound(limits: SchedulerLimits, weight: float, *, has_guarantees: bool) -> float:
    """Returns the most normalised service by which a tenant of this weight can get ahead of a backlogged one (I22).

    Without guaranteed sequences it is the smaller bound for tenants that lose sequences to those that wait.
    """
    num_seqs, length = limits.max_num_seqs, limits.max_model_len
    admission = PROMPT_TOKEN_COST * length * (1 + num_seqs)
    bound = (admission + GENERATED_TOKEN_COST * num_seqs * length) / weight
    if has_guarantees:
        return bound
    num_late = num_seqs * (2 * num_seqs + limits.max_in_flight)
    return min(bound, limits.max_ahead + (admission + GENERATED_TOKEN_COST * num_late) / weight)


class GapWatch:
    """Watches the service of each pair of tenants while both are backlogged. `most` is the largest gap seen.

    It has to `look` whenever a tenant may have stopped to be backlogged.
    """

    def __init__(self, scheduler: Scheduler, *, has_guarantees: bool) -> None:
        self._scheduler = scheduler
        self._has_guarantees = has_guarantees
        self._since: dict[tuple[str, str], float] = {}  # the difference of service when both had become backlogged
        self._displaced_by: dict[Sequence, str] = {}
        self.service: Counter[str] = Counter()
        self.most = 0.0
        _record_displacements(scheduler, self._displaced_by)

    def planned(self, plan: StepPlan) -> None:
        """Counts the prompts that a plan admits for the first time, and what a tenant made others compute again.

        Checks all gaps.
        """
        for sequence, num_cached in self._scheduler.state.in_flight[-1].admitted:
            is_again = sequence.num_preemptions or sequence.num_losses
            if (claimant := self._displaced_by.pop(sequence, None)) is not None:
                self.service[claimant] += PROMPT_TOKEN_COST * (sequence.num_tokens - num_cached)
            elif not is_again and (sequence.index == 0 or sequence.request.outputs):
                self.service[sequence.request.tenant] += PROMPT_TOKEN_COST * (sequence.num_given_tokens - num_cached)
        self.look()

    def committed(self, events: Events) -> None:
        for sequence in events.sequences:
            self.service[sequence.request.tenant] += GENERATED_TOKEN_COST

    def look(self) -> None:
        state = self._scheduler.state
        heads = [(account, state.waiting.head_of(account)) for account in state.accounts]
        backlogged = [account for account, head in heads if head is not None and state.waiting.may_enter(head)]
        pairs = {}
        for first, second in combinations(backlogged, 2):
            if first.terms.priority != second.terms.priority:
                continue
            pair = first.name, second.name
            served = (self.service[account.name] / account.terms.weight for account in (first, second))
            difference = next(served) - next(served)
            pairs[pair] = self._since.get(pair, difference)
            bound = sum(
                gap_bound(state.limits, account.terms.weight, has_guarantees=self._has_guarantees)
                for account in (first, second)
            )
            gap = abs(difference - pairs[pair])
            self.most = max(self.most, gap)
            assert gap <= bound, f"I22: the gap of {pair} is {gap:.0f}, the bound is {bound:.0f}"
        self._since = pairs


def _record_displacements(scheduler: Scheduler, displaced_by: dict[Sequence, str]) -> None:
    """Records each sequence that is preempted for a tenant that waits, and the tenant."""
    state = scheduler.state
    choose_victim = state.waiting.choose_victim

    def choose(*, is_short: bool) -> Sequence | None:
        victim = choose_victim(is_short=is_short)
        left_behind = state.waiting.left_behind
        if victim is not None and not is_short and left_behind is not None and not state.in_flight:
            displaced_by[victim.leader] = left_behind.request.tenant
        return victim

    state.waiting.choose_victim = choose  # type: ignore[method-assign]


class ShareWorld:
    """Tenants that keep `backlog` requests waiting, each of its kind. Tenants in `absent` add none."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kinds: dict[str, str],
        *,
        terms: dict[str, TenantTerms] | None = None,
        backlog: dict[str, int] | None = None,
        num_blocks: int = 10_000,
        block_size: int = 4,
        enable_prefix_caching: bool = True,
        seed: int = 0,
    ) -> None:
        self.random = Random(seed)
        self.kinds = kinds
        self.backlog = backlog or dict.fromkeys(kinds, 3)
        self.absent: set[str] = set()
        granted = terms or {}
        self.scheduler = Scheduler(
            limits,
            num_blocks=num_blocks,
            block_size=block_size,
            terms_of=lambda tenant: granted.get(tenant, TenantTerms()),
            enable_prefix_caching=enable_prefix_caching,
        )
        self.scheduler.executor_attached(1, num_blocks)
        check_victims(self.scheduler)
        self.watch = GapWatch(self.scheduler, has_guarantees=limits.max_preemptions < 10**6)
        self._sampled: list[tuple[StepPlan, int]] = []
        self._num_requests = 0
        self.num_tokens: Counter[str] = Counter()

    def step(self) -> None:
        """Lets clients add requests, plans as far ahead as possible, and commits one result."""
        for tenant in self.kinds:
            if tenant not in self.absent:
                self.fill(tenant)
        while (plan := self.scheduler.schedule()) is not None:
            self.watch.planned(plan)
            self._sampled.append((plan, len(self.scheduler.state.in_flight[-1].sampled)))
        self.watch.look()  # also if there is no plan: the queue was asked for the next sequence
        if self._sampled:
            plan, num_sampled = self._sampled.pop(0)
            token_ids = [self.random.randrange(100) for _ in range(num_sampled)]
            events = self.scheduler.commit(StepResult(plan.epoch, plan.step_id, token_ids))
            self.watch.committed(events)
            self.num_tokens.update(sequence.request.tenant for sequence in events.sequences)

    def run(self, num_steps: int) -> None:
        for number in range(num_steps):
            self.step()
            if number % 50 == 0:
                check_invariants(self.scheduler)

    def lose_executor(self) -> None:
        """Loses the executor, with the plans in flight, and attaches another one."""
        state = self.scheduler.state
        self.scheduler.executor_lost()
        self._sampled.clear()
        self.scheduler.executor_attached(state.epoch + 1, state.cache.pool.num_blocks)
        self.watch.look()

    def cancel_one(self) -> None:
        """Cancels a request, if there is one."""
        if self.scheduler.state.requests:
            self.scheduler.cancel(self.random.choice(list(self.scheduler.state.requests)))
            self.watch.look()

    def fill(self, tenant: str) -> None:
        """Adds requests of a tenant until it has its backlog.

        A tenant without requests may have no account yet, so the account is looked up again after each request.
        """
        waiting, accounts = self.scheduler.state.waiting, self.scheduler.state.accounts
        while len(waiting.of(account := accounts.of(tenant))) < self.backlog[tenant]:
            try:
                self.scheduler.add(self._draw_request(tenant, account.terms.max_num_seqs))
            except QueueFull:
                return

    def _draw_request(self, tenant: str, most_samples: int | None) -> Request:
        self._num_requests += 1
        most = self.scheduler.max_tokens_per_sequence
        num_prompt, num_output, num_samples = KINDS[self.kinds[tenant]](self.random)
        num_prompt = min(num_prompt, most - 1)
        total = min(num_prompt + num_output, most)
        prompt = self._draw_tokens(num_prompt)
        num_samples = min(num_samples, self.scheduler.state.limits.max_num_seqs, most_samples or num_samples)
        params = SequenceParams(max_total_tokens=total)
        seeds = tuple(range(num_samples))
        outputs: tuple[ReceivedOutput, ...] = ()
        if self.random.random() < 0.2:  # resumed: some of the output was received from another scheduler
            nums_received = [self.random.randrange(total - num_prompt) for _ in seeds]
            outputs = tuple(ReceivedOutput(self._draw_tokens(number)) for number in nums_received)
        return Request(self._num_requests, prompt, params, seeds=seeds, tenant=tenant, outputs=outputs)

    def _draw_tokens(self, number: int) -> list[int]:
        """Returns tokens of a vocabulary of two. `choices` takes a fifth of the time of one `randrange` for each."""
        return self.random.choices((0, 1), k=number)


def draw_world(seed: int) -> ShareWorld:
    """Returns a small world with two to four tenants."""
    random = Random(seed)
    max_num_seqs = random.randint(2, 6)
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + random.randint(0, 16),
        max_model_len=random.choice((40, 200)),
        max_in_flight=random.choice((1, 2, 3)),
        max_ahead=random.choice((0, 16, 64)),
        max_preemptions=random.choice((0, 3, 10**6, 10**6)),
    )
    tenants = "abcd"[: random.randint(2, 4)]
    block_size = random.randint(1, 8)
    least = -(-limits.max_model_len // block_size) * max_num_seqs
    caps, priorities = random.choice(((None,), (None, 1, 2))), random.choice(((0,), (0,), (0, 1)))
    return ShareWorld(
        limits,
        {tenant: random.choice(list(KINDS)) for tenant in tenants},
        terms={
            tenant: TenantTerms(
                weight=random.choice((1, 1, 2, 0.5)),
                priority=random.choice(priorities),
                max_num_seqs=random.choice(caps),
            )
            for tenant in tenants
        },
        backlog={tenant: random.choice((1, 3, 100)) for tenant in tenants},
        num_blocks=random.choice((least + 2, max(4, least // 2))),
        block_size=block_size,
        enable_prefix_caching=random.random() < 0.7,
        seed=seed,
    )


def run_world(seed: int, num_steps: int = 1500) -> float:
    """Runs a world in which tenants may leave and come back, requests be cancelled, and executors be lost.

    Returns the largest gap. Raises if I22 is broken.
    """
    world = draw_world(seed)
    random = Random(seed)
    is_bursty, loss_rate, cancel_rate = random.random() < 0.5, random.choice((0, 0.01)), random.choice((0, 0.02))
    for number in range(num_steps):
        if is_bursty and number % 200 == 0:
            world.absent = set(world.random.sample(sorted(world.kinds), world.random.randint(0, len(world.kinds) - 1)))
        if random.random() < loss_rate:
            world.lose_executor()
        if random.random() < cancel_rate:
            world.cancel_one()
        world.step()
        if number % 100 == 0:
            check_invariants(world.scheduler)
    return world.watch.most
