"""What it costs a batch that one of its requests uses every feature of sampling.

    python -m bench.sampling_cost              # the embedded model; --model DIRECTORY for another

64 sequences decode in this process: all greedy; then one of them with a temperature, every cut, every penalty, a bias,
a list of allowed tokens, a minimum length, log-probabilities and several stop ids; then a quarter of them so. The
steps of the batches alternate, so that all meet the same machine; medians.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from bench.report import save
from executor.config import ExecutorConfig
from executor.device import resolve_num_threads
from executor.loading import load_model
from executor.plan import Admission, SequenceParams, StepPlan
from executor.runner import ModelRunner

NUM_SEQUENCES = 64
NUM_PROMPT_TOKENS = 24
NUM_WARM_UP_STEPS = 8
NUM_STEPS = 200
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Cost:
    """Median milliseconds of one decode step, and of its sampling, with so many sequences that use every feature."""

    num_featured: int
    step_ms: float
    sample_ms: float


def every_feature(vocab_size: int, max_total_tokens: int) -> SequenceParams:
    """Half of the vocabulary is allowed; nothing ends before max_total_tokens."""
    few = np.arange(5, 13, dtype=np.int32)
    return SequenceParams(
        max_total_tokens=max_total_tokens,
        min_total_tokens=max_total_tokens,
        temperature=0.9,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        seed=7,
        stop_token_ids=few,
        allowed_token_ids=np.arange(0, vocab_size, 2, dtype=np.int32),
        bias_token_ids=few,
        bias_values=np.linspace(-1, 1, len(few), dtype=np.float32),
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.1,
        num_prompt_tokens=NUM_PROMPT_TOKENS,
        num_logprobs=6,
    )


class Batch:
    """A runner whose slots decode. All run on one machine, turn by turn."""

    def __init__(self, runner: ModelRunner, num_featured: int, num_steps: int) -> None:
        self._runner = runner
        self._step_id = 0
        self.num_featured = num_featured
        max_total_tokens = NUM_PROMPT_TOKENS + num_steps + 2  # the prompt gives one, and nobody reaches the last
        num_blocks = -(-max_total_tokens // BLOCK_SIZE)
        rng = np.random.default_rng(num_featured)
        limits, admissions = runner.limits, []
        for slot in range(limits.max_num_seqs):
            params = SequenceParams(max_total_tokens=max_total_tokens)
            if slot < num_featured:
                params = every_feature(limits.vocab_size, max_total_tokens)
            prompt = rng.integers(0, limits.vocab_size, NUM_PROMPT_TOKENS, dtype=np.int32)
            table = np.arange(1 + slot * num_blocks, 1 + (slot + 1) * num_blocks, dtype=np.int32)
            admissions.append(Admission(slot, prompt, 0, table, params))
        slots = np.arange(limits.max_num_seqs, dtype=np.int32)
        self._execute(admissions=tuple(admissions), row_counts=_pairs(slots, NUM_PROMPT_TOKENS))
        self._next_counts = _pairs(slots, 1)

    def step(self) -> tuple[float, float]:
        """Milliseconds of the step, and of its sampling."""
        timings = self._execute(row_counts=self._next_counts)
        self._next_counts = np.empty((0, 2), np.int32)
        return timings

    def _execute(self, **changes: object) -> tuple[float, float]:
        self._step_id += 1
        timings = self._runner.execute(StepPlan(1, self._step_id, **changes)).timings  # type: ignore[arg-type]
        return (timings.prepare_ns + timings.forward_ns + timings.sample_ns) / 1e6, timings.sample_ns / 1e6


def _pairs(slots: np.ndarray, count: int) -> np.ndarray:
    return np.stack((slots, np.full_like(slots, count)), axis=1)


def measure(model: str, featured: Sequence[int], num_sequences: int, num_steps: int) -> list[Cost]:
    """One cost for each number of sequences that use every feature."""
    torch.set_num_threads(resolve_num_threads(None))
    total_steps = NUM_WARM_UP_STEPS + num_steps
    num_blocks = 1 + num_sequences * -(-(NUM_PROMPT_TOKENS + total_steps + 2) // BLOCK_SIZE)
    config = ExecutorConfig(
        model=model,
        device="cpu",
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=num_sequences,
        max_num_batched_tokens=num_sequences * NUM_PROMPT_TOKENS,
    )
    batches = []
    for num_featured in featured:
        runner = load_model(config, lambda line: None).runner
        if not isinstance(runner, ModelRunner):
            raise TypeError("measured on the CPU only")
        batches.append(Batch(runner, num_featured, total_steps))
    times = [[batch.step() for batch in batches] for _ in range(total_steps)][NUM_WARM_UP_STEPS:]
    return [
        Cost(batch.num_featured, *(statistics.median(values) for values in zip(*steps, strict=True)))
        for batch, steps in zip(batches, zip(*times, strict=True), strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path(__file__).parents[1] / "models" / "tiny"))
    parser.add_argument("--num-sequences", type=int, default=NUM_SEQUENCES)
    parser.add_argument("--num-steps", type=int, default=NUM_STEPS)
    parser.add_argument("--json", type=Path, help="where the numbers go")
    given = parser.parse_args()
    featured = sorted({0, 1, max(1, given.num_sequences // 4)})
    costs = measure(given.model, featured, given.num_sequences, given.num_steps)
    print(f"{'every feature':>14} {'ms a step':>10} {'of it sampling':>15}")
    for cost in costs:
        print(f"{cost.num_featured:>14} {cost.step_ms:>10.2f} {cost.sample_ms:>15.2f}")
    if given.json is not None:
        save(given.json, {"num_sequences": given.num_sequences, "costs": [asdict(cost) for cost in costs]})


if __name__ == "__main__":
    main()
