"""Derives the seeds of a request's sequences from the request's seed."""

MASK_64 = 2**64 - 1


def sample_seed(seed: int, index: int) -> int:
    """Returns the seed of sequence `index`.

    Sequence 0 has the request's own seed, so that it samples the same tokens as a request with n = 1. The others have
    output number `index` of SplitMix64 started at that seed (Steele, Lea and Flood, OOPSLA 2014).
    """
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) & MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK_64
    return mixed ^ (mixed >> 31)
