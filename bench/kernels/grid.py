"""The cases that are measured on a GPU and on a CPU."""

from dataclasses import replace

import torch

from bench.kernels.attention_cases import decode, mixed_contexts, prefill
from bench.kernels.cases import LARGE, LARGE_D64, LARGE_D256, SMALL, Case, ModelShape
from bench.kernels.layer_cases import copy, greedy, linear, norm, projection, projections, rotate, sampling, silu

_LONG_CONTEXTS = (4096, 12288, 16384)


def gpu_cases() -> list[Case]:
    """Returns all cases: first those that targets name, then the rest."""
    dtype = torch.bfloat16
    shapes = [(64, 4096), (64, 1024), (1, 1024), (1, 16384), (16, 1024), (256, 1024)]
    shapes += [(1, 4096), (16, 4096), (256, 4096)]
    cases = [decode(LARGE, dtype, [context] * rows, f"D128 b={rows} {context}") for rows, context in shapes]
    cases[4:4] = [prefill(LARGE, dtype, queries, queries, f"D128 {queries}") for queries in (4096, 1024, 8192)]
    cases += [
        decode(LARGE, dtype, [1024] * 64, "D128 b=64 1024 launched", in_graph=False),
        decode(LARGE, dtype, [1024], "D128 b=1 1024 launched", in_graph=False),
        decode(LARGE, dtype, mixed_contexts(64, 64, 8192), "D128 b=64 mixed 64-8192"),
        decode(LARGE_D64, dtype, [1024] * 64, "D64 b=64 1024"),
        decode(LARGE_D256, dtype, [1024] * 64, "D256 b=64 1024"),
        prefill(LARGE, dtype, 2048, 8192, "D128 2048 of 8192"),
        prefill(LARGE_D64, dtype, 4096, 4096, "D64 4096"),
        prefill(LARGE_D256, dtype, 4096, 4096, "D256 4096"),
    ]
    cases += [
        projection(LARGE, dtype, name, num_tokens)
        for name in projections(LARGE)
        for num_tokens in (1, 16, 64, 256, 2048)
    ]
    for num_tokens in (64, 8192):
        cases += _elementwise(LARGE, dtype, num_tokens)
    return [*cases, copy(LARGE, dtype, 16), *_sampling(dtype)]


def cpu_cases(dtype: torch.dtype, *, is_quick: bool) -> list[Case]:
    """Returns the cases of both shapes. The large shape is measured on the batches that a CPU would serve."""
    models = (SMALL,) if is_quick else (SMALL, LARGE)
    cases = []
    for model in models:
        shapes = [(1, 1024), (16, 256)] if is_quick or model is LARGE else [(1, 1024), (1, 4096), (16, 256), (64, 256)]
        name = model.name
        cases += [decode(model, dtype, [context] * rows, f"{name} b={rows} {context}") for rows, context in shapes]
        cases.append(decode(model, dtype, mixed_contexts(16, 16, 512), f"{name} b=16 mixed 16-512"))
        cases.append(prefill(model, dtype, 256, 256, f"{name} 256"))
        cases.append(prefill(model, dtype, 64, 512, f"{name} 64 of 512"))
        if not is_quick:
            cases.append(decode(model, dtype, [16384], f"{name} b=1 16384"))
            cases += [prefill(model, dtype, 512, context, f"{name} 512 of {context}") for context in _LONG_CONTEXTS]
        cases += _elementwise(model, dtype, 64)
        cases += [linear(model, dtype, num_tokens) for num_tokens in ((1, 64) if is_quick else (1, 8, 64, 512))]
        cases.append(copy(model if model is SMALL else replace(model, num_layers=4), dtype, 4))
        cases += [sampling(model, dtype, 16, top_p) for top_p in (1.0, 0.95)]
    return cases


def _elementwise(model: ModelShape, dtype: torch.dtype, num_tokens: int) -> list[Case]:
    return [
        rotate(model, dtype, num_tokens),
        norm(model, dtype, num_tokens, adds=False),
        norm(model, dtype, num_tokens, adds=True),
        silu(model, dtype, num_tokens),
    ]


def _sampling(dtype: torch.dtype) -> list[Case]:
    cases = [greedy(LARGE, dtype, num_rows) for num_rows in (1, 64)]
    return cases + [sampling(LARGE, dtype, num_rows, top_p) for num_rows in (1, 64) for top_p in (1.0, 0.95)]
