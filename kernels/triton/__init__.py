"""Every operation for GPUs, in Triton. Signatures, shapes and layouts are those of `kernels.Kernels`.

A step's layers share its lengths, so attention is split in two: a plan, made once a step, and a launch a layer::

    planner = DecodePlanner(shape, device, max_num_seqs, max_context_len, windows)      once
    work = planner.plan(block_tables, context_lens)                                     a step, may be captured
    attend_decode(query, kv, work, out, scale, window)                                  a layer, may be captured

    work = plan_prefill(shape, block_tables, query_starts, context_lens)                a step, from host arrays
    attend_prefill(query, kv, work, out, scale, window)                                 a layer

`attention_decode` and `attention_prefill` do both in one call, for whoever has one layer only.

Decode, and all else that runs between a plan and its result, allocates and waits for nothing that depends on the
lengths: see `kernels.triton.decode_work`. Kernels run on the current CUDA device and stream, or on tensors of the CPU
in Triton's interpreter, where the environment has TRITON_INTERPRET=1 before triton is imported (not for bfloat16).
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
