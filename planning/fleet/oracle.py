"""A choice that no router can make: it knows the true state of every replica at this moment."""

from collections.abc import Callable, Collection

from gateway.routing.choice import Prompt, num_uncached_tokens
from gateway.routing.replica import ReplicaState
from gateway.routing.replicas import Replicas
from planning.virtual_server import VirtualServer


class Oracle:
    """Estimates the time to the first token on every replica, and chooses the least.

    In contrast to `LeastCost` it tries all replicas, and knows how much of the steps in flight is left. It is greedy,
    so it is no bound: a choice that is worse for one request can be better for all.
    """

    def __init__(self, now_s: Callable[[], float], server_of: Callable[[str], VirtualServer]) -> None:
        self._now_s = now_s
        self._server_of = server_of

    def choose(self, prompt: Prompt, replicas: Replicas, refused: Collection[str] = ()) -> str | None:
        states = replicas.ready(refused).values()
        return min(states, key=lambda state: self._first_token_s(prompt, state)).name if states else None

    def _first_token_s(self, prompt: Prompt, state: ReplicaState) -> float:
        server = self._server_of(state.name)
        left_s = max(0.0, server.busy_until_s - self._now_s())
        planned_s = state.load.prefill_s_per_token * server.num_planned_prompt_tokens
        return state.first_token_s(num_uncached_tokens(prompt, state)) - planned_s + left_s
