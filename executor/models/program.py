"""A decoder as one program of CPU kernels: a step is a few numbers written, and one call.

The layers are those of `executor.models.decoder`, over buffers that are allocated once for the largest step::

    residual[T, H] ─ norm → hidden[T, H] ─ qkv → fused[T, Hq + 2 Hkv, D] ─ rotate, store → KV pool
                                                      └ attention → attended[T, Hq, D] ─ output → hidden
    residual += hidden, norm → hidden ─ gate and up → gate_up[T, 2 I] ─ silu · → activated[T, I] ─ down → hidden

Behind the last attention only the rows count that logits are made of: of a prompt one, or none. They are taken out
there, and the rest of that layer is theirs alone.

Only pages that a step writes are taken from the system: nearly all steps make logits of one row a sequence, and those
that score a prompt of all its rows.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor.batch import Batch
from executor.models.decoder import Decoder
from executor.models.weights import LayerWeights
from executor.plan import Ints
from kernels import Linear, cpu
from kernels.cpu.attend import ATTENTION_JOB, attend_kernel
from kernels.cpu.elementwise import NORM_JOB, SILU_JOB, TAKE_JOB, norm_kernel, silu_kernel, take_kernel, unit_rows
from kernels.cpu.kv import STORE_JOB, store_kernel
from kernels.cpu.linear import LINEAR_JOB, PackedLinear
from kernels.cpu.native import storage_of
from kernels.cpu.program import Program
from kernels.cpu.tiles import CHUNK, tile_columns, tiles_kernel
from kernels.memory import zeros

# Parts of the program: jobs over all rows of a step, and those over the rows that are sampled.
_ROWS, _SAMPLES = "rows", "samples"


class ProgramModel:
    """See `executor.runner.Model`. pool[num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim], on the CPU."""

    def __init__(self, decoder: Decoder, pool: Tensor, max_num_rows: int, max_num_seqs: int) -> None:
        self._decoder = decoder
        self.pool = pool
        self._buffers = _Buffers(decoder, max_num_rows, max_num_seqs)
        self._block_tables: Ints | None = None
        self._program = _build(decoder, pool, self._buffers)

    def forward(self, batch: Batch, block_tables: Ints) -> Tensor:
        """Logits[num_samples, vocab_size], overwritten by the next step."""
        buffers, num_samples = self._buffers, len(batch.sample_rows)
        max_chunks = -(-int(batch.context_lens.max()) // CHUNK)
        buffers.reserve_parts(len(batch.slots), max_chunks)
        buffers.inputs.take(batch)
        if block_tables is not self._block_tables:
            self._block_tables = block_tables
            tables = {"block_tables": block_tables.ctypes.data, "table_width": block_tables.shape[1]}
            self._program.set(_ROWS, **tables)
        self._program.set(
            _ROWS,
            num_rows=batch.num_rows,
            num_sequences=len(batch.slots),
            max_chunks=max_chunks,
            parts=buffers.parts.data_ptr(),
        )
        self._program.set(_SAMPLES, num_rows=num_samples)
        self._program.run()
        return buffers.logits[:num_samples]

    def copy_blocks(self, copies: Ints) -> None:
        """copies[n, 2]: (source, destination)."""
        sources, destinations = torch.from_numpy(np.ascontiguousarray(copies.T, dtype=np.int64))
        cpu.copy_blocks(self.pool, sources, destinations)


class _Inputs:
    """The batch of a step, where the program finds it."""

    def __init__(self, max_num_rows: int, max_num_seqs: int) -> None:
        self.token_ids = np.zeros(max_num_rows, np.int32)
        self.positions = np.zeros(max_num_rows, np.int32)
        self.slot_mapping = np.zeros(max_num_rows, np.int64)
        self.slots = np.zeros(max_num_seqs, np.int32)
        self.query_starts = np.zeros(max_num_seqs + 1, np.int32)
        self.context_lens = np.zeros(max_num_seqs, np.int32)
        self.sample_rows = np.zeros(max_num_rows, np.int32)

    def take(self, batch: Batch) -> None:
        """Copies the batch."""
        num_rows, num_sequences = batch.num_rows, len(batch.slots)
        self.token_ids[:num_rows] = batch.token_ids
        self.positions[:num_rows] = batch.positions
        self.slot_mapping[:num_rows] = batch.slot_mapping
        self.slots[:num_sequences] = batch.slots
        self.query_starts[: num_sequences + 1] = batch.query_starts
        self.context_lens[:num_sequences] = batch.context_lens
        self.sample_rows[: len(batch.sample_rows)] = batch.sample_rows


class _Buffers:
    """What passes from job to job. Sizes are those of the largest step."""

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
        self.sampled_residual = zeros((max_num_rows, config.hidden_size), dtype)
        self.sampled_attended = zeros((max_num_rows, num_heads, head_dim), dtype)
        self.logits = zeros((max_num_rows, config.vocab_size), dtype)
        self.inputs = _Inputs(max_num_rows, max_num_seqs)
        self._part_shape = (num_kv_heads, num_heads // num_kv_heads * (head_dim + 2))
        self.parts = zeros((0,), torch.float32)
        self.arrivals = torch.zeros(max_num_seqs * num_kv_heads, dtype=torch.int64)

    def reserve_parts(self, num_sequences: int, max_chunks: int) -> None:
        """For attention over contexts of several chunks; grows by doubling, as contexts do."""
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
        build.attend(layer, pool[index], config.windows[index])
        if index + 1 == config.num_layers:
            build.sample()
        build.linear(build.attended, layer.output, buffers.hidden)
        build.norm(buffers.hidden, layer.mlp_norm)
        build.linear(buffers.hidden, layer.gate_up, buffers.gate_up)
        build.activate()
        build.linear(buffers.activated, layer.down, buffers.hidden)
    build.norm(buffers.hidden, weights.final_norm)
    build.linear(buffers.hidden, weights.head, buffers.logits)
    program, inputs = build.program, buffers.inputs
    program.seal()
    program.set(
        _ROWS,
        indices=inputs.token_ids.ctypes.data,
        positions=inputs.positions.ctypes.data,
        slots=inputs.slot_mapping.ctypes.data,
        table_rows=inputs.slots.ctypes.data,
        query_starts=inputs.query_starts.ctypes.data,
        context_lens=inputs.context_lens.ctypes.data,
        arrivals=buffers.arrivals.data_ptr(),
    )
    program.set(_SAMPLES, indices=inputs.sample_rows.ctypes.data)
    return program


class _Builder:
    """Appends jobs to a program, each on buffers of the model.

    attended  what attention has made of the rows that go on
    """

    def __init__(self, decoder: Decoder, buffers: _Buffers) -> None:
        self.program = Program()
        self.attended = buffers.attended
        self._residual = buffers.residual
        self._part = _ROWS
        self._decoder = decoder
        self._buffers = buffers
        self._storage = storage_of(decoder.dtype)
        self._number_bytes = decoder.dtype.itemsize

    def embed(self, embedding: Tensor) -> None:
        """residual = the embeddings of the tokens."""
        self._take(embedding, self._residual)

    def sample(self) -> None:
        """From here on there are only the rows that logits are made of, as the first ones of other buffers."""
        self._part = _SAMPLES
        self._take(self.attended, self._buffers.sampled_attended)
        self._take(self._residual, self._buffers.sampled_residual)
        self.attended, self._residual = self._buffers.sampled_attended, self._buffers.sampled_residual

    def _take(self, source: Tensor, out: Tensor) -> None:
        self.program.add(
            take_kernel(),
            TAKE_JOB,
            self._part,
            source=source.data_ptr(),
            row_bytes=self._row_bytes(source),
            out=out.data_ptr(),
        )

    def norm(self, added: Tensor | None, weight: Tensor) -> None:
        """residual += added; hidden is its norm."""
        residual = self._residual
        row_bytes, width = self._row_bytes(residual), residual.shape[1]
        source = residual if added is None else added
        self.program.add(
            norm_kernel(self._storage),
            NORM_JOB,
            self._part,
            x=source.data_ptr(),
            x_outer_bytes=row_bytes,
            residual=0 if added is None else residual.data_ptr(),
            residual_outer_bytes=row_bytes,
            num_inner=1,
            **self._norm_of(weight, width, self._buffers.hidden),
        )

    def _norm_heads(self, heads: Tensor, weight: Tensor, out: Tensor) -> None:
        self.program.add(
            norm_kernel(self._storage),
            NORM_JOB,
            _ROWS,
            x=heads.data_ptr(),
            x_outer_bytes=self._row_bytes(heads),
            x_inner_bytes=heads.stride(1) * self._number_bytes,
            num_inner=heads.shape[1],
            **self._norm_of(weight, heads.shape[2], out),
        )

    def _norm_of(self, weight: Tensor, width: int, out: Tensor) -> dict[str, Any]:
        return {
            "weight": weight.data_ptr(),
            "out": out.data_ptr(),
            "width": width,
            "unit_rows": unit_rows(width),
            "number_bytes": self._number_bytes,
            "eps": self._decoder.config.rms_norm_eps,
        }

    def linear(self, x: Tensor, layer: Linear, out: Tensor) -> None:
        """out = the layer of x."""
        if not isinstance(layer, PackedLinear):
            raise TypeError("a program multiplies packed weights")
        fields = layer.job(self._row_bytes(x), self._row_bytes(out))
        kernel = layer.kernel(self._decoder.dtype)
        self.program.add(kernel, LINEAR_JOB, self._part, x=x.data_ptr(), out=out.data_ptr(), **fields)

    def attend(self, layer: LayerWeights, kv: Tensor, window: int) -> None:
        """Rotates what `fused` holds, stores keys and values, and attends: `attended`."""
        config, buffers = self._decoder.config, self._buffers
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        query, key, value = torch.split(buffers.fused, heads, dim=1)
        if layer.query_norm is not None and buffers.query is not None:
            self._norm_heads(query, layer.query_norm, buffers.query)
            query = buffers.query
        if layer.key_norm is not None and buffers.key is not None:
            self._norm_heads(key, layer.key_norm, buffers.key)
            key = buffers.key
        self._store(query, key, value, kv)
        self._attention(query, kv, window)

    def _store(self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor) -> None:
        cos, sin = self._decoder.cos, self._decoder.sin
        _, num_heads, head_dim = query.shape
        _, _, num_kv_heads, block_size, _ = kv.shape
        self.program.add(
            store_kernel(self._storage),
            STORE_JOB,
            _ROWS,
            **self._strided("query", query),
            **self._strided("key", key),
            **self._strided("value", value),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            table_bytes=cos.stride(0) * cos.element_size(),
            kv=kv.data_ptr(),
            kv_block_bytes=self._row_bytes(kv),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            number_bytes=self._number_bytes,
        )

    def _attention(self, query: Tensor, kv: Tensor, window: int) -> None:
        _, num_heads, head_dim = query.shape
        _, _, num_kv_heads, block_size, _ = kv.shape
        columns = tile_columns(block_size)
        score_rows, weigh_rows = tiles_kernel(head_dim, self._storage, columns)
        self.program.add(
            attend_kernel(),
            ATTENTION_JOB,
            _ROWS,
            score_rows=score_rows,
            weigh_rows=weigh_rows,
            columns=columns,
            **self._strided("query", query),
            **self._strided("out", self._buffers.attended),
            kv=kv.data_ptr(),
            kv_block_bytes=self._row_bytes(kv),
            storage=self._storage,
            number_bytes=self._number_bytes,
            num_kv_heads=num_kv_heads,
            group=num_heads // num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            window=window,
            scale=head_dim**-0.5 * math.log2(math.e),
        )

    def activate(self) -> None:
        """activated = silu(gate) * up."""
        gate_up, activated = self._buffers.gate_up, self._buffers.activated
        self.program.add(
            silu_kernel(self._storage),
            SILU_JOB,
            self._part,
            gate_up=gate_up.data_ptr(),
            row_bytes=self._row_bytes(gate_up),
            out=activated.data_ptr(),
            width=activated.shape[1],
            unit_rows=unit_rows(activated.shape[1]),
            number_bytes=self._number_bytes,
        )

    def _strided(self, name: str, heads: Tensor) -> dict[str, int]:
        """Where the heads [rows, heads, head_dim] of each row lie."""
        return {
            name: heads.data_ptr(),
            f"{name}_token_bytes": self._row_bytes(heads),
            f"{name}_head_bytes": heads.stride(1) * self._number_bytes,
        }

    def _row_bytes(self, tensor: Tensor) -> int:
        return tensor.stride(0) * self._number_bytes
