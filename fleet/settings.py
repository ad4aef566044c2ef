"""The settings of one fleet: what `quire fleet up` was given."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from fleet.parts import Role
from fleet.wanted import MAX_REPLICAS

BACKENDS = ("local", "ray")
DEFAULT_NAME = "quire"
_NAME = re.compile(r"[a-z0-9-]{1,40}")


def check_name(name: str) -> None:
    """Raises ValueError for a name that no fleet has: it is part of the names of files and actors."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"name must have at most 40 lower-case letters, digits and dashes, not {name!r}")


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Says how every part of a fleet is started.

    name                  name of the fleet, which tells fleets of one machine or one cluster apart
    backend               "local": processes on this machine; "ray": actors of a Ray cluster hold them
    model                 directory or hub id, which every machine has to reach
    tensor_parallel_size  ranks of one executor; several compute on CPUs
    executor_flags        further flags of `quire executor`
    scheduler_flags       further flags of `quire scheduler`
    gateway_flags         further flags of `quire gateway`
    gateway_listen        host:port of the first gateway; the next ones listen at the following ports. An empty host
                          stands for the machine on which a gateway runs
    drain_timeout_s       time that a replica gets to give up its streams, before it is killed
    min_replicas          fewest replicas of a fleet that is scaled by its load
    max_replicas          most replicas of it
    target_ttft_ms        predicted time to the first token above which replicas are added; None: the load does not
                          scale the fleet
    executor_resource     name of a custom resource of Ray's nodes on which executors run; None: any node
    scheduler_resource    the same for schedulers and gateways
    num_gpus              GPUs that Ray reserves for one executor; None: 1 if nodes have any and it has one rank, else 0
    """

    name: str
    backend: str
    model: str
    tensor_parallel_size: int = 1
    executor_flags: tuple[str, ...] = ()
    scheduler_flags: tuple[str, ...] = ()
    gateway_flags: tuple[str, ...] = ()
    gateway_listen: str = "127.0.0.1:8000"
    drain_timeout_s: float = 60.0
    min_replicas: int = 1
    max_replicas: int = 1
    target_ttft_ms: float | None = None
    executor_resource: str | None = None
    scheduler_resource: str | None = None
    num_gpus: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that cannot be used."""
        check_name(self.name)
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {self.backend!r}")
        if self.tensor_parallel_size < 1:
            raise ValueError(f"tensor_parallel_size must be at least 1, not {self.tensor_parallel_size}")
        _, colon, port = self.gateway_listen.rpartition(":")
        if not (colon and port.isascii() and port.isdigit() and int(port) < 1 << 16):
            raise ValueError(f"gateway_listen must be host:port, not {self.gateway_listen!r}")
        if self.num_gpus and self.tensor_parallel_size > 1:
            raise ValueError("num_gpus must be 0 with several ranks, which compute on CPUs")
        if not 1 <= self.min_replicas <= self.max_replicas <= MAX_REPLICAS:
            raise ValueError(
                f"min_replicas and max_replicas must be 1 to {MAX_REPLICAS}, and the first not above the second, not "
                f"{self.min_replicas} and {self.max_replicas}"
            )
        for name in ("target_ttft_ms", "drain_timeout_s", "num_gpus"):
            value = getattr(self, name)
            if (value is not None and not (value > 0 or (name == "num_gpus" and value == 0))) or value == float("inf"):
                raise ValueError(f"{name} must be positive, not {value}")

    def num_gpus_of(self, most: float) -> float:
        """Returns the GPUs of one executor in a cluster whose nodes have at most `most`."""
        if self.num_gpus is not None:
            return self.num_gpus
        return 1.0 if most and self.tensor_parallel_size == 1 else 0.0

    def flags(self, role: Role) -> tuple[str, ...]:
        """Returns the flags that the user gave for a service."""
        match role:
            case Role.EXECUTOR:
                ranks = self.tensor_parallel_size
                # An executor with several ranks refuses a GPU, which it would take where it sees one.
                parallel = ("--tensor-parallel-size", str(ranks), "--device", "cpu") if ranks > 1 else ()
                return ("--model", self.model, *parallel, *self.executor_flags)
            case Role.SCHEDULER:
                return ("--model", self.model, *self.scheduler_flags)
            case Role.GATEWAY:
                return self.gateway_flags

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        known = {each.name for each in fields(cls)}
        lists = ("executor_flags", "scheduler_flags", "gateway_flags")
        given: dict[str, Any] = {key: each for key, each in value.items() if key in known}
        return cls(**given | {key: tuple(given[key]) for key in lists if key in given})
