"""The bounds for the checks of liveness: the most steps, preemptions and blocks of a request."""

from dataclasses import dataclass, field

from scheduler.core import Request, Scheduler


@dataclass(slots=True)
class StepBound:
    """The number of plans after which every request that was added must have ended (I12).

    Every plan computes at least one token. A sequence needs the KV of max_total_tokens - 1 tokens. It computes it once,
    and again after each preemption, each loss of the executor, and each time that it is deferred.
    """

    max_preemptions: int
    num_losses: int = 0
    num_deferrals: int = 0
    sizes: list[tuple[int, int]] = field(default_factory=list)  # (1 + preemptions, tokens) of each sequence

    def add(self, request: Request) -> None:
        for index in range(request.num_sequences):
            self.sizes.append((1 + most_preemptions(self.max_preemptions, index), request.params.max_total_tokens - 1))

    @property
    def max_steps(self) -> int:
        num_again = self.num_deferrals * max((num_tokens for _, num_tokens in self.sizes), default=0)
        return num_again + sum((num_lives + self.num_losses) * num_tokens for num_lives, num_tokens in self.sizes)


def most_preemptions(max_preemptions: int, index: int) -> int:
    """Returns how often a sequence can be preempted (I14). Forked samples, which start unguaranteed: at least once."""
    return max_preemptions if index == 0 else max(1, max_preemptions)


def most_blocks(request: Request, scheduler: Scheduler) -> int:
    """Returns the blocks of a beam search whose beams share only the full blocks of the prompt; 0 without beams."""
    if request.beam is None:
        return 0
    size = scheduler.state.cache.block_size
    num_shared = len(request.prompt_token_ids) // size
    return num_shared + request.beam.width * (-(-(request.params.max_total_tokens - 1) // size) - num_shared)
