"""Pauses of sequences and beams for whose next token the executor did not wait."""

FIRST_PAUSE_S, MAX_DOUBLINGS = 0.01, 6


def pause_s(num_deferrals: int) -> float:
    """Returns the pause after this number of deferrals in a row, at least 1. It doubles each time, up to 0.64 s."""
    num_doublings = min(num_deferrals - 1, MAX_DOUBLINGS)
    return FIRST_PAUSE_S * float(2**num_doublings)
