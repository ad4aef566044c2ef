"""Attention of `kernels.cpu`, compared with the reference; and its guarantees about equal bits."""

from __future__ import annotations

import itertools
import math
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kernels import cpu, reference
from tests.support.kernels.paged import Paged, assert_close, gathered, paged, pairwise, poisoned

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels import Kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Lengths around the borders of blocks (8, 16, 32), of vectors of scores (32) and of chunks (512); 0 is a padding row.
CONTEXTS = (1, 0, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 175, 255, 256, 257, 300, 511, 512, 513, 600, 1025)

GRID = pairwise(
    head_dim=(64, 80, 96, 128, 256),
    group=(1, 2, 4, 8),
    block_size=(8, 16, 32),
    dtype=DTYPES,
    window=(0, 1, 100, 300, 512),
    num_kv_heads=(1, 2, 3),
    threads=(1, 2),
)


def name(case: dict[str, Any]) -> str:
    return "-".join(str(value).removeprefix("torch.") for value in case.values())


def decoded(kernels: Kernels, query: torch.Tensor, pool: Paged, scale: float, window: int = 0) -> torch.Tensor:
    out = poisoned(*query.shape, dtype=query.dtype)
    kernels.attention_decode(query, pool.kv, pool.block_tables, pool.context_lens, out, scale, window)
    return out


def prefilled(
    kernels: Kernels, query: torch.Tensor, pool: Paged, num_queries: list[int], scale: float, window: int = 0
) -> torch.Tensor:
    starts = torch.tensor([0, *num_queries]).cumsum(0).int()
    out = poisoned(*query.shape, dtype=query.dtype)
    kernels.attention_prefill(query, pool.kv, pool.block_tables, starts, pool.context_lens, out, scale, window)
    return out


def magnitudes(pool: Paged) -> Paged:
    """Returns the pool with the magnitudes of its values."""
    kv = pool.kv.clone()
    kv[:, 1] = kv[:, 1].abs()
    return Paged(kv, pool.block_tables, pool.context_lens)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, expected_magnitude: torch.Tensor) -> None:
    """Checks a result whose weights may have been rounded to bfloat16, as well as the result.

    expected_magnitude is the attention over the magnitudes of the values: the rounding of weights changes a result by
    at most 2 ** -8 of it. Other dtypes keep float32 weights.
    """
    if actual.dtype is not torch.bfloat16:
        assert_close(actual, expected)
        return
    bound = 2**-7 * expected.float().abs() + 2**-8 * 1.02 * expected_magnitude.float() + 2e-5
    finite = expected.isfinite()
    assert torch.equal(actual.isfinite(), finite)
    assert ((actual.float() - expected.float()).abs() <= bound)[finite].all()


@pytest.mark.parametrize("case", GRID, ids=name)
def test_attention_equals_the_reference(case: dict[str, Any]) -> None:
    head_dim, group, block_size, dtype, window, num_kv_heads, threads = case.values()
    pool = paged(CONTEXTS, num_kv_heads=num_kv_heads, block_size=block_size, head_dim=head_dim, dtype=dtype)
    scale = head_dim**-0.5
    num_heads = num_kv_heads * group
    # Queries are one token, a few, half of the prompt or all of it; two padding rows at the end must not change.
    wanted = [1, 1000, 3, 20]
    num_queries = [min(wanted[s % 4], context) for s, context in enumerate(CONTEXTS)]
    one_each = torch.randn(len(CONTEXTS), num_heads, head_dim).to(dtype)
    several = torch.randn(sum(num_queries) + 2, num_heads, head_dim).to(dtype)
    expected_decode = decoded(reference, one_each, pool, scale, window)
    expected_prefill = prefilled(reference, several, pool, num_queries, scale, window)
    sizes = magnitudes(pool)

    torch.set_num_threads(threads)
    result = decoded(cpu, one_each, pool, scale, window)
    assert_near(result, expected_decode, decoded(reference, one_each, sizes, scale, window))
    result = prefilled(cpu, several, pool, num_queries, scale, window)
    assert_near(result, expected_prefill, prefilled(reference, several, sizes, num_queries, scale, window))
    assert result[-2:].isnan().all()
    assert result[:-2].isfinite().all()


@pytest.mark.parametrize("window", [0, 1000])
def test_long_contexts_equal_the_reference(window: int) -> None:
    contexts = [4000, 3, 2305, 1024, 4096]
    pool = paged(contexts, num_kv_heads=2, block_size=16, head_dim=64)
    query = torch.randn(len(contexts), 4, 64)
    expected = decoded(reference, query, pool, 0.125, window)
    torch.set_num_threads(2)
    for _ in range(2):  # the state that the first call leaves must not affect the second
        assert_close(decoded(cpu, query, pool, 0.125, window), expected)
    torch.set_num_threads(1)
    num_queries = [300, 3, 1, 70, 1]
    query = torch.randn(sum(num_queries), 4, 64)
    expected = prefilled(reference, query, pool, num_queries, 0.125, window)
    result = prefilled(cpu, query, pool, num_queries, 0.125, window)
    assert_close(result, expected)


@pytest.mark.parametrize(("head_dim", "block_size", "group"), [(8, 1, 1), (16, 2, 3), (20, 12, 5), (64, 24, 7)])
def test_unusual_shapes_equal_the_reference(head_dim: int, block_size: int, group: int) -> None:
    contexts = [1, 5, 12, 13, 100, 263]
    pool = paged(contexts, num_kv_heads=2, block_size=block_size, head_dim=head_dim)
    query = torch.randn(len(contexts), 2 * group, head_dim)
    assert_close(decoded(cpu, query, pool, 0.2, 40), decoded(reference, query, pool, 0.2, 40))
    num_queries = [1, 5, 1, 13, 7, 200]
    query = torch.randn(sum(num_queries), 2 * group, head_dim)
    expected = prefilled(reference, query, pool, num_queries, 0.2, 40)
    assert_close(prefilled(cpu, query, pool, num_queries, 0.2, 40), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_can_be_views_of_a_fused_projection(dtype: torch.dtype) -> None:
    pool = paged([40, 9], num_kv_heads=2, block_size=16, head_dim=64, dtype=dtype)
    fused = torch.randn(2, 8, 64).to(dtype)
    query = fused[:, :4]
    wide_out = poisoned(2, 6, 64, dtype=dtype)
    cpu.attention_decode(query, pool.kv, pool.block_tables, pool.context_lens, wide_out[:, 1:5], 0.125)
    expected = decoded(reference, query.contiguous(), pool, 0.125)
    expected_magnitude = decoded(reference, query.contiguous(), magnitudes(pool), 0.125)
    assert_near(wide_out[:, 1:5], expected, expected_magnitude)
    assert wide_out[:, [0, 5]].isnan().all()


def test_a_layer_of_a_pool_is_read_in_place() -> None:
    pool = paged([100, 33], num_kv_heads=2, block_size=16, head_dim=64)
    layers = torch.full((3, *pool.kv.shape), torch.nan)
    layers[1] = pool.kv
    query, out = torch.randn(2, 4, 64), poisoned(2, 4, 64)
    cpu.attention_decode(query, layers[1], pool.block_tables, pool.context_lens, out, 0.125)
    assert torch.equal(out, decoded(cpu, query, pool, 0.125))


def test_sequences_can_share_blocks() -> None:
    pool = paged([64, 64], num_kv_heads=1, block_size=16, head_dim=64)
    pool.block_tables[1, :3] = pool.block_tables[0, :3]
    query = torch.randn(2, 2, 64)
    assert_close(decoded(cpu, query, pool, 0.125), decoded(reference, query, pool, 0.125))


def test_large_scores_neither_overflow_nor_vanish() -> None:
    pool = paged([30, 300, 17], num_kv_heads=1, block_size=16, head_dim=64)
    query = torch.randn(3, 2, 64) * 300
    result = decoded(cpu, query, pool, 1.0)
    torch.testing.assert_close(result, decoded(reference, query, pool, 1.0), rtol=1e-3, atol=1e-3)


def test_many_small_weights_add_up() -> None:
    pool = paged([4000], num_kv_heads=1, block_size=16, head_dim=64)
    first = pool.kv[int(pool.block_tables[0, 0]), :, 0, 0]
    pool.kv[:, 0] = 0
    pool.kv[:, 1] = 1
    first[0, 0], first[1] = 14.5, 0  # all but 0.2 % of the weight is on the first token, whose value is 0
    query = torch.eye(64)[:1].unsqueeze(0)
    expected = torch.full((1, 1, 64), 1 / (1 + math.exp(14.5) / 3999))
    torch.testing.assert_close(decoded(cpu, query, pool, 1.0), expected, rtol=1e-5, atol=0)


def test_a_nan_key_affects_only_its_own_sequence() -> None:
    pool = paged([300, 300], num_kv_heads=1, block_size=16, head_dim=64)
    query = torch.randn(2, 2, 64)
    sound = decoded(cpu, query, pool, 0.125)
    pool.kv[int(pool.block_tables[0, 4]), 0, 0, 3, 5] = torch.nan
    broken = decoded(cpu, query, pool, 0.125)
    assert broken[0].isnan().all()
    assert torch.equal(broken[1], sound[1])


def test_a_nan_query_affects_only_its_own_row() -> None:
    pool = paged([300, 20, 300, 600], num_kv_heads=1, block_size=16, head_dim=64)
    query = torch.randn(4, 2, 64)
    sound = decoded(cpu, query, pool, 0.125)
    query[0, 0], query[1, 1] = torch.nan, torch.nan
    broken = decoded(cpu, query, pool, 0.125)
    expected = torch.tensor([[True, False], [False, True], [False, False], [False, False]])
    assert torch.equal(broken.isnan().all(dim=-1), expected)
    assert torch.equal(broken[~expected], sound[~expected])


def test_empty_inputs_are_accepted() -> None:
    pool = paged([], num_kv_heads=2, block_size=16, head_dim=64)
    none = torch.empty(0, 4, 64)
    assert decoded(cpu, none, pool, 1.0).shape == none.shape
    assert prefilled(cpu, none, pool, [], 1.0).shape == none.shape


@pytest.mark.parametrize("window", [0, 90])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype, window: int) -> None:
    contexts = [1, 33, 256, 257, 700, 0, 1500]
    pool = paged(contexts, num_kv_heads=2, block_size=16, head_dim=80, dtype=dtype)
    query = torch.randn(len(contexts), 6, 80).to(dtype)
    together = decoded(cpu, query, pool, 0.1, window)
    torch.set_num_threads(2)
    assert torch.equal(decoded(cpu, query, pool, 0.1, window), together)
    torch.set_num_threads(1)
    for s, context_len in enumerate(contexts):
        width = max(1, -(-context_len // 16))
        alone = Paged(pool.kv, pool.block_tables[s : s + 1, :width], pool.context_lens[s : s + 1])
        assert torch.equal(decoded(cpu, query[s : s + 1], alone, 0.1, window)[0], together[s])


@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "window"),
    [(64, 2, 16, 0), (80, 3, 8, 70), (128, 8, 32, 300), (64, 1, 16, 0)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompt_has_the_same_bits_in_any_split(
    head_dim: int, group: int, block_size: int, window: int, dtype: torch.dtype
) -> None:
    length = 1030
    pool = paged([length], num_kv_heads=2, block_size=block_size, head_dim=head_dim, dtype=dtype)
    query = torch.randn(length, 2 * group, head_dim).to(dtype)
    whole = prefilled(cpu, query, pool, [length], 0.1, window)
    expected = prefilled(reference, query, pool, [length], 0.1, window)
    assert_near(whole, expected, prefilled(reference, query, magnitudes(pool), [length], 0.1, window))

    cuts = [0, 1, 4, 37, 256, 257, 300, 511, 513, 700, 1023, 1025, 1029, 1030]
    for start, stop in itertools.pairwise(cuts):
        so_far = Paged(pool.kv, pool.block_tables, torch.tensor([stop], dtype=torch.int32))
        piece = prefilled(cpu, query[start:stop], so_far, [stop - start], 0.1, window)
        assert torch.equal(piece, whole[start:stop])
        last = decoded(cpu, query[stop - 1 : stop], so_far, 0.1, window)
        assert torch.equal(last, whole[stop - 1 : stop])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_end_of_a_prompt_of_100_000_tokens_has_the_same_bits_in_any_split(dtype: torch.dtype) -> None:
    """The shape is that of the embedded model; the blocks lie at random places of a pool of 6,253."""
    length, num_queries, scale = 100_000, 67, 0.18
    pool = paged([length], num_kv_heads=3, block_size=16, head_dim=32, dtype=dtype)
    query = torch.randn(num_queries, 6, 32).to(dtype)
    whole = prefilled(cpu, query, pool, [num_queries], scale)
    first = length - num_queries
    for start, stop in itertools.pairwise([0, 1, 18, 50, 66, 67]):
        so_far = Paged(pool.kv, pool.block_tables, torch.tensor([first + stop], dtype=torch.int32))
        piece = prefilled(cpu, query[start:stop], so_far, [stop - start], scale)
        assert torch.equal(piece, whole[start:stop])
    torch.set_num_threads(2)
    assert torch.equal(decoded(cpu, query[-1:], pool, scale), whole[-1:])
    torch.set_num_threads(1)

    keys, values = (part.double() for part in gathered(pool, 0))
    for head in range(6):
        weights = torch.softmax(scale * (keys[:, head // 2] @ query[-1, head].double()), 0)
        expected = weights @ values[:, head // 2]
        torch.testing.assert_close(whole[-1, head].double(), expected, rtol=2e-2, atol=1e-4)


def test_callers_on_several_threads_do_not_interfere() -> None:
    pools = [paged([1500, 40 + i], num_kv_heads=2, block_size=16, head_dim=64) for i in range(3)]
    queries = [torch.randn(2, 4, 64) for _ in pools]
    expected = [decoded(cpu, query, pool, 0.125) for query, pool in zip(queries, pools, strict=True)]
    same: list[bool] = []

    def hammer(i: int) -> None:
        torch.set_num_threads(2)
        same.extend(torch.equal(decoded(cpu, queries[i], pools[i], 0.125), expected[i]) for _ in range(20))

    callers = [threading.Thread(target=hammer, args=(i,)) for i in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert same == [True] * 60


@pytest.mark.parametrize(
    "spoil",
    [
        lambda p, q, o: (q, p.kv, p.block_tables.long(), p.context_lens, o),
        lambda p, q, o: (q, p.kv, p.block_tables, p.context_lens.long(), o),
        lambda p, q, o: (q.half(), p.kv, p.block_tables, p.context_lens, o),
        lambda p, q, o: (q, p.kv, p.block_tables, p.context_lens, o.bfloat16()),
        lambda p, q, o: (q, p.kv.transpose(3, 4), p.block_tables, p.context_lens, o),
        lambda p, q, o: (q.transpose(1, 2), p.kv, p.block_tables, p.context_lens, o),
        lambda p, q, o: (q.double(), p.kv.double(), p.block_tables, p.context_lens, o.double()),
    ],
)
def test_unsupported_layouts_are_refused(spoil: Callable[..., tuple[Any, ...]]) -> None:
    pool = paged([20], num_kv_heads=2, block_size=64, head_dim=64)
    query, out = torch.randn(1, 64, 64), poisoned(1, 64, 64)
    with pytest.raises((TypeError, ValueError)):
        cpu.attention_decode(*spoil(pool, query, out), 0.125)  # type: ignore[call-arg]
