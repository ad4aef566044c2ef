"""Attention of `kernels.triton`, compared with the reference; and its guarantees about equal bits."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kernels import AttentionShape, reference
from kernels import triton as triton_kernels
from kernels.triton.tuning import DecodeTuning, prefill_tuning
from tests.support.kernels.paged import NO_BLOCK, Paged, paged, pairwise, poisoned
from tests.support.triton.places import DEVICE, DTYPES, IS_GPU, assert_attended, on_device, on_gpu_only

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels import Kernels

# Lengths around the borders of blocks (8, 16, 32), tiles (32, 64, 128) and chunks (256, 512); 0 is a padding row.
CONTEXTS = (
    (1, 0, 2, 7, 8, 9, 513, 64),
    (15, 16, 17, 31, 0, 255, 256, 257),
    (32, 33, 63, 65, 127, 128, 129, 700),
)

GRID = pairwise(
    head_dim=(64, 80, 96, 128, 256),
    group=(1, 2, 4, 8, 7),
    block_size=(8, 16, 32),
    dtype=DTYPES,
    window=(0, 1, 100, 300),
    num_kv_heads=(1, 2, 3),
    contexts=CONTEXTS,
)


def name(case: dict[str, Any]) -> str:
    return "-".join(str(value).removeprefix("torch.") for key, value in case.items() if key != "contexts")


def decoded(kernels: Kernels, query: torch.Tensor, pool: Paged, scale: float, window: int = 0) -> torch.Tensor:
    out = poisoned(*query.shape, dtype=query.dtype).to(DEVICE)
    kernels.attention_decode(query, pool.kv, pool.block_tables, pool.context_lens, out, scale, window)
    return out


def prefilled(
    kernels: Kernels, query: torch.Tensor, pool: Paged, num_queries: list[int], scale: float, window: int = 0
) -> torch.Tensor:
    starts = torch.tensor([0, *num_queries]).cumsum(0).int().to(DEVICE)
    out = poisoned(*query.shape, dtype=query.dtype).to(DEVICE)
    kernels.attention_prefill(query, pool.kv, pool.block_tables, starts, pool.context_lens, out, scale, window)
    return out


def queries(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).to(DEVICE)


@pytest.mark.parametrize("case", GRID, ids=name)
def test_decode_equals_the_reference(case: dict[str, Any]) -> None:
    head_dim, dtype, contexts, num_kv_heads = (case[k] for k in ("head_dim", "dtype", "contexts", "num_kv_heads"))
    pool = on_device(
        paged(contexts, num_kv_heads=num_kv_heads, block_size=case["block_size"], head_dim=head_dim, dtype=dtype)
    )
    query = queries(len(contexts), num_kv_heads * case["group"], head_dim, dtype=dtype)
    scale, window = head_dim**-0.5, case["window"]
    assert_attended(decoded(triton_kernels, query, pool, scale, window), decoded(reference, query, pool, scale, window))


@pytest.mark.parametrize("case", GRID, ids=name)
def test_prefill_equals_the_reference(case: dict[str, Any]) -> None:
    """Queries are one token, a few, or much of the prompt; two padding rows at the end must not change."""
    head_dim, dtype, contexts, num_kv_heads = (case[k] for k in ("head_dim", "dtype", "contexts", "num_kv_heads"))
    pool = on_device(
        paged(contexts, num_kv_heads=num_kv_heads, block_size=case["block_size"], head_dim=head_dim, dtype=dtype)
    )
    wanted = (160 // case["group"], 1, 3, 40 // case["group"])  # the first one takes two tiles
    num_queries = [min(wanted[s % 4], context) for s, context in enumerate(contexts)]
    query = queries(sum(num_queries) + 2, num_kv_heads * case["group"], head_dim, dtype=dtype)
    scale, window = head_dim**-0.5, case["window"]
    result = prefilled(triton_kernels, query, pool, num_queries, scale, window)
    assert_attended(result, prefilled(reference, query, pool, num_queries, scale, window))
    assert result[-2:].isnan().all()
    assert result[:-2].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1000])
def test_long_contexts_equal_the_reference(window: int, dtype: torch.dtype) -> None:
    contexts = [4000, 3, 1024]
    pool = on_device(paged(contexts, num_kv_heads=1, block_size=16, head_dim=64, dtype=dtype))
    query = queries(len(contexts), 4, 64, dtype=dtype)
    expected = decoded(reference, query, pool, 0.125, window)
    assert_attended(decoded(triton_kernels, query, pool, 0.125, window), expected)
    num_queries = [9, 3, 40]
    query = queries(sum(num_queries), 4, 64, dtype=dtype)
    expected = prefilled(reference, query, pool, num_queries, 0.125, window)
    assert_attended(prefilled(triton_kernels, query, pool, num_queries, 0.125, window), expected)


@pytest.mark.parametrize(
    ("head_dim", "block_size", "group"), [(16, 2, 3), (20, 12, 5), (64, 24, 7), (32, 1, 20), (40, 64, 1)]
)
def test_unusual_shapes_equal_the_reference(head_dim: int, block_size: int, group: int) -> None:
    contexts = [1, 5, 12, 13, 100, 263]
    pool = on_device(paged(contexts, num_kv_heads=2, block_size=block_size, head_dim=head_dim))
    query = queries(len(contexts), 2 * group, head_dim)
    assert_attended(decoded(triton_kernels, query, pool, 0.2, 40), decoded(reference, query, pool, 0.2, 40))
    num_queries = [1, 5, 1, 13, 3, 9]
    query = queries(sum(num_queries), 2 * group, head_dim)
    expected = prefilled(reference, query, pool, num_queries, 0.2, 40)
    assert_attended(prefilled(triton_kernels, query, pool, num_queries, 0.2, 40), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_query_and_output_can_be_views_of_wider_rows(dtype: torch.dtype) -> None:
    pool = on_device(paged([40, 300], num_kv_heads=2, block_size=16, head_dim=64, dtype=dtype))
    query = queries(2, 8, 64, dtype=dtype)[:, :4]
    wide_out = poisoned(2, 6, 64, dtype=dtype).to(DEVICE)
    out = wide_out[:, 1:5]
    triton_kernels.attention_decode(query, pool.kv, pool.block_tables, pool.context_lens, out, 0.125)
    assert_attended(out, decoded(reference, query.contiguous(), pool, 0.125))
    assert wide_out[:, [0, 5]].isnan().all()

    query = queries(20, 8, 64, dtype=dtype)[:, 2:6]
    wide_out = poisoned(20, 6, 64, dtype=dtype).to(DEVICE)
    out = wide_out[:, 1:5]
    starts = torch.tensor([0, 3, 20], dtype=torch.int32, device=DEVICE)
    triton_kernels.attention_prefill(query, pool.kv, pool.block_tables, starts, pool.context_lens, out, 0.125)
    assert_attended(out, prefilled(reference, query.contiguous(), pool, [3, 17], 0.125))
    assert wide_out[:, [0, 5]].isnan().all()


def test_a_layer_of_a_pool_is_read_in_place() -> None:
    pool = on_device(paged([100, 33], num_kv_heads=2, block_size=16, head_dim=64))
    layers = torch.full((3, *pool.kv.shape), torch.nan, device=DEVICE)
    layers[1] = pool.kv
    query = queries(2, 4, 64)
    within = Paged(layers[1], pool.block_tables, pool.context_lens)
    assert torch.equal(decoded(triton_kernels, query, within, 0.125), decoded(triton_kernels, query, pool, 0.125))


def test_large_scores_neither_overflow_nor_vanish() -> None:
    pool = on_device(paged([30, 600, 17], num_kv_heads=1, block_size=16, head_dim=64))
    query = queries(3, 2, 64) * 300
    expected = decoded(reference, query, pool, 1.0)
    torch.testing.assert_close(decoded(triton_kernels, query, pool, 1.0), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(prefilled(triton_kernels, query, pool, [1, 1, 1], 1.0), expected, rtol=1e-3, atol=1e-3)


def test_a_nan_key_affects_only_its_own_sequence() -> None:
    pool = on_device(paged([600, 600], num_kv_heads=1, block_size=16, head_dim=64))
    query = queries(2, 2, 64)
    sound = decoded(triton_kernels, query, pool, 0.125), prefilled(triton_kernels, query, pool, [1, 1], 0.125)
    pool.kv[int(pool.block_tables[0, 4]), 0, 0, 3, 5] = torch.nan
    broken = decoded(triton_kernels, query, pool, 0.125), prefilled(triton_kernels, query, pool, [1, 1], 0.125)
    for now, before in zip(broken, sound, strict=True):
        assert now[0].isnan().all()
        assert torch.equal(now[1], before[1])


def test_empty_inputs_are_accepted() -> None:
    pool = on_device(paged([], num_kv_heads=2, block_size=16, head_dim=64))
    none = queries(0, 4, 64)
    assert decoded(triton_kernels, none, pool, 1.0).shape == none.shape
    assert prefilled(triton_kernels, none, pool, [], 1.0).shape == none.shape


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda query, kv, out: (query, kv.transpose(3, 4), out, 1.0), ValueError),
        (lambda query, kv, out: (query.transpose(1, 2), kv, out, 1.0), ValueError),
        (lambda query, kv, out: (query, kv, out.transpose(1, 2), 1.0), ValueError),
        (lambda query, kv, out: (query.half(), kv, out, 1.0), TypeError),
        (lambda query, kv, out: (query, kv, out.half(), 1.0), TypeError),
        (lambda query, kv, out: (query, kv, out, 0.0), ValueError),
        (lambda query, kv, out: (query, kv, out, -1.0), ValueError),
    ],
)
def test_unsupported_arguments_are_refused(spoil: Callable[..., tuple[Any, ...]], error: type[Exception]) -> None:
    pool = on_device(paged([20], num_kv_heads=2, block_size=64, head_dim=64))
    query, kv, out, scale = spoil(queries(1, 64, 64), pool.kv, poisoned(1, 64, 64).to(DEVICE))
    with pytest.raises(error):
        triton_kernels.attention_decode(query, kv, pool.block_tables, pool.context_lens, out, scale)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    with pytest.raises(error):
        triton_kernels.attention_prefill(query, kv, pool.block_tables, starts, pool.context_lens, out, scale)


@pytest.mark.parametrize("window", [0, 90, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype, window: int) -> None:
    contexts = [1, 33, 256, 257, 700, 0]
    pool = on_device(paged(contexts, num_kv_heads=2, block_size=16, head_dim=80, dtype=dtype))
    query = queries(len(contexts), 6, 80, dtype=dtype)
    together = decoded(triton_kernels, query, pool, 0.1, window)
    for s, context_len in enumerate(contexts):
        width = max(1, -(-context_len // 16))
        alone = Paged(pool.kv, pool.block_tables[s : s + 1, :width], pool.context_lens[s : s + 1])
        assert torch.equal(decoded(triton_kernels, query[s : s + 1], alone, 0.1, window)[0], together[s])


@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "window", "dtype"),
    [
        (64, 2, 16, 0, torch.float16),
        (80, 3, 8, 70, torch.float16),
        (128, 8, 32, 150, torch.float16),
        (128, 4, 16, 100, torch.bfloat16),
        (64, 1, 16, 0, torch.float32),
    ],
)
def test_a_prompt_has_the_same_bits_in_any_split(
    head_dim: int, group: int, block_size: int, window: int, dtype: torch.dtype
) -> None:
    """A prompt also has the same bits with other sequences in the step.

    In the interpreter, a matrix product (BLAS) rounds a row differently at another place in the tile, so there the
    test keeps tiles whole.
    """
    length = 270
    pool = on_device(paged([length, 30], num_kv_heads=2, block_size=block_size, head_dim=head_dim, dtype=dtype))
    query = queries(length + 4, 2 * group, head_dim, dtype=dtype)
    whole = prefilled(triton_kernels, query, pool, [length, 4], 0.1, window)
    assert_attended(whole, prefilled(reference, query, pool, [length, 4], 0.1, window))

    alone = Paged(pool.kv, pool.block_tables[:1], pool.context_lens[:1])
    assert torch.equal(prefilled(triton_kernels, query[:length], alone, [length], 0.1, window), whole[:length])
    tile = prefill_tuning(AttentionShape(dtype, 2 * group, 2, head_dim, block_size), DEVICE).tile_rows // group
    cuts = [0, 1, 4, 37, 130, 256, 257, length] if IS_GPU else [0, tile, 2 * tile, length // tile * tile, length]
    for start, stop in itertools.pairwise(cuts):
        so_far = Paged(pool.kv, pool.block_tables[:1], torch.tensor([stop], dtype=torch.int32, device=DEVICE))
        piece = prefilled(triton_kernels, query[start:stop], so_far, [stop - start], 0.1, window)
        assert torch.equal(piece, whole[start:stop])


@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "window", "dtype"),
    [
        (64, 2, 16, 1, torch.float16),
        (64, 4, 8, 70, torch.float16),
        (80, 3, 32, 150, torch.float16),
        (128, 1, 16, 33, torch.float32),
    ],
)
def test_nothing_below_the_window_is_read(
    head_dim: int, group: int, block_size: int, window: int, dtype: torch.dtype
) -> None:
    """Tokens that no query of a step sees become NaN, and their blocks ids out of range: the bits stay the same."""
    contexts, num_queries = [700, 300, 130, 65, 20], [130, 1, 129, 7, 20]
    pool = on_device(paged(contexts, num_kv_heads=2, block_size=block_size, head_dim=head_dim, dtype=dtype))
    decoding = queries(len(contexts), 2 * group, head_dim, dtype=dtype)
    prefilling = queries(sum(num_queries), 2 * group, head_dim, dtype=dtype)

    def without(tokens_below: list[int]) -> Paged:
        kv, tables = pool.kv.clone(), pool.block_tables.clone()
        for s, below in enumerate(tokens_below):
            whole, rest = divmod(max(0, below), block_size)
            kv[pool.block_tables[s, :whole].long()] = torch.nan
            kv[int(pool.block_tables[s, whole]), :, :, :rest] = torch.nan
            tables[s, :whole] = NO_BLOCK
        return Paged(kv, tables, pool.context_lens)

    expected = decoded(triton_kernels, decoding, pool, 0.1, window)
    freed = without([context - window for context in contexts])
    assert freed.kv.isnan().sum() > pool.kv.isnan().sum()
    assert torch.equal(decoded(triton_kernels, decoding, freed, 0.1, window), expected)

    expected = prefilled(triton_kernels, prefilling, pool, num_queries, 0.1, window)
    lowest = [context - count + 1 - window for context, count in zip(contexts, num_queries, strict=True)]
    freed = without(lowest)
    assert freed.kv.isnan().sum() > pool.kv.isnan().sum()
    assert torch.equal(prefilled(triton_kernels, prefilling, freed, num_queries, 0.1, window), expected)


def test_one_plan_serves_all_layers() -> None:
    """The chunks are so short that the longest context doubles them twice; tables are looked up by slot."""
    contexts = [0, 2000, 17, 16, 300, 0]
    shape = AttentionShape(torch.float32, 4, 2, 64, 16)
    pool = on_device(paged(contexts, num_kv_heads=2, block_size=16, head_dim=64))
    tuning = DecodeTuning(8, 32, num_warps=4, num_stages=3, programs_per_multiprocessor=1)
    planner = triton_kernels.DecodePlanner(shape, DEVICE, 8, 2048, (0, 1000), tuning)
    slots = torch.tensor([3, 4, 0, 1], dtype=torch.int32, device=DEVICE)
    by_slot = Paged(pool.kv, pool.block_tables[slots.long()], pool.context_lens[slots.long()])
    work = planner.plan(pool.block_tables, by_slot.context_lens, slots)
    for window in (0, 1000):
        query, out = queries(4, 4, 64), poisoned(4, 4, 64).to(DEVICE)
        triton_kernels.attend_decode(query, pool.kv, work, out, 0.125, window)
        assert_attended(out, decoded(reference, query, by_slot, 0.125, window))

    work = planner.plan(pool.block_tables, pool.context_lens)
    query, out = queries(6, 4, 64), poisoned(6, 4, 64).to(DEVICE)
    triton_kernels.attend_decode(query, pool.kv, work, out, 0.125)
    assert_attended(out, decoded(reference, query, pool, 0.125))


def test_one_prefill_plan_serves_all_layers() -> None:
    contexts, num_queries = [40, 300, 0, 20], [40, 70, 0, 1]
    shape = AttentionShape(torch.float32, 4, 2, 64, 16)
    pool = on_device(paged(contexts, num_kv_heads=2, block_size=16, head_dim=64))
    starts = torch.tensor([0, *num_queries]).cumsum(0).int()
    slots = torch.tensor([3, 1, 2, 0])
    tables = torch.empty_like(pool.block_tables)
    tables[slots.to(DEVICE)] = pool.block_tables
    work = triton_kernels.plan_prefill(
        shape, tables, starts.numpy(), pool.context_lens.cpu().numpy(), slots.int().numpy()
    )
    for window in (0, 50):
        query, out = queries(sum(num_queries), 4, 64), poisoned(sum(num_queries), 4, 64).to(DEVICE)
        triton_kernels.attend_prefill(query, pool.kv, work, out, 0.125, window)
        assert_attended(out, prefilled(reference, query, pool, num_queries, 0.125, window))


@on_gpu_only
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (16, 8, 128), (14, 2, 64)])
def test_shapes_of_real_models_equal_the_reference(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    contexts = torch.randint(1, 9000, (48,)).tolist()
    pool = on_device(paged(contexts, num_kv_heads=num_kv_heads, block_size=16, head_dim=head_dim, dtype=dtype))
    query = queries(len(contexts), num_heads, head_dim, dtype=dtype)
    scale = head_dim**-0.5
    assert_attended(decoded(triton_kernels, query, pool, scale), decoded(reference, query, pool, scale))
    num_queries = [min(context, 2000) for context in contexts[:6]]
    few = Paged(pool.kv, pool.block_tables[:6], pool.context_lens[:6])
    query = queries(sum(num_queries), num_heads, head_dim, dtype=dtype)
    for window in (0, 1024):
        expected = prefilled(reference, query, few, num_queries, scale, window)
        assert_attended(prefilled(triton_kernels, query, few, num_queries, scale, window), expected)


@on_gpu_only
def test_a_captured_decode_takes_any_lengths() -> None:
    """A graph is captured on empty rows and replayed on long and short ones, twice each."""
    assert IS_GPU
    contexts = [5000, 1, 0, 255, 256, 257, 0, 3000]
    shape = AttentionShape(torch.bfloat16, 32, 8, 128, 16)
    pool = on_device(paged(contexts, num_kv_heads=8, block_size=16, head_dim=128, dtype=torch.bfloat16))
    lengths = torch.zeros(len(contexts), dtype=torch.int32, device=DEVICE)
    query, out = queries(8, 32, 128, dtype=torch.bfloat16), poisoned(8, 32, 128, dtype=torch.bfloat16).to(DEVICE)
    planner = triton_kernels.DecodePlanner(shape, DEVICE, 8, 8192)

    def step() -> None:
        work = planner.plan(pool.block_tables, lengths)
        for _ in range(2):
            triton_kernels.attend_decode(query, pool.kv, work, out, 0.1)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    shorter = [min(length, 100) for length in contexts]
    for wanted in (contexts, shorter, contexts, [0] * 8):
        lengths.copy_(torch.tensor(wanted, dtype=torch.int32))
        query.normal_()
        out.fill_(torch.nan)
        graph.replay()
        now = Paged(pool.kv, pool.block_tables, lengths)
        assert_attended(out, decoded(reference, query, now, 0.1))
