"""The sampling kernel, compared with the definition in float64 for every combination of cuts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest
import torch

from kernels.cpu import sampling
from kernels.cpu.sampling import sample
from tests.support.kernels.drawing import UNIFORMS, Row, logits_of

SIZES = (1, 2, 15, 17, 255, 257, 6000)


def columns(num_rows: int, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[np.ndarray, ...]:
    return (
        np.full(num_rows, temperature, np.float32),
        np.full(num_rows, top_k, np.int32),
        np.full(num_rows, top_p, np.float32),
        np.full(num_rows, min_p, np.float32),
        np.resize(np.array(UNIFORMS, np.float32), num_rows),
    )


@pytest.fixture(autouse=True)
def _poisoned_scratch() -> None:
    sampling._scratch.memory[:] = 0xFF


@pytest.mark.parametrize("kind", ["random", "ties", "flat", "one peak", "holes", "wide"])
@pytest.mark.parametrize("size", SIZES)
def test_each_row_is_cut_and_drawn_as_defined(kind: str, size: int) -> None:
    logits = logits_of(kind, len(UNIFORMS), size)
    top_ks = {0, 1, 2, size // 2, size - 1, size} if size > 1 else {0, 1}
    for temperature, top_k, top_p, min_p in product(
        (0.3, 1.0, 40.0), sorted(top_ks), (1.0, 0.999, 0.6, 1e-6), (0.0, 0.2, 1.0)
    ):
        given = columns(len(UNIFORMS), temperature, top_k, top_p, min_p)
        chosen = sample(logits, np.arange(len(UNIFORMS)), *given)
        for row, uniform in enumerate(given[-1].tolist()):
            exact = Row(logits[row].double().numpy(), float(given[0][0]), top_k, float(given[2][0]), float(given[3][0]))
            exact.check(int(chosen[row]), uniform)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_do_not_depend_on_each_other(dtype: torch.dtype) -> None:
    """A row gets the same token alone, with others, on one or two threads, and in strided rows."""
    random = np.random.default_rng(3)
    wide = torch.randn(60, 9000, generator=torch.Generator().manual_seed(1)).mul(4).to(dtype)
    logits = wide[:, 100:8100]
    given = (
        random.choice(np.array([0.0, 0.5, 1.0, 3.0], np.float32), 60),
        random.choice(np.array([0, 0, 7, 300], np.int32), 60),
        random.choice(np.array([1.0, 0.9, 0.4], np.float32), 60),
        random.choice(np.array([0.0, 0.1], np.float32), 60),
        random.random(60, np.float32),
    )
    at_once = sample(logits, np.arange(60), *given)
    assert sample(logits.contiguous(), np.arange(60), *given).tolist() == at_once.tolist()
    assert [int(sample(logits, np.array([row]), *given)[0]) for row in range(60)] == at_once.tolist()
    some = random.permutation(60)[:25]
    assert sample(logits, some, *given).tolist() == at_once[some].tolist()
    assert sample(logits.float(), np.arange(60), *given).tolist() == at_once.tolist()
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(num_threads, 2))
        assert sample(logits, np.arange(60), *given).tolist() == at_once.tolist()
    finally:
        torch.set_num_threads(num_threads)


def test_temperature_zero_takes_the_lowest_id_of_the_greatest_logit() -> None:
    logits = logits_of("ties", 50, 999)
    chosen = sample(logits, np.arange(50), *columns(50, 0.0, 5, 0.5, 0.1))
    assert chosen.tolist() == logits.numpy().argmax(axis=-1).tolist()


@pytest.mark.parametrize("size", [1, 40, 5000])
def test_nan_still_gives_a_token(size: int) -> None:
    """The result has no meaning, but no memory outside the arrays may be touched."""
    logits = torch.full((4, size), torch.nan)
    logits[1] = -torch.inf
    logits[2] = torch.inf
    logits[3, ::2] = torch.inf
    scratch = sampling._scratch
    fields = scratch.fields(size)
    scratch.memory = np.full(fields["seat_bytes"] + 4096, 0xA5, np.uint8)
    for temperature, top_k, top_p, min_p in product((0.0, 1e-40, 1.0, 3e38), (0, 3), (1.0, 0.5), (0.0, 0.5)):
        chosen = sample(logits, np.arange(4), *columns(4, temperature, top_k, top_p, min_p))
        assert ((chosen >= 0) & (chosen < size)).all()
    assert (scratch.memory[-4096:] == 0xA5).all()


def test_callers_on_two_threads_have_separate_scratch_memory() -> None:
    logits = torch.randn(20, 3000)
    given = columns(20, 1.0, 40, 0.9, 0.0)
    expected = sample(logits, np.arange(20), *given).tolist()

    def again(size: int) -> bool:
        found = [sample(logits[:, :size], np.arange(20), *given).tolist() for _ in range(40)]
        return all(each == found[0] for each in found) and (size < 3000 or found[0] == expected)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(again, [3000, 17, 3000, 900]))


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.zeros(3, 4), np.empty(0, np.int64), *columns(3, 1.0, 0, 1.0, 0.0)).size == 0


def test_unsupported_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        sample(torch.zeros(4, 3).T, np.arange(3), *columns(3, 1.0, 0, 1.0, 0.0))
    with pytest.raises(ValueError, match="rows 1 to 3 of 3"):
        sample(torch.zeros(3, 4), np.array([1, 3]), *columns(3, 1.0, 0, 1.0, 0.0))
    with pytest.raises(ValueError, match="parameters of 3 rows"):
        sample(torch.zeros(3, 4), np.arange(3), *columns(2, 1.0, 0, 1.0, 0.0))
    with pytest.raises(TypeError, match="float64"):
        sample(torch.zeros(3, 4, dtype=torch.float64), np.arange(3), *columns(3, 1.0, 0, 1.0, 0.0))
