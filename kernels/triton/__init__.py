"""Every operation for GPUs, in Triton. Signatures, shapes and layouts are those of `kernels.Kernels`.

All layers of a step have the same lengths, so attention has two parts: a plan per step and a launch per layer::

    planner = DecodePlanner(shape, device, max_num_seqs, max_context_len, windows)      once
    work = planner.plan(block_tables, context_lens)                                     per step, can be captured
    attend_decode(query, kv, work, out, scale, window)                                  per layer, can be captured

    work = plan_prefill(shape, block_tables, query_starts, context_lens)                per step, from host arrays
    attend_prefill(query, kv, work, out, scale, window)                                 per layer

`attention_decode` and `attention_prefill` do both in one call, for callers with a single layer.

Decode, like everything that runs between a plan and its result, makes no allocation and no wait that depends on the
lengths: see `kernels.triton.decode_work`. Kernels run on the current CUDA device and stream. If TRITON_INTERPRET=1 is
set in the environment before triton is imported, they run on CPU tensors in Triton's interpreter. It computes bfloat16
wrongly, unless it is repaired as in tests/support/triton/interpreter.py.
"""

from kernels.reference import pack_linear  # torch's own, that is cuBLAS
from kernels.triton.decode import attend_decode, attention_decode
from kernels.triton.decode_work import DecodePlanner, DecodeWork
from kernels.triton.elementwise import add_rms_norm, rms_norm, silu_multiply
from kernels.triton.greedy import choose_greedily
from kernels.triton.kv import copy_blocks, rotate_and_store
from kernels.triton.prefill import PrefillWork, attend_prefill, attention_prefill, list_tiles, plan_prefill
from kernels.triton.rows import RESULT_FIELDS, STATE_FIELDS, StateField, close_rows, open_rows
from kernels.triton.sampling import draw_tokens
from kernels.triton.tables import update_tables
from kernels.triton.warmup import warm_up

__all__ = [
    "RESULT_FIELDS",
    "STATE_FIELDS",
    "DecodePlanner",
    "DecodeWork",
    "PrefillWork",
    "StateField",
    "add_rms_norm",
    "attend_decode",
    "attend_prefill",
    "attention_decode",
    "attention_prefill",
    "choose_greedily",
    "close_rows",
    "copy_blocks",
    "draw_tokens",
    "list_tiles",
    "open_rows",
    "pack_linear",
    "plan_prefill",
    "rms_norm",
    "rotate_and_store",
    "silu_multiply",
    "update_tables",
    "warm_up",
]
