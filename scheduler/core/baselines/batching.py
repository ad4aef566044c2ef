"""Batching modes to compare with continuous batching: a batch is formed, and runs until its last request has ended.

static       takes all waiting requests when the last batch has ended   like a loop over `generate`
dynamic      the same, but waits for a batch to fill up                 like model servers before Orca
"""

from math import inf

from scheduler.core.active_request import ActiveRequest
from scheduler.core.modes import CONTINUOUS, Batching
from scheduler.core.sequence import Sequence, State
from scheduler.core.state import SchedulerState


class ClosedBatch:
    """An `AdmissionQueue` of one batch with fixed members.

    waiting   1  2  3 │ 4  5             requests 1, 2 and 3 fill a batch of max_num_seqs and become its members
    members   1  2  3 │                  admitted while budget and blocks last, here 1 and 2 at first, then 3;
                                         again if they were preempted, or lost their executor;
                                         none while its tenant is at a cap of its own
    waiting   4  5  6 …                  wait until each member has ended

    A batch is formed when it is full, or when the first of its requests to arrive has waited for `timeout_s`.
    """

    def __init__(self, timeout_s: float, state: SchedulerState) -> None:
        self._state = state
        self.timeout_s = timeout_s
        self._members: list[int] = []

    def first(self) -> Sequence | None:
        if not self.members() and self._is_due():
            self._members = [active.request.request_id for active in self._head()[0]]
        order = self._state.policy.order
        waiting = (s for active in self.members() for s in active.sequences if s.state in _WAITING)
        in_order = sorted((s for s in waiting if not s.is_set_aside), key=order)
        heads = {sequence.account: sequence for sequence in reversed(in_order)}
        return min(filter(self._state.waiting.may_enter, heads.values()), key=order, default=None)

    def members(self) -> list[ActiveRequest]:
        """Returns the members of the batch that have not ended."""
        unfinished = self._state.requests
        return [unfinished[request_id] for request_id in self._members if request_id in unfinished]

    @property
    def due_s(self) -> float | None:
        """The time at which a batch is formed even if no request arrives; None if the clock alone forms none."""
        if not self.timeout_s or self.members():
            return None
        head, _ = self._head()
        due_s = self._due_s(head) if head else -inf
        return due_s if due_s > self._state.now_s else None

    def _is_due(self) -> bool:
        head, is_full = self._head()
        return is_full or (bool(head) and self._due_s(head) <= self._state.now_s)

    def _due_s(self, head: list[ActiveRequest]) -> float:
        return min(active.arrival_s for active in head) + self.timeout_s

    def _head(self) -> tuple[list[ActiveRequest], bool]:
        """Returns the requests at the head of the queue that have slots together, and whether they are a full batch.

        A batch is full if too few slots are left for the next request. None of these requests has run yet.
        """
        head: list[ActiveRequest] = []
        num_slots, max_num_seqs = 0, self._state.limits.max_num_seqs
        for request_id in dict.fromkeys(sequence.request.request_id for sequence in self._state.waiting):
            active = self._state.requests[request_id]
            num_slots += active.request.num_slots
            if num_slots > max_num_seqs:
                break
            head.append(active)
        return head, num_slots >= max_num_seqs


_WAITING = (State.WAITING, State.PREEMPTED)


def batch_members(state: SchedulerState) -> list[int]:
    """Returns the ids of the unfinished members of the closed batch; none under continuous batching."""
    queue = state.admission_queue
    return [active.request.request_id for active in queue.members()] if isinstance(queue, ClosedBatch) else []


STATIC = Batching("static", ClosedBatch)
DYNAMIC = Batching("dynamic", ClosedBatch, timeout_s=0.05)

BATCHING = {batching.name: batching for batching in (CONTINUOUS, STATIC, DYNAMIC)}
