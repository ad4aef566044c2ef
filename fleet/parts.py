"""The parts of a fleet, and what is known of them."""

from dataclasses import dataclass, field
from enum import StrEnum


class Role(StrEnum):
    """The service that a part runs. One executor is a gang: all its ranks start and end together."""

    EXECUTOR = "executor"
    SCHEDULER = "scheduler"
    GATEWAY = "gateway"


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """A place for one process and its children. The executor and the scheduler of one index are a replica."""

    role: Role
    index: int

    @classmethod
    def parse(cls, name: str) -> "Part":
        """Parses "scheduler-3". Raises ValueError."""
        role, _, index = name.rpartition("-")
        return cls(Role(role), int(index))

    def __str__(self) -> str:
        return f"{self.role}-{self.index}"


class State(StrEnum):
    """The state of one incarnation of a part.

    STARTING  it loads, or waits for a machine
    READY     it has said that it serves
    HUNG      it was ready, and has not answered for a long time
    LOST      its machine is gone. It may still run there, but fences itself
    ENDED     no process of it is left
    """

    STARTING = "starting"
    READY = "ready"
    HUNG = "hung"
    LOST = "lost"
    ENDED = "ended"

    @property
    def occupies(self) -> bool:
        """True if its place, the devices and addresses of one machine, cannot be given away."""
        return self in (State.STARTING, State.READY, State.HUNG)


@dataclass(frozen=True, slots=True)
class Load:
    """The queue of one scheduler, and whether it can serve it.

    queued_tokens    prompt tokens in its queue
    oldest_s         seconds that the oldest sequence there has waited
    computed_tokens  prompt tokens that its executors have computed since it started
    num_requests     that wait or run
    has_executor     False: its executor is away, and requests wait
    """

    queued_tokens: int
    oldest_s: float
    computed_tokens: int
    num_requests: int
    has_executor: bool = True


@dataclass(frozen=True, slots=True)
class PartStatus:
    """One incarnation of a part, as a backend has found it.

    incarnation  tells processes of one part apart
    started_s    on the clock of the machine where it runs (time.time), which can be set
    address      at which its clients reach it: an executor's for its scheduler, a scheduler's for gateways; empty: not
                 known yet
    http         host:port for its probes and metrics
    peers        the addresses that it was told last
    is_draining  it was told to drain
    exit_code    of an incarnation that has ended, if it is known
    machine      name of the machine, for people
    """

    part: Part
    incarnation: str
    state: State
    started_s: float
    address: str = ""
    http: str = ""
    peers: tuple[str, ...] = ()
    is_draining: bool = False
    exit_code: int | None = None
    pid: int | None = None
    machine: str = ""
    load: Load | None = field(default=None, compare=False)
