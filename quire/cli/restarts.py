"""Decides when a process that died is started again. Pure: the caller passes the time."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The delays between restarts, and their maximum number.

    The first restart comes after `first_delay_s`. Each further one within `window_s` comes after twice the delay of the
    one before, at most `max_delay_s`. After `max_restarts` within `window_s` the process is in a crash loop, and is not
    restarted again.
    """

    first_delay_s: float = 0.2
    max_delay_s: float = 5.0
    max_restarts: int = 6
    window_s: float = 60.0


class RestartBudget:
    """The restarts of one process under a policy."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._restarts_s: list[float] = []

    def next_delay_s(self, now_s: float) -> float | None:
        """Records a restart and returns the delay before it, or None in a crash loop."""
        policy = self._policy
        self._restarts_s = [time_s for time_s in self._restarts_s if now_s - time_s < policy.window_s]
        recent = len(self._restarts_s)
        if recent >= policy.max_restarts:
            return None
        self._restarts_s.append(now_s)
        return min(policy.max_delay_s, policy.first_delay_s * 2.0**recent)
