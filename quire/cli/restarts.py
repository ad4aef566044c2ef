"""Decides when a process that ended is started again. Pure: the caller passes the times."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The delays between restarts. There is no maximum number of restarts.

    The first restart comes after `first_delay_s`, each further one after twice the delay before it, at most
    `max_delay_s`. A process that has run for `healthy_s` starts this sequence again.

    fatal_at_start  exit codes that mean that a restart is useless, if the process has never been ready. None: before
                    that, every end is a failure
    """

    first_delay_s: float = 0.2
    max_delay_s: float = 5.0
    healthy_s: float = 60.0
    fatal_at_start: frozenset[int] | None = None

    def is_fatal_at_start(self, return_code: int | None) -> bool:
        """Returns whether to give up on a process that ended before it was ready."""
        return self.fatal_at_start is None or return_code in self.fatal_at_start


class Backoff:
    """The restarts of one process under a policy."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.num_in_a_row = 0
        """Restarts since the process last ran for `healthy_s`."""

    def next_delay_s(self, ran_s: float) -> float:
        """Counts a restart and returns the delay before it, for a process that ended after `ran_s`."""
        policy = self._policy
        if ran_s >= policy.healthy_s:
            self.num_in_a_row = 0
        delay_s = policy.first_delay_s * 2.0 ** min(self.num_in_a_row, 64)
        self.num_in_a_row += 1
        return min(policy.max_delay_s, delay_s)
