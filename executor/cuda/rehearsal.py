"""Steps as large as the limits allow, run before the first plan: their memory is measured, and libraries prepare."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from executor.cuda.runner import CudaRunner
from executor.plans.limits import PlanLimits
from executor.plans.plan import Admission, SequenceParams, StepPlan

NUM_BLOCKS = 3
"""Blocks that the rehearsal needs: the null block, one that all sequences share, and one that it is copied to."""

_NUM_REPORTED = 20


def rehearse(runner: CudaRunner) -> None:
    """Runs prompts and one decode of as many sequences and tokens as a step may have, once for each way to sample.

    Together these steps allocate what any step can: the model's activations, logits in float32, changed logits, and
    reports on every token of the prompts. The contents of the pool's first blocks are lost.
    """
    for params in _ways_to_sample(runner.limits):
        runner.reset()
        for plan in _plans(runner.limits, params):
            runner.execute(plan).finish()
    runner.reset()


def _ways_to_sample(limits: PlanLimits) -> tuple[dict[str, Any], ...]:
    """Returns parameters for steps that are greedy, drawn, with changed logits and reports, and of beams."""
    num_reported = min(_NUM_REPORTED, limits.vocab_size)
    drawn = {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "eos_token_ids": np.zeros(1, dtype=np.int32)}
    reported = {"repetition_penalty": 1.1, "num_logprobs": num_reported, "num_prompt_logprobs": num_reported}
    return {}, drawn, drawn | reported, {"num_candidates": num_reported} | reported


def _plans(limits: PlanLimits, params: dict[str, Any]) -> Iterator[StepPlan]:
    """Yields the plan of all prompts, then that of one token more for each."""
    lengths = _prompt_lengths(limits)
    slots = np.arange(len(lengths), dtype=np.int32)
    ones = np.ones(len(lengths), dtype=np.int32)
    copies = np.array([[1, 2]] if limits.num_blocks >= NUM_BLOCKS else [], dtype=np.int32).reshape(-1, 2)
    admissions = tuple(_admission(limits, slot, length, params) for slot, length in enumerate(lengths))
    counts = np.array(lengths, dtype=np.int32)
    yield StepPlan(0, 1, admissions=admissions, block_copies=copies, row_counts=np.stack((slots, counts), axis=1))
    decodes = StepPlan(0, 2, row_counts=np.stack((slots, ones), axis=1))
    if "num_candidates" in params:
        decodes = replace(
            decodes, row_counts=decodes.row_counts[:0], branches=np.stack((slots, slots, 0 * ones), axis=1)
        )
    yield decodes


def _prompt_lengths(limits: PlanLimits) -> list[int]:
    """Returns the length of each prompt: at least two tokens where possible, since a single one counts as a decode."""
    num_seqs = min(limits.max_num_seqs, max(1, limits.max_num_batched_tokens // 2))
    length, num_longer = divmod(limits.max_num_batched_tokens, num_seqs)
    longest = max(1, limits.max_model_len - 2)
    return [min(length + (index < num_longer), longest) for index in range(num_seqs)]


def _admission(limits: PlanLimits, slot: int, length: int, params: dict[str, Any]) -> Admission:
    """Returns a sequence whose keys and values all go to block 1, whatever they are."""
    num_blocks = min(-(-(length + 1) // limits.block_size), limits.max_blocks_per_seq)
    return Admission(
        slot=slot,
        token_ids=np.zeros(length, dtype=np.int32),
        num_computed_tokens=0,
        block_table=np.ones(num_blocks, dtype=np.int32),
        params=SequenceParams(
            max_total_tokens=min(length + 2, limits.max_model_len),
            min_total_tokens=length + 1,
            num_prompt_tokens=length,
            **params,
        ),
    )
