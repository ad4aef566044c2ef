"""Arrival times of requests: open loops that do not wait for answers, and a closed loop that does.

An open loop is an endless stream of ascending times (`times_s`), which do not depend on the server. All times are
virtual, in seconds.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

MAX_NUMBER = 1e9
"""Largest rate or time of a simulation. With larger ones, sums of times lose their digits."""

_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Poisson:
    """Arrivals of independent users: the gaps are exponentially distributed."""

    rate: float  # requests per second

    def times_s(self, rng: random.Random) -> Iterator[float]:
        now_s = 0.0
        while True:
            now_s += rng.expovariate(self.rate)
            yield now_s


@dataclass(frozen=True, slots=True)
class Bursts:
    """Arrivals with gamma-distributed gaps.

    burstiness  squared coefficient of variation of the gaps: 1 is Poisson, 4 has many short gaps and a few long ones;
                values near 0 give almost equal gaps
    """

    rate: float
    burstiness: float

    def times_s(self, rng: random.Random) -> Iterator[float]:
        now_s, shape = 0.0, 1.0 / self.burstiness
        while True:
            now_s += rng.gammavariate(shape, 1.0 / (shape * self.rate))
            yield now_s


@dataclass(frozen=True, slots=True)
class Diurnal:
    """A Poisson process whose rate follows a daily sine around the mean, lowest at midnight and highest at noon.

    swing  0: constant rate; 1: the rate is 0 at midnight and twice the mean at noon
    """

    rate: float
    swing: float

    def rate_at(self, now_s: float) -> float:
        return self.rate * (1.0 - self.swing * math.cos(2.0 * math.pi * now_s / _DAY_S))

    def times_s(self, rng: random.Random) -> Iterator[float]:
        """Draws times by thinning (Lewis and Shedler 1979).

        Candidates come at the highest rate and are kept with the ratio of the current rate to the highest.
        """
        now_s, highest = 0.0, self.rate * (1.0 + self.swing)
        while True:
            now_s += rng.expovariate(highest)
            if rng.random() * highest < self.rate_at(now_s):
                yield now_s


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A fixed number of clients, each with one open request at any time.

    turnaround_s  time from the last token of one request to the arrival of the next
    """

    num_clients: int
    turnaround_s: float = 0.0


Arrivals = Poisson | Bursts | Diurnal | ClosedLoop
