"""The decoder: a pre-norm transformer with rotary positions, grouped queries and a gated MLP.

One implementation serves all families; they differ in `ModelConfig` only. Vaswani et al., 2017; Touvron et al.
(Llama), 2023; Jiang et al. (Mistral: sliding window), 2023; the Qwen2 and Qwen3 reports (bias, qk-norm).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from executor.checkpoints.model_config import ModelConfig
from executor.models.communicator import Communicator
from executor.models.weights import DecoderWeights, LayerWeights
from kernels import Kernels


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step on the device, one for each token.

    token_ids[T], positions[T] int32; slot_mapping[T] int64, where each row's KV goes. logit_rows[L] int64 names
    the rows that logits are made of; None: all of them, in order.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    logit_rows: Tensor | None = None


class Attend(Protocol):
    """The attention of one step, called once for each layer and all rows of the step."""

    def __call__(self, query: Tensor, kv: Tensor, out: Tensor, scale: float, window: int) -> None:
        """Attends with query[T, Hq, D] to kv, laid out as in `kernels.Kernels`. Mutates out[T, Hq, D].

        The KV of the step's rows must have been stored.
        """
        ...


class Decoder:
    """Weights and rotary tables on one device. It has no state between steps: all state is in the KV pool.

    communicator  to the other ranks, if this decoder is the share of one rank; `config` is then that of the share
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        kernels: Kernels,
        max_model_len: int,
        communicator: Communicator | None = None,
    ) -> None:
        self.config = config
        self.communicator = communicator
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

    @property
    def num_own_logits(self) -> int:
        """The number of logits that the head of this rank makes for a row."""
        return self.config.vocab_size if self.communicator is None else len(self.communicator.share.vocab)

    @property
    def gathers_logits(self) -> bool:
        """True if this rank receives logits of other ranks."""
        return self.communicator is not None and self.communicator.share.is_leading

    def forward(self, rows: Rows, pool: Tensor, attend: Attend) -> Tensor:
        """Returns logits[L, vocab_size] of the logit rows, and writes the KV of all rows to the pool.

        pool[num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim].
        """
        return self.logits(self.hidden(rows, pool, attend))

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits[n, vocab_size] of hidden[n, hidden_size]. A rank that does not lead returns its own alone."""
        if not len(hidden):
            return hidden.new_empty((0, self.config.vocab_size))
        own = self.weights.head(hidden)
        if self.communicator is None:
            return own
        logits = own.new_empty((len(own), self.config.vocab_size)) if self.gathers_logits else None
        self.communicator.gather(own, logits)
        return own if logits is None else logits

    def hidden(self, rows: Rows, pool: Tensor, attend: Attend) -> Tensor:
        """Returns the hidden states that logits are made of, [L, hidden_size]. All else is as in `forward`."""
        kernels, eps = self._kernels, self.config.rms_norm_eps
        layers = self.weights.layers
        residual = torch.nn.functional.embedding(rows.token_ids, self.weights.embedding)
        hidden = kernels.rms_norm(residual, layers[0].input_norm, eps)
        for index, layer in enumerate(layers):
            attended = self._attention(hidden, layer, rows, pool[index], self.config.windows[index], attend)
            if index + 1 == len(layers) and rows.logit_rows is not None:
                # After the last attention only the logit rows matter: one of a prompt, or none.
                if not len(rows.logit_rows):
                    return residual[:0]
                attended, residual = attended[rows.logit_rows], residual[rows.logit_rows]
            hidden = kernels.add_rms_norm(self._sum(layer.output(attended)), residual, layer.mlp_norm, eps)
            hidden = self._sum(layer.down(kernels.silu_multiply(layer.gate_up(hidden))))
            if index + 1 < len(layers):
                hidden = kernels.add_rms_norm(hidden, residual, layers[index + 1].input_norm, eps)
        return kernels.add_rms_norm(hidden, residual, self.weights.final_norm, eps)

    def _sum(self, partial: Tensor) -> Tensor:
        """Returns the sum over all ranks, in the memory of this rank's part."""
        if self.communicator is not None:
            self.communicator.sum(partial)
        return partial

    def _attention(
        self, hidden: Tensor, layer: LayerWeights, rows: Rows, kv: Tensor, window: int, attend: Attend
    ) -> Tensor:
        """Returns the output of the heads, [T, Hq * D], for hidden[T, hidden_size]."""
        query, key, value = self._project(hidden, layer)
        self._kernels.rotate_and_store(query, key, value, self.cos, self.sin, rows.positions, kv, rows.slot_mapping)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        attend(query, kv, out, self._scale, window)
        return out.flatten(1)

    def _project(self, hidden: Tensor, layer: LayerWeights) -> tuple[Tensor, Tensor, Tensor]:
        """Returns query[T, Hq, D], key[T, Hkv, D] and value[T, Hkv, D], normed per head if the model does so."""
        config, eps = self.config, self.config.rms_norm_eps
        qkv = layer.qkv(hidden).view(len(hidden), -1, config.head_dim)
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        query, key, value = torch.split(qkv, heads, dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = self._kernels.rms_norm(query, layer.query_norm, eps)
            key = self._kernels.rms_norm(key, layer.key_norm, eps)
        return query, key, value
