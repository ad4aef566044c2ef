"""The number of replicas that a load asks for."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.autoscale import (
    GROW_AFTER_S,
    HALF_LIFE_S,
    SHRINK_AFTER_S,
    Memory,
    Scaling,
    decide,
    predicted_ttft_s,
    remember,
)
from fleet.parts import Load

SCALING = Scaling(min_replicas=1, max_replicas=8, target_ttft_s=1.0)
RATED = Memory(busy_s=10.0, tokens=10_000.0)  # a replica prefills 1,000 tokens a second


def load(queued_tokens: int = 0, oldest_s: float = 0.0, computed_tokens: int = 0) -> Load:
    return Load(queued_tokens, oldest_s, computed_tokens, num_requests=0)


def after(memory: Memory, loads: list[Load], number: int, seconds: float, start_s: float = 0.0) -> tuple[int, Memory]:
    """Decides twice a second while the load stays as it is."""
    wanted = number
    for tick in range(int(2 * seconds) + 1):
        wanted, memory = decide(SCALING, memory, loads, number, number, start_s + tick / 2)
        if wanted != number:
            break
    return wanted, memory


def test_the_rate_is_measured_while_something_waits() -> None:
    idle = remember(Memory(), [load()], [load(computed_tokens=500)], 1.0)
    assert not idle.busy_s, "an idle replica is slower than it could be"
    assert remember(Memory(), [load(100)], [load(computed_tokens=100)], 1.0).busy_s == 0.0, "it was idle for a part"
    busy = remember(Memory(), [load(100), load()], [load(50, computed_tokens=800), load(computed_tokens=10)], 1.0)
    assert (busy.all_s, busy.computed) == (1.0, 810.0)
    assert (busy.busy_s, busy.tokens) == (1.0, 800.0)
    restarted = remember(busy, [load(100, computed_tokens=900)], [load(100)], 1.0)
    assert (restarted.busy_s, restarted.tokens) == (busy.busy_s, busy.tokens), "that scheduler counts from 0"
    assert restarted.computed < busy.computed
    both = remember(Memory(), [load(9), load(9)], [load(9, computed_tokens=100), load(9, computed_tokens=300)], 1.0)
    assert both.tokens / both.busy_s == 200.0, "of one replica"
    later = remember(RATED, [load(9)], [load(9, computed_tokens=0)], HALF_LIFE_S)
    assert later.tokens == pytest.approx(RATED.tokens / 2)


def test_the_prediction_is_the_queue_over_the_rate_and_at_least_its_age() -> None:
    assert predicted_ttft_s(RATED, [load(3000), load(1000)], 2) == pytest.approx(2.0)
    assert predicted_ttft_s(RATED, [load(1000, oldest_s=7.0), load()], 2) == 7.0
    assert predicted_ttft_s(Memory(), [load(10**6, oldest_s=0.5)], 1) == 0.5, "the rate is not known yet"
    assert predicted_ttft_s(RATED, [], 1) == 0.0


def test_the_fleet_grows_after_a_while_and_as_much_as_the_excess_asks_for() -> None:
    assert after(RATED, [load(1500)], 1, GROW_AFTER_S - 0.5)[0] == 1
    assert after(RATED, [load(1500)], 1, GROW_AFTER_S)[0] == 2
    assert after(RATED, [load(12_000)] * 4, 4, GROW_AFTER_S)[0] == 8, "at most twice as many, and at most the bound"
    assert after(RATED, [load(1400)] * 4, 4, GROW_AFTER_S)[0] == 5


def test_a_peak_that_ends_does_not_count() -> None:
    memory = RATED
    for second in range(30):
        queued = 5000 if second % 3 else 600
        wanted, memory = decide(SCALING, memory, [load(queued)], 1, 1, float(second))
        assert wanted == 1


def test_the_fleet_shrinks_late_and_by_one() -> None:
    assert after(RATED, [load()] * 4, 4, SHRINK_AFTER_S - 1)[0] == 4
    assert after(RATED, [load()] * 4, 4, SHRINK_AFTER_S)[0] == 3
    assert after(RATED, [load()], 1, 2 * SHRINK_AFTER_S)[0] == 1
    crowded = [load(350)] * 2  # one replica alone would predict 0.7 s: above half the target
    assert after(RATED, crowded, 2, 2 * SHRINK_AFTER_S)[0] == 2


def test_a_fleet_does_not_shrink_to_fewer_than_can_compute_its_load() -> None:
    """Four replicas without a queue, which compute what three could not."""
    fully_used = replace(RATED, all_s=60.0, computed=60 * 3500.0)
    assert after(fully_used, [load()] * 4, 4, 2 * SHRINK_AFTER_S)[0] == 4
    assert after(replace(fully_used, computed=60 * 2300.0), [load()] * 4, 4, SHRINK_AFTER_S)[0] == 3


@pytest.mark.parametrize("tokens_per_s", [500, 2000, 3100, 3500])
def test_a_steady_load_leaves_the_fleet_at_rest(tokens_per_s: int) -> None:
    """Queues as fluids: a replica computes 1,000 tokens a second, and loads for a minute before it does."""
    changes, late_s = hour_of(tokens_per_s)
    assert all(at_s < 1800 for at_s, _ in changes), changes
    assert late_s < 0.06 * 3600


def hour_of(tokens_per_s: float) -> tuple[list[tuple[float, int]], float]:
    """Returns the changes (time, number of replicas) in an hour, and the time for which the target was missed."""
    rate, load_s, step_s = 1000.0, 60.0, 0.5
    memory, queue, late_s = Memory(), 0.0, 0.0
    ready_at_s = [0.0] * 4  # of each replica that serves
    computed = [0.0] * SCALING.max_replicas
    before: list[Load] = []
    changes = []
    for tick in range(int(3600 / step_s)):
        now_s = tick * step_s
        num_ready = sum(at_s <= now_s for at_s in ready_at_s)
        queue += tokens_per_s * step_s
        done = min(queue, rate * num_ready * step_s)
        queue -= done
        for index in range(num_ready):
            computed[index] += done / num_ready
        late_s += step_s * (queue > rate * num_ready * SCALING.target_ttft_s)
        loads = [load(int(queue / num_ready), 0.0, int(computed[index])) for index in range(num_ready)]
        number = min(len(before), len(loads))
        memory = remember(memory, before[:number], loads[:number], step_s)
        before = loads
        wanted, memory = decide(SCALING, memory, loads, len(ready_at_s), num_ready, now_s)
        if wanted != len(ready_at_s):
            changes.append((now_s, wanted))
            ready_at_s = (ready_at_s + [now_s + load_s] * wanted)[:wanted]
    return changes, late_s


def test_nothing_is_decided_while_replicas_start() -> None:
    memory = replace(RATED, high_since_s=0.0, low_since_s=0.0)
    wanted, memory = decide(SCALING, memory, [load(10**6)], 4, 1, 1000.0)
    assert wanted == 4
    assert memory.high_since_s is None
    assert memory.low_since_s is None


def test_bounds_come_first() -> None:
    scaling = Scaling(2, 4, 1.0)
    assert decide(scaling, RATED, [], 1, 0, 0.0)[0] == 2
    assert decide(scaling, RATED, [], 9, 9, 0.0)[0] == 4


loads = st.builds(Load, st.integers(0, 10**6), st.floats(0, 100), st.integers(0, 10**9), st.integers(0, 1000))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 8), st.integers(0, 8), st.lists(st.tuples(st.lists(loads, max_size=8), st.floats(0.1, 200))))
def test_any_load_stays_within_the_bounds(serving: int, ready: int, looks: list[tuple[list[Load], float]]) -> None:
    scaling, memory, now_s = Scaling(2, 6, 1.0), Memory(), 0.0
    for observed, elapsed_s in looks:
        now_s += elapsed_s
        memory = remember(memory, observed, observed, elapsed_s)
        number, memory = decide(scaling, memory, observed, serving, min(ready, serving), now_s)
        assert 2 <= number <= 6
        if 2 <= serving <= 6:
            assert serving - 1 <= number <= 2 * serving
        serving = number
