"""The state that a fleet should have. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

MAX_REPLICAS = 128
"""Size of a cell. A larger fleet is several cells, each with a controller and gateways of its own."""


class FleetError(Exception):
    """A command that cannot be carried out. The message says why; `exit_code` is the one for the command line."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def as_answer(self) -> dict[str, Any]:
        """Returns the controller's answer to a command that it refuses."""
        return {"error": str(self), "exit_code": self.exit_code}


class NoController(FleetError):
    """No controller answers."""


def status_in(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the status in a controller's answer. Raises FleetError if the command was refused."""
    if "error" in answer:
        raise FleetError(answer["error"], answer.get("exit_code", 1))
    status: dict[str, Any] = answer["status"]
    return status


@dataclass(frozen=True, slots=True)
class Wanted:
    """The replicas and gateways of a fleet.

    serving      indices of the replicas that serve
    draining     indices of those that give up their streams and end, with the time by which they do
    gateways     number of gateways
    down_by_s    time by which the whole fleet ends; None: it serves

    Times are on the controller's clock, which cannot be set, and which no other machine shares. In JSON they are on a
    clock that is ahead of it by `ahead_s`, so that they outlive the controller.
    """

    serving: frozenset[int]
    draining: Mapping[int, float] = field(default_factory=dict)
    gateways: int = 1
    down_by_s: float | None = None

    @classmethod
    def of(cls, num_replicas: int, gateways: int = 1) -> Self:
        """Returns the beginning of a fleet. Raises FleetError."""
        _check_number(num_replicas)
        return cls(frozenset(range(num_replicas)), {}, gateways)

    def scaled(self, num_replicas: int, drain_by_s: float) -> Self:
        """Returns this with another number of replicas. The ones with the highest indices drain first.

        Raises FleetError.
        """
        _check_number(num_replicas)
        self._check_serves()
        serving = sorted(self.serving)
        if (excess := len(serving) - num_replicas) > 0:
            return replace(
                self,
                serving=frozenset(serving[:num_replicas]),
                draining=dict(self.draining) | dict.fromkeys(serving[-excess:], drain_by_s),
            )
        index, added = 0, set(serving)
        while len(added) < num_replicas:
            if index not in self.draining:
                added.add(index)
            index += 1
        return replace(self, serving=frozenset(added))

    def drained(self, index: int, drain_by_s: float) -> Self:
        """Returns this with one replica less: the named one drains. A second call can bring its time forward.

        Raises FleetError.
        """
        self._check_serves()
        if index in self.draining:
            return replace(self, draining={**self.draining, index: min(drain_by_s, self.draining[index])})
        if index not in self.serving:
            raise FleetError(f"there is no replica {index}: the fleet has {_listed(self.serving)}")
        if len(self.serving) == 1:
            raise FleetError(f"replica {index} is the last one: scale the fleet up first, or take it down")
        return replace(self, serving=self.serving - {index}, draining=dict(self.draining) | {index: drain_by_s})

    def down(self, by_s: float) -> Self:
        """Returns this on its way down. A second call can bring the time forward."""
        return replace(self, down_by_s=by_s if self.down_by_s is None else min(by_s, self.down_by_s))

    def without(self, ended: Collection[int]) -> Self:
        """Returns this without draining replicas that have ended."""
        return replace(self, draining={index: by_s for index, by_s in self.draining.items() if index not in ended})

    def as_json(self, ahead_s: float) -> dict[str, Any]:
        return {
            "serving": sorted(self.serving),
            "draining": {str(index): by_s + ahead_s for index, by_s in sorted(self.draining.items())},
            "gateways": self.gateways,
            "down_by_s": None if self.down_by_s is None else self.down_by_s + ahead_s,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], ahead_s: float) -> Self:
        draining = {int(index): by_s - ahead_s for index, by_s in value["draining"].items()}
        down_by_s = None if value["down_by_s"] is None else value["down_by_s"] - ahead_s
        return cls(frozenset(value["serving"]), draining, value["gateways"], down_by_s)

    def _check_serves(self) -> None:
        if self.down_by_s is not None:
            raise FleetError("the fleet is going down")


def _check_number(num_replicas: int) -> None:
    if not 1 <= num_replicas <= MAX_REPLICAS:
        raise FleetError(f"a fleet has 1 to {MAX_REPLICAS} replicas, not {num_replicas}", exit_code=2)


def _listed(indices: Collection[int]) -> str:
    return "replicas " + ", ".join(map(str, sorted(indices)))
