"""Counter-based random numbers: a function of (seed, position) alone.

SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): its n-th output is a bijective mix of `state + n * GOLDEN`, so any
output can be computed without the ones before it. The state is the mixed seed, which keeps neighbouring seeds apart; n
is the position of the token to sample. The host computes in integers, so the numbers are the same for every device.
"""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def splitmix64(states: NDArray[np.uint64], counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns output number `counter` (from 0) of the generator that starts in `state`, element by element."""
    with np.errstate(over="ignore"):
        return _mix(states + (counters + np.uint64(1)) * _GOLDEN)


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.integer]) -> NDArray[np.float32]:
    """Returns a number in [0, 1) for each pair. It is a multiple of 2⁻²⁴: exact in float32, never rounded up to 1."""
    with np.errstate(over="ignore"):
        states = _mix(seeds)
    bits = splitmix64(states, positions.astype(np.uint64)) >> np.uint64(40)
    return bits.astype(np.float32) * np.float32(2.0**-24)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))
