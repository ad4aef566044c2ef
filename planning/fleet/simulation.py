"""Simulates a fleet: replicas, routers and the way between them on one virtual clock.

The clock has four kinds of events, which happen in this order if their times are equal: a report arrives at a router, a
replica is done with a step or makes a plan, a replica dies or comes back, a request arrives. Requests and tokens travel
in no time. If a replica dies, its clients notice at once and resume their streams, as the product's do.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from math import inf

from gateway.routing.choice import Choice, make_choice
from gateway.routing.replica import ReplicaState
from gateway.routing.replicas import Replicas
from planning.cost import CostModel
from planning.fleet.fleet import ORACLE, Fleet
from planning.fleet.network import Network
from planning.fleet.oracle import Oracle
from planning.fleet.prompts import PromptDigests
from planning.fleet.records import FleetRecords, RoutedRequest
from planning.fleet.replica import Replica
from planning.fleet.router import Router
from planning.request_factory import RequestFactory
from planning.server import Server
from planning.simulation import PROGRESS_INTERVAL, REFUSAL_S, Horizon
from planning.virtual_server import VirtualServer
from planning.workload import Job, JobSource
from scheduler.core import CapacityExceeded, Events, QueueFull
from scheduler.core.inspect.step_load import StepLoad

_REPORT_INTERVAL_S = 1.0
"""Time after which a replica reports even if nothing has changed, so that a lost report is noticed."""


class _ReplicaObserver:
    """Passes on what the server of one replica has done."""

    def __init__(self, simulation: "FleetSimulation", replica: Replica) -> None:
        self._simulation = simulation
        self._replica = replica

    def stepped(self, now_s: float, started_s: float, load: StepLoad) -> None:
        self._replica.busy_s += now_s - started_s

    def leapt(
        self, now_s: float, started_s: float, num_steps: int, num_decodes: int, num_free_blocks_before: int
    ) -> None:
        self._replica.busy_s += now_s - started_s

    def committed(self, now_s: float, planned_s: float, events: Events, *, has_first_tokens: bool) -> None:
        self._simulation.committed(now_s, planned_s, events, has_first_tokens=has_first_tokens)


class FleetSimulation:
    """One run of a simulated fleet; `records` holds the result.

    is_closed_loop  a request may arrive because another one has ended
    """

    def __init__(
        self,
        fleet: Fleet,
        server: Server,
        sources: Sequence[JobSource],
        cost: CostModel,
        horizon: Horizon,
        *,
        has_shared_prefixes: bool = False,
        is_closed_loop: bool = True,
        seed: int = 7,
    ) -> None:
        names = [f"replica-{i}" for i in range(fleet.num_replicas)]
        self.records = FleetRecords()
        self.now_s = 0.0
        self._fleet = fleet
        self._sources = sources
        self._horizon = horizon
        self._is_closed_loop = is_closed_loop
        self._rng = random.Random(f"{seed} routers")
        self._replicas = {
            name: Replica(name, server, cost, fleet.num_routers, has_shared_prefixes=has_shared_prefixes)
            for name in names
        }
        is_oracle = fleet.routing == ORACLE
        loss = 0.0 if is_oracle else fleet.event_loss
        self._network = Network(0.0 if is_oracle else fleet.event_delay_s, loss, random.Random(f"{seed} network"))
        self._routers = [self._router(i, seed) for i in range(fleet.num_routers)]
        self._requests = RequestFactory(server)
        self._prompts = PromptDigests(server.block_size, has_digests=has_shared_prefixes)
        self._num_jobs = 0
        self._num_requests = 0
        self._num_arriving = 0
        self._world: list[tuple[float, int, Callable[[], None]]] = []  # arrivals, deaths, starts
        self._num_world_events = 0
        self._due: list[tuple[float, str, int]] = []  # next events of replicas; only the newest of each counts
        self._versions = dict.fromkeys(names, 0)
        self._homeless: list[RoutedRequest] = []  # requests that arrived while no replica was ready

    def run(self, progress: Callable[[float, int], None] | None = None) -> FleetRecords:
        """Runs to the end; calls `progress` with the virtual time and the number of ended requests once in a while."""
        for replica in self._replicas.values():
            self._start(replica)
        for number, time_s in self._fleet.failures.given:
            self._at(time_s, partial(self._kill, self._replicas[f"replica-{number}"]))
        for source in self._sources:
            self._expect(source.first())
        num_events = 0
        while self._num_arriving or self.records.open:
            self._advance()
            num_events += 1
            if progress is not None and num_events % PROGRESS_INTERVAL == 0:
                progress(self.now_s, self.records.num_ended)
        self._close()
        return self.records

    def _advance(self) -> None:
        while self._due and self._versions[self._due[0][1]] != self._due[0][2]:
            heappop(self._due)
        due_s = self._due[0][0] if self._due else inf
        world_s = self._world[0][0] if self._world else inf
        report_s = self._network.next_s
        if min(due_s, world_s) == inf:
            raise RuntimeError(f"no core makes a plan, but {len(self.records.open)} requests are open")
        if report_s <= min(due_s, world_s):
            self.now_s = report_s
            self._network.deliver()
        elif due_s <= world_s:
            self.now_s = due_s
            self._run(self._replicas[heappop(self._due)[1]])
        else:
            self.now_s, _, action = heappop(self._world)
            action()

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        if time_s < inf:
            self._num_world_events += 1
            heappush(self._world, (time_s, self._num_world_events, action))

    # --- replicas ---------------------------------------------------------------------------------------------

    def _run(self, replica: Replica) -> None:
        """Lets a replica do everything that is due."""
        server = replica.server
        assert server is not None
        while server.advance(self.now_s, self._leap_until_s):
            pass
        waiting = server.scheduler.num_waiting
        self.records.max_waiting = max(self.records.max_waiting, waiting)
        self._schedule(replica)
        self._report(replica)

    def _leap_until_s(self) -> float:
        """Returns the time until which no request arrives anywhere."""
        world_s = self._world[0][0] if self._world else inf
        return min(world_s, self._due[0][0] if self._due else inf) if self._is_closed_loop else world_s

    def _schedule(self, replica: Replica) -> None:
        assert replica.server is not None
        self._versions[replica.name] += 1
        if (next_s := replica.server.next_s) < inf:
            heappush(self._due, (next_s, replica.name, self._versions[replica.name]))

    def _start(self, replica: Replica) -> None:
        replica.start(self.now_s, _ReplicaObserver(self, replica))
        for router in self._routers:
            router.connected(replica.name, replica.incarnation)
        self._report(replica)
        self._at(self.now_s + self._fleet.failures.time_to_next_s(), partial(self._kill, replica, replica.incarnation))
        if self._network.loses:
            self._report_later(replica, replica.incarnation)
        homeless, self._homeless = self._homeless, []
        for request in homeless:
            self._send(request)

    def _kill(self, replica: Replica, incarnation: int | None = None) -> None:
        """Ends this or the current incarnation of a replica. Its streams resume elsewhere with what they received."""
        if replica.server is None or incarnation not in (None, replica.incarnation):
            return
        self.records.num_deaths += 1
        requests = replica.server.scheduler.state.requests
        orphans = [(self.records.open[request_id], active.sequences[0]) for request_id, active in requests.items()]
        replica.die()
        self._versions[replica.name] += 1
        for router in self._routers:
            router.disconnected(replica.name)
        self._at(self.now_s + self._fleet.failures.repair_s, partial(self._start, replica))
        for request, sequence in orphans:
            self.records.num_resumptions += 1
            request.num_received = sequence.num_tokens - sequence.num_prompt_tokens
            request.num_preemptions += sequence.num_preemptions
            self._send(request)

    # --- reports ----------------------------------------------------------------------------------------------

    def _router(self, number: int, seed: int) -> Router:
        if self._fleet.routing == ORACLE:
            choice: Choice = Oracle(lambda: self.now_s, self._server_of)
        else:
            choice = make_choice(self._fleet.routing, random.Random(f"{seed} router {number}"))
        return Router(number, self._replicas, choice, Replicas(), partial(self._ask, number))

    def _server_of(self, name: str) -> VirtualServer:
        server = self._replicas[name].server
        assert server is not None
        return server

    def _report(self, replica: Replica) -> None:
        assert replica.server is not None
        sent_s = max(self.now_s, replica.server.now_s)  # a leap may have taken the replica ahead of the clock
        self._network.broadcast(replica.report(), self._routers, sent_s)

    def _report_later(self, replica: Replica, incarnation: int) -> None:
        def report(_: float) -> None:
            if replica.incarnation == incarnation and replica.server is not None:
                self._report(replica)
                self._report_later(replica, incarnation)

        self._network.at(self.now_s + _REPORT_INTERVAL_S, report)

    def _ask(self, router: int, name: str) -> None:
        """Asks a replica for a snapshot, which arrives after a round trip."""
        self._network.after_delay(self.now_s, lambda now_s: self._answer(router, name, now_s))

    def _answer(self, router: int, name: str, now_s: float) -> None:
        replica = self._replicas[name]
        if replica.server is not None:
            self._report(replica)
            self._network.send(replica.snapshot(), self._routers[router], now_s)

    # --- requests ---------------------------------------------------------------------------------------------

    def _expect(self, jobs: list[Job]) -> None:
        for job in self._horizon.before(jobs, self._num_jobs):
            self._num_jobs += 1
            self._num_arriving += 1
            self._at(job.arrival_s, partial(self._arrive, job))

    def _arrive(self, job: Job) -> None:
        self._num_arriving -= 1
        self._num_requests += 1
        prompt = self._prompts.prompt_of(self._requests.make(self._num_requests, job), job)
        router = self._rng.randrange(len(self._routers))
        request = self.records.open[self._num_requests] = RoutedRequest(
            job, request_id=self._num_requests, router=router, prompt=prompt
        )
        self._send(request)
        self._expect(self._sources[job.tenant].after_arrival())

    def _send(self, request: RoutedRequest) -> None:
        chosen = self._routers[request.router].send(request.prompt)
        if chosen is None:
            self._homeless.append(request)
            return
        name, request.number = chosen
        request.replica = name
        replica = self._replicas[name]
        try:
            made = self._requests.make(request.request_id, request.job, request.num_received)
            replica.add(made, request.router, self.now_s)
        except (CapacityExceeded, QueueFull):
            self.records.num_refused += 1
            self._state_of(request).take_back(request.number)
            del self.records.open[request.request_id]
            self._expect(self._sources[request.job.tenant].after_end(self.now_s + REFUSAL_S))
        self._schedule(replica)
        self._report(replica)

    def committed(self, now_s: float, planned_s: float, events: Events, *, has_first_tokens: bool) -> None:
        """Called when a replica has committed a step."""
        records = self.records
        began, ended = records.requests.committed(
            records.open, now_s, planned_s, events, has_first_tokens=has_first_tokens
        )
        for request in began:
            self._state_of(request).first_token(request.number)
        for request in ended:
            self._state_of(request).take_back(request.number)
            self._expect(self._sources[request.job.tenant].after_end(now_s))

    def _state_of(self, request: RoutedRequest) -> ReplicaState:
        """Returns what the request's router knows of its replica."""
        return self._routers[request.router].replicas[request.replica]

    def _close(self) -> None:
        records = self.records
        counters = [each for replica in self._replicas.values() for each in replica.counters]
        records.virtual_s = max([self.now_s, *records.requests.end_s])
        records.num_gaps = sum(router.num_gaps for router in self._routers)
        records.num_lost = self._network.num_lost
        records.num_hit_tokens = sum(each.num_prefix_hit_tokens for each in counters)
        records.num_queried_tokens = sum(each.num_prefix_queried_tokens for each in counters)
        records.num_steps = sum(each.num_steps for each in counters)
        records.num_preemptions = sum(each.num_preemptions for each in counters)
        records.replica_requests = [replica.num_requests for replica in self._replicas.values()]
        records.replica_busy_s = [replica.busy_s for replica in self._replicas.values()]
