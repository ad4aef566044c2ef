"""The lease on the device: one stream has it at a time, and its number fences off the plans of all earlier streams."""

from collections.abc import Collection
from dataclasses import dataclass

from executor.device.work import FailureKind
from executor.errors import LeaseRefused
from executor.stream.plan_session import PlanSession
from quire.executor.v1 import executor_pb2 as pb
from quire.plan_stream import FEATURES, OPTIONAL_FEATURES, OWN, speaks_with, spoken

_MAX_NAME = 200
"""Longest name of a scheduler that is repeated in messages, in characters."""


@dataclass(frozen=True, slots=True)
class _Holder:
    """The stream that has the lease, and the name and the instance of its scheduler."""

    stream: PlanSession
    name: str
    instance: str


class Leases:
    """Grants leases. Epochs begin at 1 and increase; only this class chooses them."""

    def __init__(self, features: Collection[str] = FEATURES + OPTIONAL_FEATURES) -> None:
        """Starts without a holder. An opening may need these features only."""
        self._features = features
        self._last_epoch = 0
        self._holder: _Holder | None = None

    def grant(self, opening: pb.Opening, stream: PlanSession) -> None:
        """Gives a stream the lease, and ends the stream that had it. Raises LeaseRefused.

        A scheduler may replace its own stream: when a connection breaks, the scheduler can notice it first.
        """
        _check_protocol(opening, self._features)
        name, holder = _readable(opening.holder), self._holder
        if holder is not None:
            is_own = holder.instance == opening.instance != ""
            if not (is_own or opening.takes_over):
                raise LeaseRefused(
                    f"the executor serves another scheduler, {holder.name}: "
                    "stop that scheduler, or start this one with --takeover"
                )
            holder.stream.fail(FailureKind.TAKEN_OVER, f"{name} took over")
        self._last_epoch += 1
        stream.epoch = self._last_epoch
        self._holder = _Holder(stream, name, opening.instance)

    def release(self, stream: PlanSession) -> None:
        """Ends the lease of a stream, if it has the lease."""
        if self._holder is not None and self._holder.stream is stream:
            self._holder = None


def _check_protocol(opening: pb.Opening, features: Collection[str]) -> None:
    version, least = opening.protocol_version, opening.least_protocol_version
    if not speaks_with(version, least):
        raise LeaseRefused(
            f"the scheduler speaks {spoken(version, least)} of the plan stream, this executor {OWN}: "
            "run the same release of both"
        )
    if missing := [_readable(name) for name in opening.features if name not in features]:
        raise LeaseRefused(
            f"this executor lacks features that the scheduler needs: {', '.join(missing[:10])}; "
            "run the same release of both"
        )


def _readable(name: str) -> str:
    """Returns a name that a peer has chosen in a form that is safe in a log and in a status message."""
    printable = "".join(character if character.isprintable() else "?" for character in name[:_MAX_NAME])
    return printable or "(unnamed)"
