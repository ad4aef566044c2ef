"""The waiting sequences of all tenants: one queue for each, of which the tenant with the least service is next."""

from collections.abc import Callable, Collection, Iterator, Mapping
from heapq import heapify, heappop, heappush, heapreplace, merge
from itertools import islice

from scheduler.core.active_request import ActiveRequest
from scheduler.core.errors import CapacityExceeded, QueueFull
from scheduler.core.fairness.accounts import Accounts
from scheduler.core.fairness.victims import victim_of_shares, victim_of_shortage
from scheduler.core.kv_cache import KVCache
from scheduler.core.limits import SchedulerLimits
from scheduler.core.policy import Policy
from scheduler.core.request import Request
from scheduler.core.running_batch import RunningBatch
from scheduler.core.sequence import Sequence
from scheduler.core.tenants.account import Account
from scheduler.core.tenants.errors import TenantLimitReached
from scheduler.core.waiting_queue import WaitingQueue

_Entry = tuple[tuple[int, float, bool, int], int, Account]
"""An entry of the heap: the place of a tenant when it was added or corrected, its number, and the tenant."""

MAX_SET_ASIDE = 16
"""Sequences that a tenant can have set aside; if it has as many, the tenant waits until the next plan."""


class FairQueue:
    """An `AdmissionQueue` over the queues of the tenants, each in the order of the policy.

    The next sequence is the head of the tenant with the lowest priority number, then the smallest counter. Of tenants
    with equal counters, those come first that have not been charged since their counter was lifted: the others may have
    work in flight that is not charged yet. Then the head that arrived first is next. Sequences that are set aside are
    passed over, and so are tenants at a cap of their own. `requests` are those that have not ended, by id; `holdings`
    returns the running batch and the KV cache.

    A tenant saves no service for later: when it has nothing in the queue and adds a sequence, its counter is lifted to
    the smallest of the tenants in the queue or, if there are none, to the largest of all tenants. The counter of a
    tenant that is passed over is lifted to that of the tenant that is next or, if that is of another priority, to the
    largest of those that are passed over. Tenants are compared with tenants of the same priority only.
    """

    due_s: float | None = None
    """The clock alone never changes which sequence is first."""

    def __init__(
        self,
        policy: Policy,
        limits: SchedulerLimits,
        accounts: Accounts,
        requests: Mapping[int, ActiveRequest],
        holdings: Callable[[], tuple[RunningBatch, KVCache]],
    ) -> None:
        self._policy = policy
        self._limits = limits
        self._accounts = accounts
        self._requests = requests
        self._holdings = holdings
        self._queues: dict[Account, WaitingQueue] = {}  # none of them is empty
        self._heap: list[_Entry] = []  # of each queue the entry that `_entries` names, and older ones
        self._entries: dict[Account, int] = {}
        self._num_entries = 0
        self._num_waiting = 0
        self._set_aside: list[Sequence] = []
        self.paused: dict[Sequence, None] = {}  # an ordered set
        self.num_prompt_tokens = 0
        self.left_behind: Sequence | None = None
        """The first sequence, if the last plan had no place for it or all slots are taken; None after a preemption."""
        self.paused_step_id = 0
        """The last step for which the batch paused, so that a newcomer could pass (newcomers.py); 0: none."""

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """Yields all waiting sequences, in the order of the policy."""
        return merge(*self._queues.values(), key=self._policy.order)

    def first(self) -> Sequence | None:
        """Returns the next sequence. Takes logarithmic time for each tenant whose place has changed or is passed over.

        A place only gets worse while nothing is added or taken back, because counters only grow. So entries of the heap
        are corrected when they come to its top.
        """
        heap, best = self._heap, None
        passed_over: list[_Entry] = []
        while heap and best is None:
            place, number, account = heap[0]
            if self._entries.get(account) != number:
                heappop(heap)
            elif (head := self.head_of(account)) is None:
                passed_over.append(heappop(heap))
            elif place != (current := _place(head)):
                heapreplace(heap, (current, number, account))
            elif self.may_enter(head):
                best = head
            else:
                passed_over.append(heappop(heap))
        if passed_over:
            self._lift_passed_over([account for _, _, account in passed_over], best)
        for entry in passed_over:
            heappush(heap, entry)
        return best

    def set_aside(self, sequence: Sequence) -> None:
        """Passes over a sequence of the queue until `take_back`."""
        sequence.is_set_aside = True
        self._set_aside.append(sequence)

    def pause(self, sequence: Sequence) -> None:
        """Keeps a deferred sequence outside the queue until its `resume_s`. It counts for the bounds of the queue."""
        sequence.is_set_aside = True
        self.paused[sequence] = None

    def take_back(self, now_s: float) -> None:
        """Returns all sequences to their places that were set aside, and those whose pauses have ended."""
        for sequence in [each for each in self.paused if each.resume_s <= now_s]:
            self.remove(sequence)
            self.add(sequence)
        set_aside, self._set_aside = self._set_aside, []
        for sequence in set_aside:
            sequence.is_set_aside = False
        for account in {sequence.account for sequence in set_aside if sequence.account in self._queues}:
            self._enter(account)

    def add(self, sequence: Sequence) -> None:
        queue = self._queues.get(sequence.account)
        if queue is None:
            self._lift(sequence.account)
            queue = self._queues[sequence.account] = WaitingQueue(self._policy)
        queue.add(sequence)
        if queue.first() is sequence:
            self._enter(sequence.account)
        self._num_waiting += 1
        self.num_prompt_tokens += sequence.num_given_tokens

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that is in the queue, or pauses."""
        if sequence in self.paused:
            del self.paused[sequence]
            sequence.is_set_aside = False
            return
        queue = self._queues.get(sequence.account)
        if queue is None:
            raise LookupError(f"{sequence!r} is not waiting")
        queue.remove(sequence)
        if not queue:
            del self._queues[sequence.account], self._entries[sequence.account]
        self._num_waiting -= 1
        self.num_prompt_tokens -= sequence.num_given_tokens

    def choose_victim(self, *, is_short: bool) -> Sequence | None:
        """Returns the sequence to preempt for lack of blocks, or else for a tenant that waits; None: no need."""
        batch, cache = self._holdings()
        if is_short:
            return victim_of_shortage(batch.running, cache, self._policy)
        if len(self._accounts.active) == 1:
            return None
        first = self.first()
        if first is None or (first is not self.left_behind and batch.num_free_slots):
            return None
        self.left_behind = first
        num_slots = self._num_slots(first)
        return victim_of_shares(batch, cache, first, num_slots, self._limits, self._accounts, self._policy)

    def lacks_a_tenant(self) -> bool:
        """Returns whether a known tenant has no sequence in the queue, and is not the only one that is known.

        If it sends a request, a running sequence of another tenant may have to leave its slot to it.
        """
        return len(self._accounts) > max(1, len(self._queues))

    def of(self, account: Account) -> WaitingQueue:
        """Returns the queue of one tenant, which may be empty."""
        return self._queues.get(account) or WaitingQueue(self._policy)

    def head_of(self, account: Account) -> Sequence | None:
        """Returns the first sequence of a tenant that is not set aside; None if there is none, or too many are."""
        return next((each for each in islice(self.of(account), MAX_SET_ASIDE) if not each.is_set_aside), None)

    def check_takes(self, request: Request) -> None:
        """Raises QueueFull if the queue, or its tenant's, is at its bound of requests or of prompt tokens.

        A tenant cannot keep the others out: when the queue is full, it still takes requests of tenants that hold less
        than an equal part of it, up to twice its bounds. Raises CapacityExceeded if the tenant may never run as many
        sequences at once.
        """
        account, limits = self._accounts.of(request.tenant), self._limits
        terms, own = account.terms, self.of(account)
        if terms.max_num_seqs is not None and request.num_slots > terms.max_num_seqs:
            raise CapacityExceeded(f"{request.num_slots} sequences in one request, you may run {terms.max_num_seqs}")
        num_parts = len({*self._queues, account})
        every, own_paused = self.paused, [each for each in self.paused if each.account is account]
        try:
            _check_takes(self, every, request, limits.max_waiting_requests, limits.max_waiting_prompt_tokens, "")
        except QueueFull:
            if num_parts == 1:
                raise
            twice = (2 * limits.max_waiting_requests, 2 * limits.max_waiting_prompt_tokens)
            _check_takes(self, every, request, *twice, "")
            part = (limits.max_waiting_requests // num_parts, limits.max_waiting_prompt_tokens // num_parts)
            _check_takes(own, own_paused, request, *part, " of yours")
        most_requests, most_tokens = terms.max_waiting_requests, terms.max_waiting_prompt_tokens
        _check_takes(own, own_paused, request, most_requests, most_tokens, " of yours", TenantLimitReached)

    def _enter(self, account: Account) -> None:
        """Adds an entry that replaces the tenant's older one, and removes replaced entries if most are."""
        self._num_entries += 1
        self._entries[account] = self._num_entries
        heappush(self._heap, (_place(next(iter(self._queues[account]))), self._num_entries, account))
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [entry for entry in self._heap if self._entries.get(entry[2]) == entry[1]]
            heapify(self._heap)

    def _lift(self, account: Account) -> None:
        priority = account.terms.priority
        waiting = [other.level for other in self._queues if other.terms.priority == priority]
        account.raise_to(min(waiting) if waiting else self._accounts.highest_level(priority))

    def _lift_passed_over(self, accounts: list[Account], best: Sequence | None) -> None:
        """Lifts tenants at a cap or without a head. All that wait of a priority above that of `best` are among them."""
        for priority in {account.terms.priority for account in accounts}:
            peers = [account for account in accounts if account.terms.priority == priority]
            if best is not None and best.account.terms.priority == priority:
                level = best.account.level
            else:
                level = max(account.level for account in peers)
            for account in peers:
                account.raise_to(level)

    def may_enter(self, head: Sequence) -> bool:
        """Returns whether the caps of its tenant let a sequence into the batch.

        A sequence that can only be admitted with all its blocks promised waits while such sequences hold the tenant's
        share of the slots or of the pool, because no other sequence can take these back.
        """
        account, batch = head.account, self._holdings()[0]
        if account.terms.max_num_seqs is not None:
            own = [sequence.request.request_id for sequence in batch.running if sequence.account is account]
            num_held = len(own) + sum(len(self._requests[request_id].child_slots) for request_id in set(own))
            if num_held + self._num_slots(head) > account.terms.max_num_seqs:
                return False
        if head.num_preemptions < self._limits.max_preemptions or len(self._accounts.active) == 1:
            return True
        return not self._guaranteed_hold_share(account)

    def _num_slots(self, waiting: Sequence) -> int:
        """Returns the slots that a sequence takes: its own, and those of samples or beams that do not exist yet."""
        return 1 + self._requests[waiting.request.request_id].num_unborn

    def _guaranteed_hold_share(self, account: Account) -> bool:
        batch, cache = self._holdings()
        guaranteed = [s for s in batch.running if s.is_guaranteed and s.account is account]
        if not guaranteed:
            return False
        num_blocks = sum(len(sequence.block_table) for sequence in guaranteed)
        num_blocks += sum(leader.num_reserved_blocks for leader in {sequence.leader for sequence in guaranteed})
        share = self._accounts.share(account)
        too_many_slots = len(guaranteed) >= share * self._limits.max_num_seqs
        return too_many_slots or num_blocks >= share * cache.pool.num_usable_blocks


def _place(head: Sequence) -> tuple[int, float, bool, int]:
    account, level = head.account, head.account.level
    return (account.terms.priority, level, level > account.entry_level, head.arrival)


def _check_takes(
    queue: "FairQueue | WaitingQueue",
    paused: Collection[Sequence],
    request: Request,
    most_requests: int | None,
    most_tokens: int | None,
    whose: str,
    error: type[QueueFull] = QueueFull,
) -> None:
    num_requests = len(queue) + len(paused)
    if most_requests is not None and num_requests >= most_requests:
        raise error(f"{num_requests} requests{whose} are waiting")
    num_tokens = queue.num_prompt_tokens + sum(each.num_given_tokens for each in paused)
    if most_tokens is not None and num_requests and num_tokens + request.num_given_tokens > most_tokens:
        raise error(f"{num_tokens} prompt tokens{whose} are waiting")
