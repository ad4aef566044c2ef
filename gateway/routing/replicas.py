"""The knowledge that one router has of all replicas."""

from collections.abc import Collection
from dataclasses import replace
from itertools import compress

from gateway.routing.holders import HolderIndex
from gateway.routing.load import ReplicaLoad
from gateway.routing.prefix_view import PrefixView
from gateway.routing.replica import ReplicaState
from gateway.routing.ring import Ring

ASSUMED_PREFILL_S = 1e-4
"""Seconds for a prompt token while no replica has measured them."""

_KEPT = 0.9
_BITS = bytes.maketrans(b"01", b"\0\1")


class Replicas:
    """The replicas by name. Those that are not ready are never chosen, and count in no sum.

    ring   all replicas, so that one that is ready again gets its keys back
    index  the joint index of the replicas' prefixes
    """

    def __init__(self) -> None:
        self.ring = Ring()
        self.index = HolderIndex()
        self.ready_bits = 0
        self._states: dict[str, ReplicaState] = {}
        self._ready: dict[str, ReplicaState] = {}
        self._by_number: list[ReplicaState | None] = []
        self._prefill_s = ASSUMED_PREFILL_S  # running mean of what replicas report

    def __getitem__(self, name: str) -> ReplicaState:
        return self._states[name]

    def __contains__(self, name: str) -> bool:
        return name in self._states

    def __len__(self) -> int:
        return len(self._states)

    def add(self, name: str) -> ReplicaState:
        """Adds a replica, which is not ready yet, and returns its state."""
        if name in self._states:
            raise ValueError(f"replica {name!r} is known already")
        number = next((i for i, state in enumerate(self._by_number) if state is None), len(self._by_number))
        state = ReplicaState(name, 1 << number, PrefixView(self.index, 1 << number))
        self._by_number[number : number + 1] = [state]
        self._states[name] = state
        self.ring.add(name)
        return state

    def remove(self, name: str) -> None:
        """Removes a replica that does not come back under this name."""
        self.set_ready(name, False)
        state = self._states.pop(name)
        state.view.clear()
        self._by_number[state.bit.bit_length() - 1] = None
        self.ring.remove(name)

    def set_ready(self, name: str, is_ready: bool) -> None:
        state = self._states[name]
        if is_ready:
            self._ready[name] = state
            self.ready_bits |= state.bit
        else:
            self._ready.pop(name, None)
            self.ready_bits &= ~state.bit

    def report(self, name: str, load: ReplicaLoad, num_received: int) -> None:
        """Records a report of a replica (see `ReplicaState.report`).

        A replica that has not measured its speed counts like the others, not as infinitely fast.
        """
        if load.prefill_s_per_token > 0:
            self._prefill_s = _KEPT * self._prefill_s + (1 - _KEPT) * load.prefill_s_per_token
        else:
            load = replace(load, prefill_s_per_token=self._prefill_s)
        self._states[name].report(load, num_received)

    def ready(self, refused: Collection[str] = ()) -> dict[str, ReplicaState]:
        """Returns the replicas that can be chosen: those that are ready and have not refused the request."""
        if not refused:
            return self._ready
        return {name: state for name, state in self._ready.items() if name not in refused}

    def with_bits(self, bits: int) -> list[ReplicaState]:
        """Returns the states of a set of replicas."""
        chosen = compress(self._by_number, f"{bits:b}"[::-1].encode().translate(_BITS))
        return [state for state in chosen if state is not None]
