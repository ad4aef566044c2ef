"""The cost of one step in the scheduler core: schedule() + commit() while all sequences decode.

    python -m bench scheduler-cost            # 16, 64, 256, 1024 and 4096 running sequences

Prompts have different lengths, so that in each step a sixteenth of the sequences crosses a block border. The figures
are medians of repetitions in this process. Compare them within one run only.
"""

import statistics
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from bench.command_line import Parser
from bench.machine import describe_machine
from bench.report import save
from scheduler.core import Request, Scheduler, SchedulerLimits, SequenceParams, StepPlan, StepResult

BLOCK_SIZE = 16
NUM_WARM_UP_STEPS = 32
NUM_STEPS = 64
NUM_REPETITIONS = 5


class AllDecode:
    """A scheduler with `num_running` sequences that never end, and two plans in flight."""

    def __init__(self, num_running: int) -> None:
        num_tokens = NUM_WARM_UP_STEPS + NUM_STEPS * NUM_REPETITIONS + 64
        num_blocks = num_running * (num_tokens // BLOCK_SIZE + 4)
        self._num_running = num_running
        self._in_flight: deque[StepPlan] = deque()
        self._core = Scheduler(
            SchedulerLimits(
                max_num_seqs=num_running, max_num_batched_tokens=32 * num_running, max_model_len=2 * num_tokens
            ),
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
        )
        self._core.executor_attached(1, num_blocks)
        for i in range(num_running):
            prompt = [i] * (10 + i % BLOCK_SIZE)  # no two prompts share blocks; all are admitted in the first step
            self._core.add(Request(i, prompt, SequenceParams(max_total_tokens=len(prompt) + num_tokens)))

    def run(self, num_steps: int) -> float:
        """Runs steps and returns the seconds per step."""
        result = [5] * self._num_running
        started_s = time.perf_counter()
        for _ in range(num_steps):
            plan = self._core.schedule()
            if plan is None:
                raise RuntimeError("the core did not plan a step")
            self._in_flight.append(plan)
            if len(self._in_flight) == 2:
                oldest = self._in_flight.popleft()
                self._core.commit(StepResult(oldest.epoch, oldest.step_id, result))
        return (time.perf_counter() - started_s) / num_steps


def measure(num_running: int) -> float:
    """Returns the median seconds per step with `num_running` sequences."""
    load = AllDecode(num_running)
    load.run(NUM_WARM_UP_STEPS)
    return statistics.median(load.run(NUM_STEPS) for _ in range(NUM_REPETITIONS))


def main(arguments: Sequence[str]) -> None:
    parser = Parser("scheduler-cost", __doc__)
    parser.add_argument("running", type=int, nargs="*", default=[16, 64, 256, 1024, 4096], help="numbers of sequences")
    parser.add_argument("--json", type=Path, help="file of results")
    given = parser.parse_args(arguments)
    rows = []
    print(f"{'running':>8} {'µs/step':>10} {'µs/request':>13}")
    for num_running in given.running:
        step_us = measure(num_running) * 1e6
        rows.append({"running": num_running, "us_a_step": step_us, "us_a_request": step_us / num_running})
        print(f"{num_running:>8} {step_us:>10.0f} {step_us / num_running:>13.2f}")
    if given.json is not None:
        save(given.json, {"machine": describe_machine(None), "rows": rows})
