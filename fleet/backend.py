"""The operations of a backend."""

from collections.abc import Sequence
from typing import Protocol

from fleet.parts import Part, PartStatus


class BackendError(Exception):
    """An operation has failed. The controller tries again: the next comparison asks for it again."""


class Backend(Protocol):
    """Runs the parts of one fleet. No operation waits for a part: `watch` shows later what has become of it.

    An incarnation that is not there any more is ignored. All operations raise BackendError.
    """

    def start(self, part: Part, peers: Sequence[str]) -> None:
        """Starts a new incarnation of a part; an executor is started with all its ranks, on machines of its own."""

    def watch(self) -> list[PartStatus]:
        """Returns the last incarnation of every part, and all others that may still run."""

    def address(self, part: Part, incarnation: str, peers: Sequence[str]) -> None:
        """Tells an incarnation the addresses of its peers. It follows them while it runs."""

    def drain(self, part: Part, incarnation: str, *, moves_streams: bool) -> None:
        """Makes an incarnation end: when its streams have ended, or at once, so that they continue elsewhere."""

    def kill(self, part: Part, incarnation: str) -> None:
        """Ends all processes of an incarnation at once, and releases its place when they are gone."""

    def log_tail(self, part: Part) -> str:
        """Returns the end of the log of the last incarnation, for people."""
