"""When requests come. Open loops do not wait for answers, a closed loop does nothing else.

An open loop is a stream of ascending times without end (`times_s`); nothing about it depends on the server. All times
are virtual, in seconds.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent users: exponential gaps."""

    rate: float  # requests a second

    def times_s(self, rng: random.Random) -> Iterator[float]:
        now_s = 0.0
        while True:
            now_s += rng.expovariate(self.rate)
            yield now_s


@dataclass(frozen=True, slots=True)
class Bursts:
    """Gamma-distributed gaps. `burstiness` is the squared coefficient of variation: 1 is Poisson, 4 has many short gaps
    and a few long ones, towards 0 is a metronome."""

    rate: float
    burstiness: float

    def times_s(self, rng: random.Random) -> Iterator[float]:
        now_s, shape = 0.0, 1.0 / self.burstiness
        while True:
            now_s += rng.gammavariate(shape, 1.0 / (shape * self.rate))
            yield now_s


@dataclass(frozen=True, slots=True)
class Diurnal:
    """A day: a Poisson process whose rate is a sine of 24 hours around the mean, lowest at midnight, highest at noon.

    swing  0: no difference; 1: nobody comes at the lowest hour, twice the mean at the highest
    """

    rate: float
    swing: float
    period_s: float = 86_400.0

    def rate_at(self, now_s: float) -> float:
        return self.rate * (1.0 - self.swing * math.cos(2.0 * math.pi * now_s / self.period_s))

    def times_s(self, rng: random.Random) -> Iterator[float]:
        """By thinning (Lewis and Shedler 1979): candidates at the highest rate, kept in proportion to the present."""
        now_s, highest = 0.0, self.rate * (1.0 + self.swing)
        while True:
            now_s += rng.expovariate(highest)
            if rng.random() * highest < self.rate_at(now_s):
                yield now_s


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many clients, each with one request out at any time.

    turnaround_s  from the last token of one request to the arrival of the next
    """

    num_clients: int
    turnaround_s: float = 0.0


Arrivals = Poisson | Bursts | Diurnal | ClosedLoop
