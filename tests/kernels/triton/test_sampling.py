"""Sampling of `kernels.triton`, compared with the definition in float64 and with the CPU kernel."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from kernels import cpu
from kernels import triton as triton_kernels
from kernels.triton import STATE_FIELDS, StateField
from tests.support.kernels.drawing import UNIFORMS, Row, logits_of
from tests.support.triton.places import DEVICE, DTYPES, IS_GPU


class Columns:
    """The parameters of each row. Slots have another order than rows, and one slot belongs to no row."""

    def __init__(self, rows: list[tuple[float, int, float, float, float]]) -> None:
        temperatures, top_ks, top_ps, min_ps, uniforms = zip(*rows, strict=True)
        self.temperatures = np.array(temperatures, np.float32)
        self.top_ks = np.array(top_ks, np.int32)
        self.top_ps = np.array(top_ps, np.float32)
        self.min_ps = np.array(min_ps, np.float32)
        self.uniforms = np.array(uniforms, np.float32)

    def of_cpu(self) -> tuple[np.ndarray, ...]:
        return self.temperatures, self.top_ks, self.top_ps, self.min_ps, self.uniforms

    def draw(self, logits: torch.Tensor) -> list[int]:
        num_rows = len(logits)
        slots = num_rows - np.arange(num_rows, dtype=np.int32)
        states = np.full((num_rows + 1, STATE_FIELDS), -1, np.int32)
        states[slots, StateField.TOP_K] = self.top_ks
        floats = states.view(np.float32)
        floats[slots, StateField.TEMPERATURE] = self.temperatures
        floats[slots, StateField.TOP_P] = self.top_ps
        floats[slots, StateField.MIN_P] = self.min_ps
        token_ids = torch.full((num_rows + 1,), -7, dtype=torch.int32, device=DEVICE)
        logits = logits.to(DEVICE)
        triton_kernels.choose_greedily(logits, token_ids[:num_rows])
        triton_kernels.draw_tokens(
            logits,
            torch.from_numpy(states).to(DEVICE),
            torch.from_numpy(slots).to(DEVICE),
            torch.from_numpy(self.uniforms).to(DEVICE),
            token_ids[:num_rows],
        )
        assert int(token_ids[-1]) == -7
        return [int(token_id) for token_id in token_ids[:-1]]


@pytest.mark.parametrize(
    ("kind", "size"),
    [*product(("random", "ties", "flat", "one peak", "holes", "wide"), (17, 1100)), ("ties", 1), ("ties", 1024)],
)
def test_each_row_is_cut_and_drawn_as_defined(kind: str, size: int) -> None:
    ways = list(product((0.3, 40.0), sorted({0, 1, size // 2, size}), (1.0, 0.6, 1e-6), (0.0, 0.2)))
    ways = [ways[place] for place in np.random.default_rng(size).permutation(len(ways))[: None if IS_GPU else 10]]
    rows = [(*way, UNIFORMS[place % len(UNIFORMS)]) for place, way in enumerate(ways)]
    given, logits = Columns(rows), logits_of(kind, len(ways), size)
    exact = logits.double().numpy()
    for row, chosen in enumerate(given.draw(logits)):
        temperature, top_k, top_p, min_p, uniform = (float(column[row]) for column in given.of_cpu())
        Row(exact[row], temperature, int(top_k), top_p, min_p).check(chosen, uniform)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_equal_those_of_the_cpu(dtype: torch.dtype) -> None:
    """The tokens do not depend on the parameters and the places of other rows."""
    num_rows, random = 60 if IS_GPU else 12, np.random.default_rng(3)
    wide = logits_of("ties" if dtype is torch.float16 else "random", num_rows, 1600).to(dtype)
    logits = wide[:, 100:1400]
    given = Columns(
        [
            (
                random.choice([0.0, 0.5, 1.0, 3.0]),
                random.choice([0, 0, 7, 300]),
                random.choice([1.0, 0.9, 0.4]),
                random.choice([0.0, 0.1]),
                random.random(),
            )
            for _ in range(num_rows)
        ]
    )
    expected = cpu.sample(logits, np.arange(num_rows), *given.of_cpu()).tolist()
    assert given.draw(wide.to(DEVICE)[:, 100:1400]) == expected


def test_a_draw_never_selects_a_token_that_was_cut() -> None:
    """The share is close to 1, and the sums of the weights round differently in every order."""
    logits = torch.randn(8, 1500, generator=torch.Generator().manual_seed(5)).mul(0.01)
    top_ks = [1 + 137 * row for row in range(8)]
    given = Columns([(1.0, top_k, 1.0, 0.0, 1 - 2**-24) for top_k in top_ks])
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    for row, (chosen, top_k) in enumerate(zip(given.draw(logits), top_ks, strict=True)):
        rank = int((order[row] == chosen).nonzero()[0])
        assert max(0, top_k - 3) <= rank < top_k


def test_a_top_p_close_to_one_keeps_all_equal_logits_that_top_k_keeps() -> None:
    """The weights of these tokens, added up in another order, can stay below the share that top-p asks for."""
    top_ks = (125, 517, 628, 675, 875, 1231)
    logits = torch.full((len(top_ks), 1500), -6.0)
    for row, top_k in enumerate(top_ks):
        logits[row, 1:top_k] = -1.06
    logits[:, 0] = 0.0
    given = Columns([(1.0, top_k, 1 - 2**-23, 0.0, 0.6) for top_k in top_ks])
    for row, (chosen, top_k) in enumerate(zip(given.draw(logits), top_ks, strict=True)):
        Row(logits[row].double().numpy(), 1.0, top_k, 1 - 2**-23, 0.0).check(chosen, 0.6)


def test_equal_logits_are_cut_by_id() -> None:
    logits = torch.zeros(6, 2100)
    logits[:, 5] = -0.0
    given = Columns([(1.0, top_k, 1.0, 0.0, 1 - 2**-24) for top_k in (1, 2, 6, 1024, 1025, 2100)])
    assert given.draw(logits) == [0, 1, 5, 1023, 1024, 2099]


def test_nan_is_never_drawn() -> None:
    """NaN has no weight; a row of only NaN or only -inf gets the first id."""
    logits = torch.full((4, 1500), torch.nan)
    logits[1] = -torch.inf
    logits[2, ::2] = torch.inf
    logits[3, 1300] = -4.0
    for temperature, top_k, top_p, min_p in ((1e-40, 0, 1.0, 0.0), (1.0, 3, 0.5, 0.5), (3e38, 0, 0.5, 0.0)):
        nothing, empty, infinite, only = Columns([(temperature, top_k, top_p, min_p, 0.999)] * 4).draw(logits)
        assert (nothing, empty, only) == (0, 0, 1300)
        assert infinite % 2 == 0


def test_no_rows_draw_nothing() -> None:
    empty = torch.empty(0, dtype=torch.int32, device=DEVICE)
    states = torch.zeros(1, STATE_FIELDS, dtype=torch.int32, device=DEVICE)
    triton_kernels.draw_tokens(torch.empty(0, 9, device=DEVICE), states, empty, empty.float(), empty)
