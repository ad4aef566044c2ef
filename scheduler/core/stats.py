"""Numbers the core keeps of itself: plain data; the shell knows what a metric is."""

from dataclasses import dataclass, field

from scheduler.core.sequence import FinishReason


@dataclass(slots=True)
class Counters:
    """Totals since the start. Counted once each, where the thing happens."""

    num_steps: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_preempted_tokens: int = 0  # computed, thrown away
    num_cow_copies: int = 0
    num_forks: int = 0  # samples born sharing all blocks
    num_branches: int = 0  # beams born sharing all blocks; those that go on in their parent's place are not counted
    num_prefix_waits: int = 0  # plans in which the head of the queue waited for a block of its prefix
    num_prefix_queried_tokens: int = 0  # prompt tokens, at first admission
    num_prefix_hit_tokens: int = 0  # of these, found in the prefix cache
    num_finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))  # sequences
