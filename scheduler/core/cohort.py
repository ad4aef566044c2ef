"""Who may come into the batch: anybody, or the members of a closed one."""

from collections.abc import Mapping
from math import inf

from scheduler.core.active_request import ActiveRequest
from scheduler.core.batching import Batching
from scheduler.core.policy import Policy
from scheduler.core.sequence import Sequence, State
from scheduler.core.waiting_queue import WaitingQueue


class Cohort:
    """The one question the planner asks of a batching mode: who is next?

    waiting   1  2  3 │ 4  5             requests 1, 2 and 3 fill a batch of max_num_seqs: they become members
    members   1  2  3 │                  admitted while budget and blocks last, here 1 and 2 at first, then 3;
                                         again if they were preempted, or lost their executor
    waiting   4  5  6 …                  until each of them has ended, nobody else is next
    """

    def __init__(
        self,
        batching: Batching,
        policy: Policy,
        waiting: WaitingQueue,
        unfinished: Mapping[int, ActiveRequest],
        max_num_seqs: int,
    ) -> None:
        self.now_s = -inf  # the latest time that the core was told
        self._batching = batching
        self._order = policy.order
        self._waiting = waiting
        self._unfinished = unfinished
        self._max_num_seqs = max_num_seqs
        self._members: list[int] = []

    def next_up(self) -> Sequence | None:
        """The next to be admitted. None: nobody, now."""
        if not self._batching.is_closed:
            return self._waiting.first()
        if not self.members() and self._is_due():
            self._members = [active.request.request_id for active in self._head()[0]]
        waiting = (s for active in self.members() for s in active.sequences if s.state in _WAITING)
        return min(waiting, key=self._order, default=None)

    def members(self) -> list[ActiveRequest]:
        """Of the closed batch that runs, those that have not ended."""
        return [self._unfinished[request_id] for request_id in self._members if request_id in self._unfinished]

    @property
    def due_s(self) -> float | None:
        """When a batch will be formed, though nothing else happens. None: it waits for other things than the clock."""
        if not self._batching.timeout_s or self.members():
            return None
        head, _ = self._head()
        due_s = self._due_s(head)
        return due_s if head and due_s > self.now_s else None

    def _is_due(self) -> bool:
        head, is_full = self._head()
        return is_full or (bool(head) and self._due_s(head) <= self.now_s)

    def _due_s(self, head: list[ActiveRequest]) -> float:
        return min((active.arrival_s for active in head), default=inf) + self._batching.timeout_s

    def _head(self) -> tuple[list[ActiveRequest], bool]:
        """The requests from the head of the queue that there are slots for all together; and whether that is a full
        batch: no slot is left, or too few for the next one. Nobody has run yet: each of them waits as one sequence."""
        head: list[ActiveRequest] = []
        num_slots = 0
        for sequence in self._waiting:
            active = self._unfinished[sequence.request.request_id]
            num_slots += 1 + active.num_unborn
            if num_slots > self._max_num_seqs:
                break
            head.append(active)
        return head, num_slots >= self._max_num_seqs


_WAITING = (State.WAITING, State.PREEMPTED)
