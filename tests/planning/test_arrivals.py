"""The gaps of simulated arrivals have the specified distribution."""

from itertools import pairwise
from random import Random

import pytest

from planning.arrivals import Bursts, Diurnal, Poisson


def gaps(arrivals: Poisson | Bursts | Diurnal, number: int) -> list[float]:
    times = arrivals.times_s(Random(9))
    found = [next(times) for _ in range(number + 1)]
    return [later - earlier for earlier, later in pairwise(found)]


@pytest.mark.parametrize(
    ("arrivals", "variation"), [(Poisson(5.0), 1.0), (Bursts(5.0, 4.0), 4.0), (Bursts(5.0, 0.1), 0.1)]
)
def test_gaps_have_the_specified_mean_and_variation(arrivals: Poisson | Bursts, variation: float) -> None:
    found = gaps(arrivals, 40_000)
    mean = sum(found) / len(found)
    assert mean == pytest.approx(0.2, rel=0.03)
    assert sum((gap - mean) ** 2 for gap in found) / len(found) / mean**2 == pytest.approx(variation, rel=0.08)


def test_the_daily_rate_is_lowest_at_midnight_and_highest_at_noon() -> None:
    times = Diurnal(0.5, 0.8).times_s(Random(1))
    by_hour = [0] * 24
    while (now_s := next(times)) < 86_400:
        by_hour[int(now_s // 3600)] += 1
    assert sum(by_hour) == pytest.approx(0.5 * 86_400, rel=0.03)
    assert by_hour[12] == pytest.approx(0.5 * 1.8 * 3600, rel=0.1)
    assert by_hour[0] == pytest.approx(0.5 * 0.2 * 3600, rel=0.2)
