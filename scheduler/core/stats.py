"""Numbers the core keeps of itself: plain data; the shell knows what a metric is."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the start. Counted once each, where the thing happens."""

    num_steps: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_preempted_tokens: int = 0  # computed, thrown away
    num_cow_copies: int = 0
    num_prefix_queried_tokens: int = 0  # prompt tokens, at first admission
    num_prefix_hit_tokens: int = 0  # of these, found in the prefix cache
