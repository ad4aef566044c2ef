"""Compares what a fleet should be with what it is, and says what to do. Pure: no I/O, no clock, no state.

A rule looks only at the present. An action that fails, or a controller that dies half-way, is therefore made good by
the next comparison.

    serving replica     its scheduler and its executor run; each is started anew when it has ended, after a pause
    draining replica    gateways forget its scheduler → the scheduler gives up its streams, and ends → the executor is
                        killed. What is left at the deadline is killed
    the whole, down     gateways drain → schedulers drain → executors are killed
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from fleet.parts import Part, PartStatus, Role, State
from fleet.wanted import Wanted


@dataclass(frozen=True, slots=True)
class Start:
    """Starts an incarnation of a part, which knows these peers from the beginning."""

    part: Part
    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Address:
    """Tells a part the addresses of its peers: a gateway its schedulers, a scheduler its executor."""

    part: Part
    incarnation: str
    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """Makes a part refuse new requests and end when it has none.

    moves_streams  a scheduler breaks its streams off, so that gateways continue them elsewhere
    """

    part: Part
    incarnation: str
    moves_streams: bool


@dataclass(frozen=True, slots=True)
class Kill:
    """Ends all processes of an incarnation at once."""

    part: Part
    incarnation: str


Action = Start | Address | Drain | Kill


def reconcile(
    wanted: Wanted,
    observed: Sequence[PartStatus],
    now_s: float,
    not_before_s: Callable[[Part], float] = lambda part: 0.0,
) -> list[Action]:
    """Returns the next actions. They may be carried out in any order.

    observed      every incarnation that is not known to have ended; those that have ended are ignored
    not_before_s  time before which a part should not be started
    """
    fleet = _Fleet(wanted, observed)
    actions: list[Action] = list(fleet.kills())
    if wanted.down_by_s is not None:
        return [*actions, *fleet.steps_down(now_s, wanted.down_by_s)]
    actions += fleet.drains(now_s)
    for part in fleet.wanted_parts():
        peers = fleet.peers_of(part)
        current = fleet.current(part)
        if current is not None:
            if peers and peers != current.peers and current.state is not State.HUNG:
                actions.append(Address(part, current.incarnation, peers))
        elif now_s >= not_before_s(part) and (peers or part.role is not Role.GATEWAY):
            actions.append(Start(part, peers))
    return actions


def ended_replicas(wanted: Wanted, observed: Iterable[PartStatus]) -> set[int]:
    """Returns the draining replicas of which nothing is left."""
    left = {each.part.index for each in observed if each.part.role is not Role.GATEWAY and each.state.occupies}
    return set(wanted.draining) - left


class _Fleet:
    """Indexes the observed incarnations by part. The youngest of a part that may run is the current one."""

    def __init__(self, wanted: Wanted, observed: Sequence[PartStatus]) -> None:
        self._wanted = wanted
        self._lost = [each for each in observed if each.state is State.LOST]
        self._running: dict[Part, list[PartStatus]] = defaultdict(list)
        for each in sorted(observed, key=lambda status: (status.started_s, status.incarnation)):
            if each.state.occupies:
                self._running[each.part].append(each)

    def wanted_parts(self) -> list[Part]:
        """Returns the parts that should run. Executors come first, because they take longest to start."""
        replicas = sorted(self._wanted.serving)
        return [
            *(Part(Role.EXECUTOR, index) for index in replicas),
            *(Part(Role.SCHEDULER, index) for index in replicas),
            *(Part(Role.GATEWAY, index) for index in range(self._wanted.gateways)),
        ]

    def current(self, part: Part) -> PartStatus | None:
        running = self._running.get(part)
        return running[-1] if running else None

    def peers_of(self, part: Part) -> tuple[str, ...]:
        """Returns the addresses that a part should know."""
        match part.role:
            case Role.EXECUTOR:
                return ()
            case Role.SCHEDULER:
                executor = self.current(Part(Role.EXECUTOR, part.index))
                return () if executor is None or not executor.address else (executor.address,)
            case Role.GATEWAY:
                schedulers = (self.current(Part(Role.SCHEDULER, index)) for index in sorted(self._wanted.serving))
                return tuple(each.address for each in schedulers if each is not None and each.address)

    def kills(self) -> Iterator[Kill]:
        """Yields what must not run: hung and lost incarnations, older ones, and parts that are not wanted."""
        known = {*self.wanted_parts(), *self._draining_parts()}
        if self._wanted.down_by_s is not None:  # steps_down ends the others in order
            known |= self._running.keys()
        for each in self._lost:
            yield Kill(each.part, each.incarnation)
        for part, running in self._running.items():
            for each in running:
                if each is not running[-1] or each.state is State.HUNG or part not in known:
                    yield Kill(part, each.incarnation)

    def drains(self, now_s: float) -> Iterator[Action]:
        """Yields the next step of each replica that drains."""
        told = {address for gateway in self._gateways() for address in gateway.peers}
        others = (self.current(Part(Role.SCHEDULER, index)) for index in self._wanted.serving)
        has_other = any(each is not None and each.state is State.READY for each in others)
        for index, by_s in self._wanted.draining.items():
            scheduler = self.current(Part(Role.SCHEDULER, index))
            executor = self.current(Part(Role.EXECUTOR, index))
            if scheduler is None:
                if executor is not None:
                    yield Kill(executor.part, executor.incarnation)
            elif now_s >= by_s:
                yield Kill(scheduler.part, scheduler.incarnation)
            elif not scheduler.is_draining and has_other and scheduler.address not in told:
                yield Drain(scheduler.part, scheduler.incarnation, moves_streams=True)

    def steps_down(self, now_s: float, by_s: float) -> Iterator[Action]:
        """Yields the next step of a fleet that ends: each role waits until the one before it is gone."""
        for role in (Role.GATEWAY, Role.SCHEDULER, Role.EXECUTOR):
            running = [each[-1] for part, each in sorted(self._running.items()) if part.role is role and each]
            for each in running:
                if now_s >= by_s or role is Role.EXECUTOR:
                    yield Kill(each.part, each.incarnation)
                elif not each.is_draining:
                    yield Drain(each.part, each.incarnation, moves_streams=False)
            if running:
                return

    def _gateways(self) -> Iterator[PartStatus]:
        for part, running in self._running.items():
            if part.role is Role.GATEWAY:
                yield from running

    def _draining_parts(self) -> set[Part]:
        return {Part(role, index) for index in self._wanted.draining for role in (Role.EXECUTOR, Role.SCHEDULER)}
