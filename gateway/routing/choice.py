"""Chooses the replica of a request.

A choice reads `Replicas` and changes nothing there. The router counts each request that it sends:

    name = choice.choose(prompt, replicas)
    state = replicas[name]
    number = state.count(num_uncached_tokens(prompt, state), prompt.digests)
    state.first_token(number)        when its first token comes
    state.take_back(number)          when its stream has ended

For N ready replicas, a prompt of B blocks and H holders of its longest prefix, `cost` takes time O(B + H + N): B
intersections of sets of N bits, and one look at N numbers. No choice looks through the digests of replicas.
"""

import random
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from gateway.routing.replica import ReplicaState
from gateway.routing.replicas import Replicas

NEAR = 1.05
"""Costs that differ by less than this factor are equal: measured speeds vary, and the fastest replica of an idle fleet
must not get everything."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The part of a request that decides where it is sent.

    affinity_key  hash key of the beginning of the prompt
    num_tokens    length of the prompt; None: not known, because it was not tokenized
    digests       8-byte digests of its full blocks, in order; empty if they are not known
    """

    affinity_key: bytes
    num_tokens: int | None = None
    digests: Sequence[int] = ()
    block_size: int = 1


class Choice(Protocol):
    def choose(self, prompt: Prompt, replicas: Replicas, refused: Collection[str] = ()) -> str | None:
        """Returns the name of a ready replica that has not refused the request; None if there is none."""


def num_uncached_tokens(prompt: Prompt, state: ReplicaState) -> int:
    """Returns the number of prompt tokens that the replica would compute; 0 if the length is not known."""
    if prompt.num_tokens is None:
        return 0
    return max(1, prompt.num_tokens - prompt.block_size * state.view.num_cached(prompt.digests))


def least_uncached_tokens(prompt: Prompt, replicas: Replicas) -> int:
    """Returns the number of prompt tokens that the ready replica with the longest prefix would compute, at least 1."""
    _, num_blocks = replicas.index.longest(prompt.digests, replicas.ready_bits)
    return max(1, (prompt.num_tokens or 0) - prompt.block_size * num_blocks)


class RoundRobin:
    """Chooses one replica after the other, in the order of their names."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, prompt: Prompt, replicas: Replicas, refused: Collection[str] = ()) -> str | None:
        names = sorted(replicas.ready(refused))
        if not names:
            return None
        self._last = names[bisect_right(names, self._last) % len(names)]
        return self._last


class LeastLoaded:
    """Chooses the replica with the fewest requests; one of several at random."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, prompt: Prompt, replicas: Replicas, refused: Collection[str] = ()) -> str | None:
        states = replicas.ready(refused).values()
        if not states:
            return None
        least = min(map(attrgetter("num_requests"), states))
        return self._rng.choice([state.name for state in states if state.num_requests == least])


class BoundedRing:
    """Chooses by the beginning of the prompt, unless that replica has more than its share of the requests."""

    def choose(self, prompt: Prompt, replicas: Replicas, refused: Collection[str] = ()) -> str | None:
        loads = {name: state.num_requests for name, state in replicas.ready(refused).items()}
        return replicas.ring.choose(prompt.affinity_key, loads) if loads else None


class LeastCost:
    """Chooses the replica with the shortest expected time to the first token, among a few candidates.

    The candidates are the holders of the longest prefix, the ring's home of the prompt, and the two replicas with the
    least backlog. The home is where other routers send the same prompt before any replica has published it. Without
    the length of the prompt, it chooses as `BoundedRing` does.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._ring = BoundedRing()

    def choose(self, prompt: Prompt, replicas: Replicas, refused: Collection[str] = ()) -> str | None:
        ready = replicas.ready(refused)
        if prompt.num_tokens is None or not ready:
            return self._ring.choose(prompt, replicas, refused)
        bits = replicas.ready_bits
        for name in refused:
            if name in replicas:  # it may have left meanwhile
                bits &= ~replicas[name].bit
        holders, num_blocks = replicas.index.longest(prompt.digests, bits)
        num_left = max(1, prompt.num_tokens - prompt.block_size * num_blocks)
        costs = {state.name: state.first_token_s(num_left) for state in replicas.with_bits(holders)}
        others = self._least_loaded(ready.values())
        home = replicas.ring.home(prompt.affinity_key, ready)
        for state in (*others, *([ready[home]] if home else [])):
            if state.name not in costs:
                costs[state.name] = state.first_token_s(num_uncached_tokens(prompt, state))
        return self._rng.choice(_nearly_least(costs))

    def _least_loaded(self, states: Collection[ReplicaState]) -> list[ReplicaState]:
        """Returns the two replicas with the least backlog; random ones of those that are equal."""
        found: list[ReplicaState] = []
        left: Iterable[ReplicaState] = states
        while len(found) < min(2, len(states)):
            left = [state for state in left if state not in found]
            least = min(map(attrgetter("backlog_s"), left))
            equal = [state for state in left if state.backlog_s == least]
            found += self._rng.sample(equal, min(len(equal), 2 - len(found)))
        return found


def _nearly_least(costs: dict[str, float]) -> list[str]:
    most = NEAR * min(costs.values())
    return [name for name, cost in costs.items() if cost <= most]


POLICIES = ("round-robin", "least-loaded", "ring", "cost")


def make_choice(policy: str, rng: random.Random) -> Choice:
    """Returns the choice with this name. Raises ValueError for another name."""
    match policy:
        case "round-robin":
            return RoundRobin()
        case "least-loaded":
            return LeastLoaded(rng)
        case "ring":
            return BoundedRing()
        case "cost":
            return LeastCost(rng)
    raise ValueError(f"{policy!r} is not one of {', '.join(POLICIES)}")
