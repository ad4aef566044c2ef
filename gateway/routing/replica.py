"""The knowledge that one router has of one replica."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.routing.load import ReplicaLoad
from gateway.routing.prefix_view import PrefixView

NUM_DECODE_STEPS = 20
"""The burden of decodes is the time by which they prolong so many steps. With less, the times of tokens spread more and
throughput falls; times to the first token are the same (simulated, 1 to 20 steps)."""


@dataclass(slots=True)
class _Sent:
    """A request of this router that has not ended.

    num_tokens   its uncached prompt tokens; 0 when its first token has come
    digests      what it adds to the replica's prefixes
    """

    num_tokens: int
    digests: Sequence[int]


class ReplicaState:
    """The last report of a replica, and this router's requests that the report does not contain yet.

        sent           1   2   3   4   5          count() returns these numbers, in the order in which requests are sent
        report         ├── num_received 3 ──┤     contains the first three; 4 and 5 are added to what it says

    So every request counts once: first as an own one, later as a part of the reports.

    num_requests  requests that run and wait
    backlog_s     seconds until a request that comes now would be the next; the burden of decodes included
    """

    __slots__ = ("_num_sent", "_num_sent_before", "_own", "_unreported", "backlog_s", "bit", "load", "name",
                 "num_requests", "view")  # fmt: skip

    def __init__(self, name: str, bit: int, view: PrefixView) -> None:
        self.name = name
        self.bit = bit
        self.view = view
        self._num_sent = 0
        self.reset()

    def reset(self) -> None:
        """Forgets everything, because the connection is lost: the replica counts from 1 again."""
        self.view.clear()
        self.load = ReplicaLoad()
        self._own: dict[int, _Sent] = {}
        self._unreported: dict[int, _Sent] = {}  # a part of `_own`, in ascending order
        self._num_sent_before = self._num_sent
        self._update()

    def lose_reports(self) -> None:
        """Forgets what was reported. The requests of this router count until they end."""
        self.view.clear()
        self.load = ReplicaLoad()
        for sent in self._own.values():
            sent.digests = ()  # the view does not expect them any more
        self._unreported = dict(self._own)
        self._update()

    def count(self, num_uncached_tokens: int, digests: Sequence[int] = ()) -> int:
        """Counts a request that is sent to the replica; returns its number, which is never used again.

        `digests` are those of its prompt: until the request ends, the replica counts as their holder.
        """
        self._num_sent += 1
        sent = _Sent(num_uncached_tokens, digests[self.view.num_held(digests) :])
        self._own[self._num_sent] = self._unreported[self._num_sent] = sent
        self.view.expect(sent.digests)
        self._update()
        return self._num_sent

    def first_token(self, number: int) -> None:
        """Called when the first token of a request has come: its prompt is not queued any more."""
        if number in self._unreported:
            self._unreported[number].num_tokens = 0
            self._update()

    def take_back(self, number: int) -> None:
        """Takes back a request that has ended or was refused. It is no error if it is not known any more."""
        sent = self._own.pop(number, None)
        if sent is not None:
            self.view.unexpect(sent.digests)
            self._unreported.pop(number, None)
            self._update()

    def not_sent(self, number: int) -> None:
        """Takes back the last request, which was counted and not sent: the replica will not count it."""
        self.take_back(number)
        self._num_sent -= 1

    def report(self, load: ReplicaLoad, num_received: int) -> None:
        """Replaces the load by a report, which contains the first `num_received` requests since `reset`."""
        self.load = load
        unreported = self._unreported
        while unreported and (number := next(iter(unreported))) <= self._num_sent_before + num_received:
            del unreported[number]
        self._update()

    def first_token_s(self, num_uncached_tokens: int) -> float:
        """Returns the seconds that a request would take until its first token."""
        return self.backlog_s + self.load.prefill_s_per_token * num_uncached_tokens

    def _update(self) -> None:
        load = self.load
        self.num_requests = load.num_running + load.num_waiting + len(self._unreported)
        queued_tokens = load.queued_tokens + sum(sent.num_tokens for sent in self._unreported.values())
        decodes_s = NUM_DECODE_STEPS * load.decode_step_s * self.num_requests
        self.backlog_s = load.prefill_s_per_token * queued_tokens + decodes_s
