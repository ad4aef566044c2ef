"""Simulates worlds with crashes and lost connections, and checks that every client gets exactly its tokens."""

from collections import Counter

import pytest

from tests.support.core.simulation import simulate

NUM_CHUNKS = 8
SEEDS_PER_CHUNK = 400
NUM_COVERING_CHUNKS = 3
"""The worlds of these chunks cover every kind of event, and one test runs all of them."""

LATER_CHUNKS = range(NUM_COVERING_CHUNKS, NUM_CHUNKS)


@pytest.mark.parametrize("chunk", [0, *(pytest.param(i, marks=pytest.mark.exhaustive) for i in LATER_CHUNKS)])
def test_every_world_ends_well(chunk: int, effort: int) -> None:
    num_seeds = SEEDS_PER_CHUNK * effort
    for seed in range(chunk * num_seeds, (chunk + 1) * num_seeds):
        try:
            simulate(seed)
        except Exception as error:
            error.add_note(f"simulate({seed})")
            raise


@pytest.mark.exhaustive
def test_worlds_cover_every_kind_of_event(effort: int) -> None:
    """Checks that the simulated worlds cover every kind of event in the core, and that these worlds end well."""
    num_seeds = NUM_COVERING_CHUNKS * SEEDS_PER_CHUNK * effort
    num_worlds: Counter[str] = Counter()
    for seed in range(num_seeds):
        happened = simulate(seed)
        num_worlds.update({name: int(number > 0) for name, number in happened.items()})
    rare = {name: number for name, number in num_worlds.items() if number < num_seeds // 400}
    assert not rare, f"of {num_seeds} worlds, too few have {rare}"


def test_the_same_seed_gives_the_same_world() -> None:
    assert simulate(5) == simulate(5)
    assert simulate(5) != simulate(6)
