"""The sampler against its definition, and its distribution against the probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor.plans.plan import SequenceParams
from executor.sampling.sampler import sample
from executor.slots.sampling_table import Draw, SamplingTable
from tests.support.executor.draws import draw, expected_probabilities
from tests.support.executor.plan_driver import ints

NUM_DRAWS = 20_000


CUTS = {
    "plain": {},
    "cool": {"temperature": 0.6},
    "hot": {"temperature": 2.5},
    "top_k": {"top_k": 4},
    "top_k beyond the vocabulary's end": {"top_k": 29},
    "top_p": {"top_p": 0.7},
    "top_p, tiny": {"top_p": 1e-6},
    "top_p, nearly all": {"top_p": 0.9999},
    "min_p": {"min_p": 0.15},
    "min_p 1": {"min_p": 1.0},
    "all of them": {"temperature": 1.7, "top_k": 12, "top_p": 0.85, "min_p": 0.05},
    "top_k and top_p": {"top_k": 5, "top_p": 0.5},
}


@pytest.mark.parametrize("name", CUTS)
def test_tokens_follow_the_distribution(name) -> None:
    logits = np.random.default_rng(5).normal(0, 1.6, 30).astype(np.float32)
    expected = expected_probabilities(logits.astype(np.float64), **CUTS[name])
    token_ids = sample(torch.from_numpy(logits).expand(NUM_DRAWS, 30).clone(), draw(NUM_DRAWS, **CUTS[name]))
    counts = np.bincount(token_ids, minlength=30)
    assert not counts[expected == 0].any(), "a token that was cut off"
    possible = expected > 0
    chi_square = ((counts - NUM_DRAWS * expected)[possible] ** 2 / (NUM_DRAWS * expected[possible])).sum()
    degrees = possible.sum() - 1
    # Six standard deviations above the mean. The uniforms are fixed, so the outcome never varies.
    assert chi_square <= degrees + 6 * np.sqrt(2 * degrees)


def test_ties_are_cut_by_id() -> None:
    flat = torch.zeros(2000, 8)
    assert set(sample(flat, draw(2000, top_k=3))) == {0, 1, 2}
    assert set(sample(flat, draw(2000, top_p=0.5))) == {0, 1, 2, 3}
    assert set(sample(flat, draw(2000, top_k=3, min_p=1.0))) == {0, 1, 2}
    assert set(sample(flat, draw(2000, min_p=1.0))) == set(range(8))
    flat[:, 1::2] = -0.0
    assert set(sample(flat, draw(2000, top_k=2))) == {0, 1}


def test_the_crossing_token_is_kept() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(2000, 3).clone()
    assert set(sample(logits, draw(2000, top_p=0.6))) == {0, 1}
    assert set(sample(logits, draw(2000, top_p=0.4))) == {0}


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    assert sample(logits, draw(2, temperature=0.0)).tolist() == [1, 0]
    mixed = draw(2)
    mixed.params.temperature[0] = 0
    assert sample(logits.clone(), mixed)[0] == 1


def test_banned_tokens_are_never_sampled() -> None:
    logits = torch.zeros(500, 4)
    logits[:, 2] = 9.0
    for params in ({"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.9}):
        banned = tuple((row, ints(2, 0)) for row in range(500))
        assert 2 not in sample(logits.clone(), draw(500, banned=banned, **params))
        assert 0 not in sample(logits.clone(), draw(500, banned=banned, **params))


def test_rows_without_allowed_tokens_still_get_a_token_id() -> None:
    banned = ((0, ints(0, 1, 2)),)
    for params in ({"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.9}, {"top_k": 1}):
        assert 0 <= sample(torch.zeros(1, 3), draw(1, banned=banned, **params))[0] < 3


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 1e30])
def test_extreme_temperatures(temperature) -> None:
    logits = torch.tensor([[-80.0, 90.0, 3.0]]).repeat(300, 1)
    for cut in ({}, {"top_p": 0.9}, {"top_k": 2}):
        token_ids = set(sample(logits.clone(), draw(300, temperature=temperature, **cut)))
        assert token_ids == {1} if temperature < 1 else token_ids <= {0, 1, 2}


def test_flat_distributions_over_a_large_vocabulary() -> None:
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 0.1, (40, 5000)).astype(np.float32))
    token_ids = sample(logits.clone(), draw(40, top_p=0.95))
    for row, token_id in enumerate(token_ids):
        assert expected_probabilities(logits[row].double().numpy(), top_p=0.95)[token_id] > 0
    assert len(set(token_ids.tolist())) > 30
    ranks = (logits > logits[torch.arange(40), torch.from_numpy(token_ids).long()].unsqueeze(1)).sum(dim=1)
    assert ranks.max() > 3000


def test_a_row_does_not_depend_on_the_batch() -> None:
    """Samples rows with all kinds of parameters alone and together, in any order."""
    generator = np.random.default_rng(3)
    logits = torch.from_numpy(generator.normal(0, 2, (24, 600)).astype(np.float32))
    all_rows = draw(24)
    all_rows.params.temperature[:] = generator.choice([0.0, 0.7, 1.3], 24)
    all_rows.params.top_k[:] = generator.choice([0, 3, 300], 24)
    all_rows.params.top_p[:] = generator.choice([1.0, 0.5, 0.99], 24)
    all_rows.params.min_p[:] = generator.choice([0.0, 0.1], 24)
    together = sample(logits.clone(), all_rows)

    def pick(rows: np.ndarray) -> np.ndarray:
        part = Draw(all_rows.params.take(rows), all_rows.uniforms[rows])
        return sample(logits[torch.from_numpy(rows)].clone(), part)

    assert np.concatenate([pick(np.array([row])) for row in range(24)]).tolist() == together.tolist()
    order = generator.permutation(24)
    assert pick(order).tolist() == together[order].tolist()


def test_the_table_returns_what_was_set() -> None:
    table = SamplingTable(4, vocab_size=50)
    table.set(2, SequenceParams(30, 12, 0.5, 60, 0.25, 0.125, 9, ints(3), ints(4, 5)))
    table.copy_slots(ints(2), ints(0))
    table.set_seeds(ints(0), np.array([10], dtype=np.uint64))
    drawn = table.draw(ints(0, 2), ints(11, 12))
    assert drawn.params.temperature.tolist() == [0.5, 0.5]
    assert drawn.params.top_k.tolist() == [0, 0], "a top_k of the vocabulary or more cuts nothing"
    assert (drawn.params.top_p.tolist(), drawn.params.min_p.tolist()) == ([0.25] * 2, [0.125] * 2)
    assert [(row, sorted(ids.tolist())) for row, ids in drawn.banned] == [(0, [3, 4, 5])]
    assert drawn.uniforms[0] != table.draw(ints(2), ints(11)).uniforms[0]
    assert table.end_reasons(ints(0, 2, 0, 2), ints(3, 5, 6, 6), ints(30, 30, 29, 30)).tolist() == [
        1,
        3,
        0,
        2,
    ]
