"""The deaths of replicas: at given times, or at random."""

import random
import re
from dataclasses import dataclass, field
from math import inf

from planning.arrivals import MAX_NUMBER
from planning.errors import PlanningError

_FAILURE = re.compile(r"\s*(\d+)@(\d+(?:\.\d+)?)\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Failures:
    """When replicas die.

    given     number of a replica and the time of its death
    mean_s    mean time until a replica that runs dies; infinite: only given deaths
    repair_s  time from a death until the replica is back, with an empty cache
    """

    given: tuple[tuple[int, float], ...] = ()
    mean_s: float = inf
    repair_s: float = 10.0
    rng: random.Random = field(default_factory=random.Random)

    def time_to_next_s(self) -> float:
        """Draws the time until a replica dies that has just started."""
        return inf if self.mean_s == inf else self.rng.expovariate(1 / self.mean_s)


def parse_failures(text: str | None, num_replicas: int) -> tuple[tuple[int, float], ...]:
    """Parses `3@20,5@40.5`: replica 3 dies after 20 seconds, replica 5 after 40.5. Raises PlanningError."""
    found = []
    for part in text.split(",") if text else []:
        match = _FAILURE.fullmatch(part)
        if not match or int(match[1]) >= num_replicas or float(match[2]) > MAX_NUMBER:
            raise PlanningError(
                f"failures: expected REPLICA@SECONDS with a replica below {num_replicas} and at most {MAX_NUMBER:g} "
                f"seconds, not {part!r}"
            )
        found.append((int(match[1]), float(match[2])))
    return tuple(found)
