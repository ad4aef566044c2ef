"""A simulated replica: a virtual server that lives, dies and comes back, and its reports."""

from gateway.routing.load import ReplicaLoad
from planning.cost import CostModel
from planning.fleet.observed_index import ObservedIndex, short_digest
from planning.fleet.report import Report
from planning.server import Server
from planning.virtual_server import Observer, VirtualServer
from scheduler.core import Counters, Request
from scheduler.core.inspect.core_load import core_load


class Replica:
    """One replica. A new incarnation starts with an empty cache and counts its events and requests from 1 again.

    server        None while the replica is dead
    num_requests  requests that it has received in all its incarnations
    busy_s        time in which its executor computed
    """

    def __init__(self, name: str, server: Server, cost: CostModel, num_routers: int, *, has_shared_prefixes: bool):
        self.name = name
        self.incarnation = 0
        self.server: VirtualServer | None = None
        self.num_requests = 0
        self.busy_s = 0.0
        self._parameters = server
        self._cost = cost
        self._num_routers = num_routers
        self._has_shared_prefixes = has_shared_prefixes
        self._ended: list[Counters] = []

    @property
    def counters(self) -> list[Counters]:
        """The totals of the core in each incarnation."""
        return [*self._ended, *([self.server.scheduler.state.counters] if self.server else [])]

    def start(self, now_s: float, observer: Observer) -> None:
        self.incarnation += 1
        self.server = VirtualServer(
            self._parameters, self._cost, observer, has_shared_prefixes=self._has_shared_prefixes
        )
        self.server.now_s = now_s
        cache = self.server.scheduler.state.cache
        self._index = cache.index = ObservedIndex(cache.block_size)
        self._next_number = 1
        self._num_received = [0] * self._num_routers

    def die(self) -> None:
        if self.server is not None:
            self._ended.append(self.server.scheduler.state.counters)
            self.server = None

    def add(self, request: Request, router: int, now_s: float) -> None:
        """Receives a request from a router. Raises CapacityExceeded and QueueFull."""
        assert self.server is not None
        self._num_received[router] += 1
        self.num_requests += 1
        self.server.add(request, now_s)

    def report(self) -> Report:
        """Returns what has changed since the last report."""
        published, forgotten = self._index.take_changes()
        first_number = self._next_number
        self._next_number += len(published) + len(forgotten)
        return self._report(first_number, published, forgotten)

    def snapshot(self) -> Report:
        """Returns all digests, as they were at the last report. Call `report` first, and send it to all routers."""
        digests = [short_digest(digest) for digest, _ in self._index.items()]
        return self._report(self._next_number, digests, [], is_snapshot=True)

    def load(self) -> ReplicaLoad:
        assert self.server is not None
        load = core_load(self.server.scheduler)
        return ReplicaLoad(
            load.num_running,
            load.num_waiting,
            load.num_queued_tokens,
            load.prefill_s_per_token,
            load.decode_step_s,
        )

    def _report(
        self, first_number: int, published: list[int], forgotten: list[int], *, is_snapshot: bool = False
    ) -> Report:
        received = tuple(self._num_received)
        return Report(
            self.name, self.incarnation, self.load(), received, first_number, published, forgotten, is_snapshot
        )
