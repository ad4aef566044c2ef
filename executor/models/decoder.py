"""The decoder: a pre-norm transformer with rotary positions, grouped queries and a gated MLP.

One implementation serves all families; they differ in `ModelConfig` only. Vaswani et al., 2017; Touvron et al.
(Llama), 2023; Jiang et al. (Mistral: sliding window), 2023; the Qwen2 and Qwen3 reports (bias, qk-norm).
"""

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from executor.batch import DeviceBatch
from executor.model_config import ModelConfig
from executor.models.weights import DecoderWeights, LayerWeights
from kernels import Kernels


class Attend(Protocol):
    """The attention of one step: called once a layer, for all rows of the step."""

    def __call__(self, query: Tensor, kv: Tensor, out: Tensor, scale: float, window: int) -> None:
        """query[T, Hq, D], kv as in `kernels.Kernels`; mutates out[T, Hq, D]. The step's KV has been stored."""
        ...


class Decoder:
    """Weights and rotary tables on one device; stateless between steps: all state is in the KV pool."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, kernels: Kernels, max_model_len: int) -> None:
        self.config = config
        self.weights = weights
        self._kernels = kernels
        self._scale = config.head_dim**-0.5
        cos, sin = config.rope.tables(config.head_dim, max_model_len)
        self.cos, self.sin = cos.to(weights.embedding.device), sin.to(weights.embedding.device)

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    def forward(self, batch: DeviceBatch, pool: Tensor, attend: Attend | None = None) -> Tensor:
        """Logits[num_samples, vocab_size] of the batch's sample rows; writes the KV of all its tokens to the pool.

        pool[num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]. attend: of a step that was planned for all
        layers at once; without it, each layer attends to the batch's decodes and prefills by itself.
        """
        return self.logits(self.hidden(batch, pool, attend))

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocab_size] of hidden[n, hidden_size]."""
        return self.weights.head(hidden) if len(hidden) else hidden.new_empty((0, self.config.vocab_size))

    def hidden(self, batch: DeviceBatch, pool: Tensor, attend: Attend | None = None) -> Tensor:
        """What logits are made of, [num_samples, hidden_size]; all else is as in `forward`."""
        attend = attend or partial(self._attend, batch)
        kernels, eps = self._kernels, self.config.rms_norm_eps
        layers = self.weights.layers
        residual = torch.nn.functional.embedding(batch.token_ids, self.weights.embedding)
        hidden = kernels.rms_norm(residual, layers[0].input_norm, eps)
        for index, layer in enumerate(layers):
            attended = self._attention(hidden, layer, batch, pool[index], self.config.windows[index], attend)
            if index + 1 == len(layers) and batch.sample_rows is not None:
                # Behind the last attention only the rows count that logits are made of: of a prompt one, or none.
                if not len(batch.sample_rows):
                    return residual[:0]
                attended, residual = attended[batch.sample_rows], residual[batch.sample_rows]
            hidden = kernels.add_rms_norm(layer.output(attended), residual, layer.mlp_norm, eps)
            hidden = layer.down(kernels.silu_multiply(layer.gate_up(hidden)))
            if index + 1 < len(layers):
                hidden = kernels.add_rms_norm(hidden, residual, layers[index + 1].input_norm, eps)
        return kernels.add_rms_norm(hidden, residual, self.weights.final_norm, eps)

    def _attention(
        self, hidden: Tensor, layer: LayerWeights, batch: DeviceBatch, kv: Tensor, window: int, attend: Attend
    ) -> Tensor:
        """hidden[T, hidden_size] → what the heads have attended to, [T, Hq * D]."""
        query, key, value = self._project(hidden, layer)
        self._kernels.rotate_and_store(query, key, value, self.cos, self.sin, batch.positions, kv, batch.slot_mapping)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        attend(query, kv, out, self._scale, window)
        return out.flatten(1)

    def _attend(self, batch: DeviceBatch, query: Tensor, kv: Tensor, out: Tensor, scale: float, window: int) -> None:
        """Rows of decodes come first, then those of prefills."""
        if batch.decode is not None:
            rows = slice(0, batch.num_decode_rows)
            self._kernels.attention_decode(
                query[rows],
                kv,
                batch.decode.block_tables,
                batch.decode.context_lens,
                out[rows],
                scale,
                window,
            )
        if batch.prefill is not None:
            rows = slice(batch.num_decode_rows, None)
            self._kernels.attention_prefill(
                query[rows],
                kv,
                batch.prefill.block_tables,
                batch.prefill.query_starts,
                batch.prefill.context_lens,
                out[rows],
                scale,
                window,
            )

    def _project(self, hidden: Tensor, layer: LayerWeights) -> tuple[Tensor, Tensor, Tensor]:
        """query[T, Hq, D], key[T, Hkv, D] and value[T, Hkv, D], normed per head where the model does so."""
        config, eps = self.config, self.config.rms_norm_eps
        qkv = layer.qkv(hidden).view(len(hidden), -1, config.head_dim)
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        query, key, value = torch.split(qkv, heads, dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = self._kernels.rms_norm(query, layer.query_norm, eps)
            key = self._kernels.rms_norm(key, layer.key_norm, eps)
        return query, key, value
