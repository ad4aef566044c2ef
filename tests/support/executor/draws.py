"""Draws of many tokens, and the probabilities that they should have."""

from __future__ import annotations

import numpy as np

from executor.slots.sampling_table import Draw, SamplingColumns


def draw(num_rows: int, *, seed: int = 0, banned=(), **params: float) -> Draw:
    """Returns a draw with the same parameters for all rows and random uniforms."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **params}
    return Draw(
        params=SamplingColumns(
            temperature=np.full(num_rows, values["temperature"], np.float32),
            top_k=np.full(num_rows, values["top_k"], np.int32),
            top_p=np.full(num_rows, values["top_p"], np.float32),
            min_p=np.full(num_rows, values["min_p"], np.float32),
        ),
        uniforms=np.random.default_rng(seed).random(num_rows, dtype=np.float32),
        banned=banned,
    )


def expected_probabilities(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Returns the probabilities by definition: a few lines of float64, one cut after the other."""
    probabilities = np.exp((logits - logits.max()) / temperature)
    order = np.lexsort((np.arange(len(logits)), -logits))
    if top_k:
        probabilities[order[top_k:]] = 0
    probabilities /= probabilities.sum()
    if top_p < 1:
        before = np.cumsum(probabilities[order]) - probabilities[order]
        probabilities[order[before >= top_p]] = 0
    probabilities[probabilities < min_p * probabilities.max()] = 0
    return probabilities / probabilities.sum()
