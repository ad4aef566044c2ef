"""The cost of sampling in a batch.

    python -m bench sampling-cost              # the embedded model; --model DIRECTORY for another

64 sequences decode in this process, in five batches: all greedy; all with a temperature; all with a temperature and
top-p, as most clients request; one sequence with every feature of sampling and the others greedy; a quarter with every
feature. Every feature means a temperature, all cuts and penalties, a bias, a list of allowed tokens, a minimum length,
log-probabilities and several stop ids. The steps of the batches alternate, so that changes of the machine's
speed affect all of them. The figures are medians.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from bench.command_line import Parser
from bench.machine import describe_machine
from bench.report import save
from executor.config import ExecutorConfig
from executor.device.device import resolve_num_threads
from executor.device.runner import ModelRunner
from executor.loading import load_model
from executor.plans.plan import Admission, SequenceParams, StepPlan
from quire.model_path import resolved_model

NUM_SEQUENCES = 64
NUM_PROMPT_TOKENS = 24
NUM_WARM_UP_STEPS = 8
NUM_STEPS = 200
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Cost:
    """Median milliseconds of a decode step and of its sampling, with `num_sequences` of a kind, the others greedy."""

    kind: str
    num_sequences: int
    step_ms: float
    sample_ms: float


def every_feature(vocab_size: int, max_total_tokens: int) -> SequenceParams:
    """Returns parameters that use every feature, allow half of the vocabulary, and end no sequence early."""
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


def with_temperature(vocab_size: int, max_total_tokens: int) -> SequenceParams:
    return SequenceParams(max_total_tokens=max_total_tokens, temperature=0.8, seed=7)


def with_top_p(vocab_size: int, max_total_tokens: int) -> SequenceParams:
    return SequenceParams(max_total_tokens=max_total_tokens, temperature=0.8, top_p=0.95, seed=7)


KINDS: dict[str, Callable[[int, int], SequenceParams]] = {
    "temperature": with_temperature,
    "temperature, top-p": with_top_p,
    "every feature": every_feature,
}
"""Functions of the vocabulary size and the number of tokens."""


class Batch:
    """A runner whose slots decode, some of them with parameters of a kind."""

    def __init__(self, runner: ModelRunner, kind: str, num_sampled: int, num_steps: int) -> None:
        self._runner = runner
        self._step_id = 0
        self.kind, self.num_sampled = kind, num_sampled
        # The prompt yields one token, and no sequence reaches its maximum length.
        max_total_tokens = NUM_PROMPT_TOKENS + num_steps + 2
        num_blocks = -(-max_total_tokens // BLOCK_SIZE)
        rng = np.random.default_rng(num_sampled)
        limits, admissions = runner.limits, []
        for slot in range(limits.max_num_seqs):
            params = SequenceParams(max_total_tokens=max_total_tokens)
            if slot < num_sampled:
                params = KINDS[kind](limits.vocab_size, max_total_tokens)
            prompt = rng.integers(0, limits.vocab_size, NUM_PROMPT_TOKENS, dtype=np.int32)
            table = np.arange(1 + slot * num_blocks, 1 + (slot + 1) * num_blocks, dtype=np.int32)
            admissions.append(Admission(slot, prompt, 0, table, params))
        slots = np.arange(limits.max_num_seqs, dtype=np.int32)
        self._execute(admissions=tuple(admissions), row_counts=_pairs(slots, NUM_PROMPT_TOKENS))
        self._next_counts = _pairs(slots, 1)

    def step(self) -> tuple[float, float]:
        """Runs a step and returns its milliseconds, and those of its sampling."""
        timings = self._execute(row_counts=self._next_counts)
        self._next_counts = np.empty((0, 2), np.int32)
        return timings

    def _execute(self, **changes: object) -> tuple[float, float]:
        self._step_id += 1
        timings = self._runner.execute(StepPlan(1, self._step_id, **changes)).timings  # type: ignore[arg-type]
        return (timings.prepare_ns + timings.forward_ns + timings.sample_ns) / 1e6, timings.sample_ns / 1e6


def _pairs(slots: np.ndarray, count: int) -> np.ndarray:
    return np.stack((slots, np.full_like(slots, count)), axis=1)


def measure(model: str, wanted: Sequence[tuple[str, int]], num_sequences: int, num_steps: int) -> list[Cost]:
    """Measures each kind and number of sequences."""
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
    for kind, num_sampled in wanted:
        runner = load_model(config, lambda line: None).runner
        if not isinstance(runner, ModelRunner):
            raise TypeError("measured on the CPU only")
        batches.append(Batch(runner, kind, num_sampled, total_steps))
    times = [[batch.step() for batch in batches] for _ in range(total_steps)][NUM_WARM_UP_STEPS:]
    return [
        Cost(batch.kind, batch.num_sampled, *(statistics.median(values) for values in zip(*steps, strict=True)))
        for batch, steps in zip(batches, zip(*times, strict=True), strict=True)
    ]


def main(arguments: Sequence[str]) -> None:
    parser = Parser("sampling-cost", __doc__)
    parser.add_argument("--model", help="directory or hub id of the model (default: the embedded one)")
    parser.add_argument("--num-sequences", type=int, default=NUM_SEQUENCES)
    parser.add_argument("--num-steps", type=int, default=NUM_STEPS)
    parser.add_argument("--json", type=Path, help="file of results")
    given = parser.parse_args(arguments)
    all_of_them, few = given.num_sequences, max(1, given.num_sequences // 4)
    wanted = [("every feature", 0), ("temperature", all_of_them), ("temperature, top-p", all_of_them)]
    wanted += [("every feature", number) for number in sorted({1, few})]
    costs = measure(resolved_model(given.model), wanted, given.num_sequences, given.num_steps)
    print(f"{'':>18} {'sequences':>9} {'ms/step':>10} {'in sampling':>15}")
    for cost in costs:
        kind = cost.kind if cost.num_sequences else "greedy"
        print(f"{kind:>18} {cost.num_sequences:>9} {cost.step_ms:>10.2f} {cost.sample_ms:>15.2f}")
    if given.json is not None:
        result = {"num_sequences": given.num_sequences, "costs": [asdict(cost) for cost in costs]}
        save(given.json, {"machine": describe_machine(None), **result})
