"""Runs the scheduler core without an executor: every step is answered at once, and every token is the same.

Only the core decides about memory and slots, so these runs are exact and repeat bit for bit. Time is counted in steps.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from scheduler.core import BATCHING, KV_ALLOCATIONS, Request, Scheduler, SchedulerLimits, SequenceParams, StepResult

_TOKEN = 5
_VOCABULARY = 1_000_003
_STEP_S = 0.01  # duration of a step on the core's clock, by which dynamic batching measures its timeout


@dataclass(frozen=True, slots=True)
class CoreSetting:
    """A pool and a batch, with names of BATCHING and KV_ALLOCATIONS."""

    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    block_size: int = 16
    max_num_batched_tokens: int = 512
    batching: str = "continuous"
    memory: str = "paged"


# Called with each step after it is planned: its number from 0, and the core, which knows the running sequences.
Observe = Callable[[int, Scheduler], None]


def run_core(
    setting: CoreSetting,
    lengths: Sequence[tuple[int, int]],
    observe: Observe,
    *,
    num_clients: int | None = None,
    arrival_steps: Sequence[int] = (),
) -> int:
    """Runs requests of (prompt, output) tokens until all have ended. Returns the number of steps, empty ones included.

    num_clients    number of requests at once, in a closed loop; None: all requests, as they arrive
    arrival_steps  step before which each request arrives; empty: all arrive before the first step

    No two prompts share a block. Each output has exactly the stated length. The core knows it, and the memory modes
    reserve accordingly.
    """
    core = _core(setting)
    coming = deque(zip(arrival_steps or [0] * len(lengths), _requests(lengths), strict=True))
    step = 0
    while coming or core.num_unfinished_requests:
        core.expire(step * _STEP_S)
        while coming and coming[0][0] <= step and core.num_unfinished_requests < (num_clients or len(lengths)):
            core.add(coming.popleft()[1], step * _STEP_S)
        plan = core.schedule()
        if plan is not None:
            observe(step, core)
            core.commit(StepResult(plan.epoch, plan.step_id, [_TOKEN] * num_sampling(core)))
        elif not coming and core.next_wake_s is None:
            raise RuntimeError("the core plans nothing and waits for nothing, although requests are left")
        step += 1
    return step


def _core(setting: CoreSetting) -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=max(setting.max_num_batched_tokens, setting.max_num_seqs),
        max_model_len=setting.max_model_len,
        max_in_flight=1,
        watermark_ratio=0.0,
    )
    num_blocks = setting.num_blocks + 1  # one more for the null block
    core = Scheduler(
        limits,
        num_blocks=num_blocks,
        block_size=setting.block_size,
        batching=BATCHING[setting.batching],
        kv_allocation=KV_ALLOCATIONS[setting.memory],
    )
    core.executor_attached(1, num_blocks)
    return core


def num_sampling(core: Scheduler) -> int:
    """Returns how many sequences sample in the plan in flight: those that compute their last known token."""
    return sum(sequence.num_planned_tokens == sequence.num_tokens for sequence in core.state.batch.running)


def _requests(lengths: Sequence[tuple[int, int]]) -> Iterator[Request]:
    for number, (num_prompt_tokens, num_output_tokens) in enumerate(lengths):
        prompt = [number % _VOCABULARY] * num_prompt_tokens
        yield Request(number, prompt, SequenceParams(max_total_tokens=num_prompt_tokens + num_output_tokens))
