"""How long a request may take at most, and what it may need at most: what liveness is held to."""

from dataclasses import dataclass, field

from scheduler.core import Request, Scheduler


@dataclass(slots=True)
class StepBound:
    """I12: the number of plans in which every request that was added must have ended.

    Every plan computes at least one token. A sequence needs the KV of max_total_tokens - 1 tokens, and computes it once
    in each of its lives: the first, and one more after each preemption and each loss of the executor.
    """

    max_preemptions: int
    num_losses: int = 0
    sizes: list[tuple[int, int]] = field(default_factory=list)  # (lives but for losses, tokens) of each sequence

    def add(self, request: Request) -> None:
        for index in range(request.num_sequences):
            self.sizes.append((1 + most_preemptions(self.max_preemptions, index), request.params.max_total_tokens - 1))

    @property
    def max_steps(self) -> int:
        return sum((num_lives + self.num_losses) * num_tokens for num_lives, num_tokens in self.sizes)


def most_preemptions(max_preemptions: int, index: int) -> int:
    """I14: how often a sequence can be preempted. A forked sample is born without a guarantee, so once at least."""
    return max_preemptions if index == 0 else max(1, max_preemptions)


def most_blocks(request: Request, scheduler: Scheduler) -> int:
    """Of a beam search, if its beams share nothing but the full blocks of the prompt; 0 for another request."""
    if request.beam is None:
        return 0
    size = scheduler.state.cache.block_size
    num_shared = len(request.prompt_token_ids) // size
    return num_shared + request.beam.width * (-(-(request.params.max_total_tokens - 1) // size) - num_shared)
