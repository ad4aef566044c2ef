"""The logits of one sequence, alone and among many of all kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.executor.plan_driver import LogitsRecorder, PlanDriver

if TYPE_CHECKING:
    import torch

NUM_NEIGHBOURS = 64
NUM_TOKENS = 12


def admit_neighbours(source, driver: PlanDriver) -> None:
    """Admits sequences of all kinds: lengths, chunks, sampling parameters, penalties, reports, and beams that wait."""
    for i in range(NUM_NEIGHBOURS):
        prompt = source.prompt(1 + i % 23, seed=i)
        params = {
            "temperature": (0.0, 0.7, 1.3)[i % 3],
            "top_k": (0, 5)[i % 2],
            "top_p": (1.0, 0.8)[i % 5 == 0],
            "min_p": (0.0, 0.05)[i % 7 == 0],
            "repetition_penalty": (1.0, 1.4)[i % 4 == 1],
            "frequency_penalty": (0.0, 0.5)[i % 6 == 2],
            "num_logprobs": (0, 3)[i % 8 == 3],
            "num_prompt_logprobs": (0, 2)[i % 9 == 4],
            "num_candidates": (0, 4)[i % 16 == 5],
            "num_prompt_tokens": len(prompt),
            "seed": i,
        }
        driver.admit(prompt, 5 + i % 11, max_chunk=3 + i % 7, **params)


def logits_of(source, runner, *, has_neighbours: bool) -> list[torch.Tensor]:
    """Returns the logits of one sequence, step by step."""
    driver, rows = PlanDriver(runner), []
    runner.reset()
    watched = driver.admit(source.prompt(17, seed=99), NUM_TOKENS, max_chunk=5)
    if has_neighbours:
        admit_neighbours(source, driver)
    recorder = LogitsRecorder(runner)
    try:
        while not watched.reason:
            num_before = len(watched.tokens)
            driver.step()
            if len(watched.tokens) > num_before:
                # Logits are in the order of slots, and this sequence has the lowest slot.
                rows.append(recorder.last[0].clone())
            for sequence in [sequence for sequence in driver.sequences if sequence.reason and sequence is not watched]:
                driver.retire(sequence)
    finally:
        runner.model = recorder._model
    assert len(rows) == NUM_TOKENS
    return rows
