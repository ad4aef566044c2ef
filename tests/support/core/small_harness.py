"""Builds a harness with small limits and its first requests."""

from scheduler.core import FCFS, Policy, Request, SchedulerLimits
from tests.support.core.harness import Harness
from tests.support.core.letter_tokens import VOCAB_SIZE


def build_harness(
    *requests: Request,
    num_usable_blocks: int = 100,
    block_size: int = 1,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_in_flight: int = 1,
    max_preemptions: int = 3,
    max_losses: int = 5,
    policy: Policy = FCFS,
) -> Harness:
    limits = SchedulerLimits(
        max_num_seqs,
        max_num_batched_tokens,
        max_model_len=100,
        max_in_flight=max_in_flight,
        max_preemptions=max_preemptions,
        max_losses=max_losses,
        watermark_ratio=0,
    )
    harness = Harness(
        limits, num_blocks=num_usable_blocks + 1, block_size=block_size, policy=policy, vocab_size=VOCAB_SIZE
    )
    harness.attach()
    for request in requests:
        harness.add(request)
    return harness
