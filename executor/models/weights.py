"""Loads the layers of a decoder from tensors on disk, which all families name alike."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from executor.checkpoints.checkpoint import TensorSource
from executor.checkpoints.model_config import ModelConfig
from executor.checkpoints.shares import Share, Span, share_of
from executor.errors import CheckpointError
from kernels import Kernels, Linear, reference

Progress = Callable[[int, int], None]
"""Called after each layer with the number of layers loaded and the number of all layers."""

_HEAD = "lm_head.weight"
# Tables that older exporters wrote. The decoder computes them.
_DERIVED = re.compile(r"rotary_emb\.inv_freq$")
_DERIVED_OR_TIED = re.compile(rf"{_DERIVED.pattern}|^lm_head\.weight$")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer. Norms are [hidden_size]; those of queries and keys [head_dim], or None without qk-norm."""

    input_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Weights of a decoder. embedding[vocab_size, hidden_size]; the head is a layer of its own even if it is tied."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Linear

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def num_bytes(self) -> int:
        """Returns the memory that the weights take. A head that is a part of the embedding takes none."""
        embedding = self.embedding.untyped_storage()
        head = getattr(self.head, "weight", None)  # of a layer that keeps the tensor as it is
        is_part = isinstance(head, Tensor) and head.untyped_storage().data_ptr() == embedding.data_ptr()
        num_bytes = self.embedding.nbytes + self.final_norm.nbytes + (0 if is_part else self.head.num_bytes)
        for layer in self.layers:
            norms = (layer.input_norm, layer.mlp_norm, layer.query_norm, layer.key_norm)
            num_bytes += sum(norm.nbytes for norm in norms if norm is not None)
            num_bytes += sum(each.num_bytes for each in (layer.qkv, layer.output, layer.gate_up, layer.down))
        return num_bytes


def load_weights(
    checkpoint: TensorSource,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    progress: Progress | None = None,
    share: Share | None = None,
) -> DecoderWeights:
    """Loads all weights, or those of a share. `config` is that of the whole model.

    Raises CheckpointError for a missing, misshapen or unknown tensor before it reads any, and for a tied head that is
    stored with other numbers, because transformers 5 would use those, and older versions would not.
    """
    ignored = _DERIVED_OR_TIED if config.tie_word_embeddings else _DERIVED
    checkpoint.check_shapes(expected_shapes(config), ignored)
    reader = _Reader(checkpoint, dtype, device, kernels, share or share_of(config, rank=0, size=1))
    layers = []
    for index in range(config.num_layers):
        layers.append(_load_layer(reader, config, f"model.layers.{index}."))
        if progress is not None:
            progress(index + 1, config.num_layers)
    embedding = reader.kept("model.embed_tokens.weight")
    head = embedding[reader.share.vocab.start : reader.share.vocab.stop]
    if not config.tie_word_embeddings:
        head = reader.tensor(_HEAD, rows=reader.share.vocab, is_kept=reader.packing_keeps)
    elif _HEAD in checkpoint.names and not torch.equal(reader.tensor(_HEAD, rows=reader.share.vocab), head):
        raise CheckpointError(
            f"{_HEAD} is not model.embed_tokens.weight, although config.json says so: set tie_word_embeddings to false,"
            " or remove the tensor"
        )
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(layers),
        final_norm=reader.kept("model.norm.weight"),
        head=kernels.pack_linear([head]),
    )


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor that a checkpoint of this configuration must have."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        shapes |= {
            layer + "input_layernorm.weight": (hidden,),
            layer + "post_attention_layernorm.weight": (hidden,),
        }
        if config.qk_norm:
            shapes |= {layer + f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
        for name, out_size, in_size, has_bias in _linears(config):
            shapes[f"{layer}{name}.weight"] = (out_size, in_size)
            if has_bias:
                shapes[f"{layer}{name}.bias"] = (out_size,)
    return shapes


def _linears(config: ModelConfig) -> list[tuple[str, int, int, bool]]:
    """Returns (name, output size, input size, has a bias) of the linear layers in one decoder layer."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    return [
        ("self_attn.q_proj", config.query_size, hidden, config.qkv_bias),
        ("self_attn.k_proj", config.kv_size, hidden, config.qkv_bias),
        ("self_attn.v_proj", config.kv_size, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, config.query_size, config.output_bias),
        ("mlp.gate_proj", intermediate, hidden, config.mlp_bias),
        ("mlp.up_proj", intermediate, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, intermediate, config.mlp_bias),
    ]


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads tensors of a checkpoint in the model's dtype and on its device."""

    checkpoint: TensorSource
    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    share: Share

    @property
    def packing_keeps(self) -> bool:
        """True if a layer that is packed from one weight keeps that tensor."""
        return self.kernels.pack_linear is reference.pack_linear

    def kept(self, name: str) -> Tensor:
        """Returns a tensor that the model keeps as it is. Raises as `tensor` does."""
        return self.tensor(name, is_kept=True)

    def tensor(
        self, name: str, rows: Span | None = None, columns: Span | None = None, *, is_kept: bool = False
    ) -> Tensor:
        """Returns a tensor of finite numbers, or these rows or columns of it.

        is_kept  the tensor gets memory of its own. It may otherwise be a view of the mapped file, which changes when
                 the file is replaced in place, and whose pages are gone when the file is truncated

        Raises CheckpointError if some are not finite, or overflow in the dtype.
        """
        whole = rows is None and columns is None
        stored = self.checkpoint.tensor(name) if whole else self.checkpoint.part(name, rows, columns)
        # One copy, even if the dtype changes too. It costs each rank the size of the embedding and the norms, which as
        # views all processes of a machine would share. A tensor on a GPU is no view of a file.
        is_copied = is_kept and stored.device.type == "cpu"
        tensor = stored.to(device=self.device, dtype=self.dtype, copy=is_copied)
        least, most = torch.aminmax(tensor)  # one pass without temporaries; NaN propagates
        if not (torch.isfinite(least) and torch.isfinite(most)):
            count = int((~torch.isfinite(tensor)).sum())
            raise CheckpointError(f"{name}: {count} of {tensor.numel()} numbers are not finite in {self.dtype}")
        return tensor

    def by_rows(self, prefix: str, rows: dict[str, Span], has_bias: bool) -> Linear:
        """Returns these outputs of several linear layers with one input, stacked into one layer."""
        weights = [self.tensor(f"{prefix}{name}.weight", rows=own) for name, own in rows.items()]
        biases = [self.tensor(f"{prefix}{name}.bias", rows=own) for name, own in rows.items()] if has_bias else None
        return self.kernels.pack_linear(weights, biases)

    def by_columns(self, name: str, columns: Span, has_bias: bool) -> Linear:
        """Returns a linear layer over these inputs, whose output is this share's part of a sum over all shares."""
        weight = self.tensor(f"{name}.weight", columns=columns, is_kept=self.packing_keeps)
        adds_bias = has_bias and self.share.is_leading
        return self.kernels.pack_linear([weight], [self.tensor(f"{name}.bias")] if adds_bias else None)


def _load_layer(reader: _Reader, config: ModelConfig, prefix: str) -> LayerWeights:
    attention, mlp, share = prefix + "self_attn.", prefix + "mlp.", reader.share
    queries, kv = share.heads.times(config.head_dim), share.kv_heads.times(config.head_dim)
    return LayerWeights(
        input_norm=reader.kept(prefix + "input_layernorm.weight"),
        qkv=reader.by_rows(attention, {"q_proj": queries, "k_proj": kv, "v_proj": kv}, config.qkv_bias),
        query_norm=reader.kept(attention + "q_norm.weight") if config.qk_norm else None,
        key_norm=reader.kept(attention + "k_norm.weight") if config.qk_norm else None,
        output=reader.by_columns(attention + "o_proj", queries, config.output_bias),
        mlp_norm=reader.kept(prefix + "post_attention_layernorm.weight"),
        gate_up=reader.by_rows(mlp, dict.fromkeys(("gate_proj", "up_proj"), share.intermediate), config.mlp_bias),
        down=reader.by_columns(mlp + "down_proj", share.intermediate, config.mlp_bias),
    )
