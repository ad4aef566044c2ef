"""The limits of the batch and the queue."""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of the batch, which come from the executor, and of the queue, which come from the operator.

    max_num_seqs               sequences that have a slot at the same time
    max_num_batched_tokens     tokens that one step computes, over all sequences; at least max_num_seqs, so that every
                               decode fits
    target_inter_token_latency_s
                               time that a step with decodes should take at most (I25)
    min_prompt_tokens          prompt tokens that such a step takes, whatever they cost
    max_model_len              tokens of one sequence, prompt and output
    max_in_flight              plans sent and not yet answered; 2 hides the round trip
    max_waiting_requests       waiting requests; a request beyond it is refused
    max_waiting_prompt_tokens  prompt tokens of waiting requests; an empty queue takes any request
    max_ahead                  service (I22) that a tenant may get ahead of a waiting one without being preempted
    max_preemptions            preemptions after which a sequence is admitted with all its blocks reserved, and is not
                               preempted again
    max_losses                 executors that are lost in a row while a sequence runs, without progress (I16), before
                               the sequence is failed as the likely cause. At least 2: after the second loss suspects
                               run alone, so that other sequences do not fail with the cause
    watermark_ratio            share of the pool left free when a sequence is admitted beside others, for their growth
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_in_flight: int = 2
    max_waiting_requests: int = 4096
    max_waiting_prompt_tokens: int = 4_000_000
    max_ahead: int = 4096
    max_preemptions: int = 3
    max_losses: int = 5
    watermark_ratio: float = 0.01
    target_inter_token_latency_s: float = inf
    min_prompt_tokens: int = 32

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "max_in_flight", "max_waiting_requests", "min_prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.target_inter_token_latency_s > 0:
            raise ValueError(f"target_inter_token_latency_s must be above 0, not {self.target_inter_token_latency_s}")
        if self.max_losses < 2:
            raise ValueError(f"max_losses must be at least 2, not {self.max_losses}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence computes a token a step"
            )
