"""A decoder as one program of CPU kernels: a step writes a few numbers and makes one call.

The layers are those of `executor.models.decoder`, on buffers that are allocated once for the largest step::

    residual[T, H] ─ norm → hidden[T, H] ─ qkv → fused[T, Hq + 2 Hkv, D] ─ rotate, store → KV pool
                                                      └ attention → attended[T, Hq, D] ─ output → hidden
    residual += hidden, norm → hidden ─ gate and up → gate_up[T, 2 I] ─ silu · → activated[T, I] ─ down → hidden

Once the last layer has stored its keys and values, only the logit rows matter: one of a prompt, or none. Their queries
and residuals are copied to other buffers, and attention and the rest of that layer are computed for them alone.

A model of several ranks has heads and columns of its own. It pauses behind `output` and `down`, to add the ranks'
parts of `hidden`, and behind the head, to gather the logits.

The system provides pages only when a step writes them. Nearly all steps make logits of one row per sequence; steps that
score a prompt make logits of all its rows.
"""

import math

import numpy as np
import torch
from torch import Tensor

from executor.models.decoder import Decoder
from executor.models.program_inputs import LOGITS, PARTS, ROWS, ProgramInputs
from executor.models.weights import LayerWeights
from executor.plans.plan import Ints
from executor.slots.launch import Launch
from kernels import Linear, cpu
from kernels.cpu.attend import ATTENTION_JOB, attend_kernel, part_numbers
from kernels.cpu.attention import attention_fields
from kernels.cpu.elementwise import (
    NORM_JOB,
    SILU_JOB,
    TAKE_JOB,
    norm_fields,
    norm_kernel,
    silu_fields,
    silu_kernel,
    take_fields,
    take_kernel,
)
from kernels.cpu.kv import STORE_JOB, store_fields, store_kernel
from kernels.cpu.linear import LINEAR_JOB, PackedLinear
from kernels.cpu.native import storage_of
from kernels.cpu.program import Program
from kernels.cpu.softmax import CHUNK
from kernels.memory import zeros


class ProgramModel:
    """Implements `executor.models.model.Model` on the CPU.

    pool[num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]
    """

    def __init__(self, decoder: Decoder, pool: Tensor, max_num_rows: int, max_num_seqs: int) -> None:
        self._decoder = decoder
        self.pool = pool
        self._buffers = _Buffers(decoder, max_num_rows, max_num_seqs)
        self._block_tables: Ints | None = None
        self._program = _build(decoder, pool, self._buffers)

    def forward(self, launch: Launch) -> Tensor:
        """Returns logits[len(launch.logit_rows), vocab_size], which the next step overwrites."""
        buffers, block_tables = self._buffers, launch.block_tables
        max_chunks = launch.num_table_columns(CHUNK)
        num_sequences = buffers.take(launch)
        buffers.reserve_parts(max(num_sequences.values()), max_chunks)
        if block_tables is not self._block_tables:
            self._block_tables = block_tables
            tables = {"block_tables": block_tables.ctypes.data, "table_width": block_tables.shape[1]}
            for part in PARTS:
                self._program.set(part, **tables)
        for part in PARTS:
            self._program.set(
                part,
                num_rows=buffers.num_rows[part],
                num_sequences=num_sequences[part],
                max_chunks=max_chunks,
                parts=buffers.parts.data_ptr(),
            )
        self._program.run()
        return buffers.logits[: buffers.num_rows[LOGITS]]

    def copy_blocks(self, copies: Ints) -> None:
        """Copies whole blocks of all layers. copies[n, 2]: (source, destination)."""
        sources, destinations = torch.from_numpy(np.ascontiguousarray(copies.T, dtype=np.int64))
        cpu.copy_blocks(self.pool, sources, destinations)


class _Buffers:
    """The arrays that pass from job to job, sized for the largest step."""

    def __init__(self, decoder: Decoder, max_num_rows: int, max_num_seqs: int) -> None:
        config, dtype = decoder.config, decoder.dtype
        num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.residual = zeros((max_num_rows, config.hidden_size), dtype)
        self.hidden = zeros((max_num_rows, config.hidden_size), dtype)
        self.fused = zeros((max_num_rows, num_heads + 2 * num_kv_heads, head_dim), dtype)
        self.query = zeros((max_num_rows, num_heads, head_dim), dtype) if config.qk_norm else None
        self.key = zeros((max_num_rows, num_kv_heads, head_dim), dtype) if config.qk_norm else None
        self.attended = zeros((max_num_rows, num_heads, head_dim), dtype)
        self.gate_up = zeros((max_num_rows, 2 * config.intermediate_size), dtype)
        self.activated = zeros((max_num_rows, config.intermediate_size), dtype)
        self.kept_residual = zeros((max_num_rows, config.hidden_size), dtype)
        self.kept_query = zeros((max_num_rows, num_heads, head_dim), dtype)
        self.own_logits = zeros((max_num_rows, decoder.num_own_logits), dtype)
        self.logits = zeros((max_num_rows, config.vocab_size), dtype) if decoder.gathers_logits else self.own_logits
        self.num_rows = {ROWS: 0, LOGITS: 0}
        self.inputs = ProgramInputs(max_num_rows, max_num_seqs)
        self._part_shape = (num_kv_heads, part_numbers(num_heads // num_kv_heads, head_dim))
        self.parts = zeros((0,), torch.float32)
        max_num_sequences = max(len(sequences.slots) for sequences in self.inputs.sequences.values())
        self.arrivals = torch.zeros(max_num_sequences * num_kv_heads, dtype=torch.int64)

    def take(self, launch: Launch) -> dict[str, int]:
        """Copies the inputs of a step, and notes how many rows its jobs compute. See `ProgramInputs.take`."""
        self.num_rows = {ROWS: launch.num_rows, LOGITS: len(launch.logit_rows)}
        return self.inputs.take(launch)

    def reserve_parts(self, num_sequences: int, max_chunks: int) -> None:
        """Makes room for attention over contexts of several chunks. Grows to twice what is needed, as contexts grow."""
        num_numbers = num_sequences * max_chunks * math.prod(self._part_shape) if max_chunks > 1 else 0
        if self.parts.numel() < num_numbers:
            self.parts = zeros((2 * num_numbers,), torch.float32)


def _build(decoder: Decoder, pool: Tensor, buffers: _Buffers) -> Program:
    weights, config = decoder.weights, decoder.config
    build = _Builder(decoder, buffers)
    build.embed(weights.embedding)
    for index, layer in enumerate(weights.layers):
        build.norm(None if index == 0 else buffers.hidden, layer.input_norm)
        build.linear(buffers.hidden, layer.qkv, buffers.fused)
        query = build.store(layer, pool[index])
        if index + 1 == config.num_layers:
            query = build.keep_logit_rows(query)
        build.attend(query, pool[index], config.windows[index])
        build.linear(buffers.attended, layer.output, buffers.hidden)
        build.sum(buffers.hidden)
        build.norm(buffers.hidden, layer.mlp_norm)
        build.linear(buffers.hidden, layer.gate_up, buffers.gate_up)
        build.activate()
        build.linear(buffers.activated, layer.down, buffers.hidden)
        build.sum(buffers.hidden)
    build.norm(buffers.hidden, weights.final_norm)
    build.linear(buffers.hidden, weights.head, buffers.own_logits)
    build.gather()
    program, inputs = build.program, buffers.inputs
    program.seal()
    program.set(ROWS, positions=inputs.positions.ctypes.data, slots=inputs.slot_mapping.ctypes.data)
    for part, indices in ((ROWS, inputs.token_ids), (LOGITS, inputs.logit_rows)):
        sequences = inputs.sequences[part]
        program.set(
            part,
            indices=indices.ctypes.data,
            table_rows=sequences.slots.ctypes.data,
            query_starts=sequences.query_starts.ctypes.data,
            context_lens=sequences.context_lens.ctypes.data,
            arrivals=buffers.arrivals.data_ptr(),
        )
    return program


class _Builder:
    """Appends jobs to a program, each on buffers of the model."""

    def __init__(self, decoder: Decoder, buffers: _Buffers) -> None:
        self.program = Program()
        self._residual = buffers.residual
        self._part = ROWS
        self._decoder = decoder
        self._buffers = buffers
        self._storage = storage_of(decoder.dtype)

    def embed(self, embedding: Tensor) -> None:
        """Sets residual to the embeddings of the tokens."""
        self._take(embedding, self._residual)

    def keep_logit_rows(self, query: Tensor) -> Tensor:
        """Copies the logit rows of residual and query, and returns those of query.

        All jobs after this compute these rows alone.
        """
        self._part = LOGITS
        self._take(self._residual, self._buffers.kept_residual)
        self._take(query, self._buffers.kept_query)
        self._residual = self._buffers.kept_residual
        return self._buffers.kept_query

    def _take(self, source: Tensor, out: Tensor) -> None:
        self.program.add(take_kernel(), TAKE_JOB, self._part, **take_fields(source, out))

    def norm(self, added: Tensor | None, weight: Tensor) -> None:
        """Adds `added` to residual, and sets hidden to the norm of the sum."""
        x, residual = (self._residual, None) if added is None else (added, self._residual)
        self._norm(self._part, x, residual, weight, self._buffers.hidden)

    def _norm(self, part: str, x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor) -> None:
        fields = norm_fields(x, residual, weight, out, self._decoder.config.rms_norm_eps)
        self.program.add(norm_kernel(self._storage), NORM_JOB, part, **fields)

    def linear(self, x: Tensor, layer: Linear, out: Tensor) -> None:
        """Sets out to the layer's output for x."""
        if not isinstance(layer, PackedLinear):
            raise TypeError("a program multiplies packed weights")
        self.program.add(layer.kernel(self._decoder.dtype), LINEAR_JOB, self._part, **layer.fields(x, out))

    def sum(self, partial: Tensor) -> None:
        """Replaces each rank's part of a sum by the sum. Does nothing if there is one rank."""
        communicator, buffers, part = self._decoder.communicator, self._buffers, self._part
        if communicator is not None:
            self.program.pause(lambda: communicator.sum(partial[: buffers.num_rows[part]]))

    def gather(self) -> None:
        """Fills the logits of the leading rank from those of all ranks."""
        communicator, buffers = self._decoder.communicator, self._buffers
        if communicator is None:
            return

        def gather() -> None:
            num_rows = buffers.num_rows[LOGITS]
            logits = buffers.logits[:num_rows] if communicator.share.is_leading else None
            communicator.gather(buffers.own_logits[:num_rows], logits)

        self.program.pause(gather)

    def store(self, layer: LayerWeights, kv: Tensor) -> Tensor:
        """Rotates queries and keys in `fused`, and stores keys and values. Returns the queries."""
        config, buffers = self._decoder.config, self._buffers
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        query, key, value = torch.split(buffers.fused, heads, dim=1)
        if layer.query_norm is not None and buffers.query is not None:
            self._norm(ROWS, query, None, layer.query_norm, buffers.query)
            query = buffers.query
        if layer.key_norm is not None and buffers.key is not None:
            self._norm(ROWS, key, None, layer.key_norm, buffers.key)
            key = buffers.key
        stored = store_fields(query, key, value, self._decoder.cos, self._decoder.sin, kv)
        self.program.add(store_kernel(self._storage), STORE_JOB, ROWS, **stored)
        return query

    def attend(self, query: Tensor, kv: Tensor, window: int) -> None:
        """Attends with query[T, Hq, D], into `attended`."""
        fields = attention_fields(query, kv, self._buffers.attended, self._decoder.config.head_dim**-0.5, window)
        self.program.add(attend_kernel(), ATTENTION_JOB, self._part, **fields)

    def activate(self) -> None:
        """Sets activated to silu(gate) * up."""
        fields = silu_fields(self._buffers.gate_up, self._buffers.activated)
        self.program.add(silu_kernel(self._storage), SILU_JOB, self._part, **fields)
