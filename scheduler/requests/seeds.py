"""The seeds of a request's samples, which come from the one that it has."""

MASK_64 = 2**64 - 1


def sample_seed(seed: int, index: int) -> int:
    """Seed of sequence `index`: the request's own for the first, so that n = 1 and the first of n agree; for the
    others output number `index` of SplitMix64 started at it (Steele, Lea and Flood, OOPSLA 2014).
    """
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) & MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK_64
    return mixed ^ (mixed >> 31)
