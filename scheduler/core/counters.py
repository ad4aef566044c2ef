"""Totals of the core since its start."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the start. Each is incremented where the event happens."""

    num_steps: int = 0
    num_prefilled_tokens: int = 0  # known tokens that were computed, those computed again included
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_preempted_tokens: int = 0  # computed and thrown away
    num_deferrals: int = 0
    num_cow_copies: int = 0
    num_prefix_queried_tokens: int = 0  # of prompts and of resumed outputs, at first admission
    num_prefix_hit_tokens: int = 0  # those of them that were found in the prefix cache
