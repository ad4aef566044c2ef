"""The real scheduler core, without an executor: every step is over at once, and every token is the same.

What a claim asks of memory and of slots is decided by the core alone, so these runs are exact and repeat to the bit.
Steps stand in for time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from scheduler.core import BATCHING, MEMORY, Limits, Request, Scheduler, SequenceParams, StepPlan, StepResult

_TOKEN = 5
_VOCABULARY = 1_000_003


@dataclass(frozen=True, slots=True)
class CoreSetting:
    """A pool, a batch and how both are run: names of BATCHING and MEMORY."""

    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    block_size: int = 16
    max_num_batched_tokens: int = 512
    batching: str = "continuous"
    memory: str = "paged"


# Is shown the core after each step is planned: what runs, and who holds what.
Observe = Callable[[Scheduler, StepPlan], None]


def run_closed_loop(
    setting: CoreSetting, lengths: Sequence[tuple[int, int]], num_clients: int, observe: Observe
) -> int:
    """Requests of (prompt, output) tokens, so many at once, until all have ended. Returns the number of steps.

    No two prompts share a block. Each output is exactly as long as it says, and the core is told so: what the memory
    modes reserve follows from it.
    """
    core = Scheduler(
        Limits(
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=max(setting.max_num_batched_tokens, setting.max_num_seqs),
            max_model_len=setting.max_model_len,
            max_in_flight=1,
            watermark_ratio=0.0,
        ),
        num_blocks=setting.num_blocks + 1,  # the null block is nobody's
        block_size=setting.block_size,
        batching=BATCHING[setting.batching],
        memory=MEMORY[setting.memory],
    )
    core.executor_attached(1, setting.num_blocks + 1)
    requests = _requests(lengths)
    num_steps = 0
    while True:
        while core.num_unfinished_requests < num_clients and (request := next(requests, None)) is not None:
            core.add(request)
        plan = core.schedule()
        if plan is None:
            if core.num_unfinished_requests:
                raise RuntimeError("the core plans nothing, and requests are left")
            return num_steps
        num_steps += 1
        observe(core, plan)
        core.commit(StepResult(plan.epoch, plan.step_id, [_TOKEN] * num_sampling(core)))


def num_sampling(core: Scheduler) -> int:
    """Sequences that sample in the one plan that is in flight: those of which no known token is left to compute."""
    return sum(sequence.num_planned_tokens == sequence.num_tokens for sequence in core.running_sequences())


def _requests(lengths: Sequence[tuple[int, int]]) -> Iterator[Request]:
    for number, (num_prompt_tokens, num_output_tokens) in enumerate(lengths):
        prompt = [number % _VOCABULARY] * num_prompt_tokens
        yield Request(number, prompt, SequenceParams(max_total_tokens=num_prompt_tokens + num_output_tokens))
