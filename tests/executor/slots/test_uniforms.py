"""Counter-based random numbers."""

from __future__ import annotations

import numpy as np

from executor.slots.uniforms import splitmix64, uniforms


def test_outputs_equal_the_published_generator() -> None:
    """Compares the first five outputs of the published generator with seed 1234567."""
    states = np.full(5, 1234567, dtype=np.uint64)
    assert splitmix64(states, np.arange(5, dtype=np.uint64)).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_numbers_depend_on_seed_and_position_alone() -> None:
    seeds = np.array([0, 1, 0, (1 << 64) - 1, 0], dtype=np.uint64)
    positions = np.array([5, 5, 6, 5, 5], dtype=np.int32)
    values = uniforms(seeds, positions)
    assert values.dtype == np.float32
    assert values[0] == values[4]
    assert len(set(values.tolist())) == 4
    assert uniforms(seeds[2:3], positions[2:3])[0] == values[2]


def test_numbers_are_uniform_over_positions_and_over_seeds() -> None:
    count = 40_000
    for seeds, positions in (
        (np.zeros(count, np.uint64), np.arange(count, dtype=np.int32)),
        (np.arange(count, dtype=np.uint64), np.full(count, 17, np.int32)),
    ):
        values = uniforms(seeds, positions).astype(np.float64)
        assert values.min() >= 0
        assert values.max() < 1
        counts = np.bincount((values * 100).astype(int), minlength=100)
        chi_square = ((counts - count / 100) ** 2 / (count / 100)).sum()
        assert chi_square < 99 + 6 * np.sqrt(2 * 99)
        # Neighbouring seeds are uncorrelated: 6 standard deviations of the sample correlation.
        assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 6 / np.sqrt(count)
