"""The size of a Llama-like decoder: the number of its weights, and the number of KV values per token.

    embedding   vocab_size × hidden_size                          and once more for the head, if that is not tied
    per layer   queries      hidden_size × num_heads × head_dim      (+ bias)
                keys         hidden_size × num_kv_heads × head_dim   (+ bias)        values the same
                output       num_heads × head_dim × hidden_size      (+ bias)
                MLP          3 × hidden_size × intermediate_size     (+ biases)      gate, up and down
                norms        2 × hidden_size                         (+ 2 × head_dim: qk-norm)
    at the end  norm         hidden_size

The keys and values of a token are 2 × num_layers × num_kv_heads × head_dim numbers.

Under tensor parallelism each device holds its share of the heads, of the columns or rows of the MLP, and of the head.
Norms and the embedding are on every device; biases that are added after a sum over the devices are on the first one. If
there are more devices than kv heads, several devices hold the same head, its weights and its KV. Figures of a device
are those of the device with the most.
"""

from dataclasses import dataclass

from planning.errors import PlanningError
from planning.shares import Share, shares

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model.

    qkv_bias, output_bias, mlp_bias  true if these projections have a bias
    qk_norm                          true if there are RMS norms over each head's query and key
    dtype                            dtype of the checkpoint; None if config.json does not name it
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str | None = None

    @property
    def num_parameters(self) -> int:
        return self.num_device_parameters(1)

    def check_tensor_parallel(self, size: int) -> None:
        """Raises PlanningError if some of `size` devices would hold no part of the model."""
        for name, number in (
            ("attention heads", self.num_heads),
            ("MLP columns", self.intermediate_size),
            ("tokens of the vocabulary", self.vocab_size),
        ):
            if number < size:
                raise PlanningError(f"tensor_parallel: {size} devices cannot share {number} {name} of {self.name}")

    def shares(self, tensor_parallel: int) -> list[Share]:
        """Returns what each device holds."""
        return shares(self.num_heads, self.num_kv_heads, self.intermediate_size, self.vocab_size, tensor_parallel)

    def num_device_kv_heads(self, tensor_parallel: int) -> int:
        """Returns the number of kv heads of the device with the most."""
        return max(share.num_kv_heads for share in self.shares(tensor_parallel))

    def num_device_parameters(self, tensor_parallel: int) -> int:
        """Returns the number of parameters of the device with the most."""
        return max(map(self.num_share_parameters, self.shares(tensor_parallel)))

    def num_share_parameters(self, share: Share) -> int:
        """Returns the number of parameters of a device. A tied head is a part of the embedding."""
        embedding = self.vocab_size * self.hidden_size
        head = 0 if self.tie_word_embeddings else share.vocab_size * self.hidden_size
        return embedding + head + self._num_layer_parameters(share) + self.hidden_size

    def num_read_parameters(self, tensor_parallel: int = 1) -> int:
        """Returns the number of parameters that a device reads in every step.

        These are all except the embedding table, of which a step needs only some rows.
        """
        return max(
            share.vocab_size * self.hidden_size + self._num_layer_parameters(share) + self.hidden_size
            for share in self.shares(tensor_parallel)
        )

    def num_layer_matrix_parameters(self, tensor_parallel: int = 1) -> int:
        """Returns the number of parameters in the matrices of all layers; each costs two FLOPs per token."""
        return max(map(self._num_matrix_parameters, self.shares(tensor_parallel)))

    def num_head_parameters(self, tensor_parallel: int = 1) -> int:
        """Returns the number of parameters in the matrix to logits; each costs two FLOPs per sampled token."""
        return max(share.vocab_size for share in self.shares(tensor_parallel)) * self.hidden_size

    def num_device_kv_values(self, tensor_parallel: int = 1) -> int:
        """Returns how many numbers one token has in the pool of the device with the most."""
        return 2 * self.num_layers * self.num_device_kv_heads(tensor_parallel) * self.head_dim

    def attention_flops(self, num_pairs: int, tensor_parallel: int = 1) -> int:
        """Returns the FLOPs of scores and weighted values: 2 × 2 for each pair, head and dimension."""
        num_heads = max(share.num_heads for share in self.shares(tensor_parallel))
        return 4 * num_pairs * self.num_layers * num_heads * self.head_dim

    def _num_matrix_parameters(self, share: Share) -> int:
        query, kv = share.num_heads * self.head_dim, share.num_kv_heads * self.head_dim
        return self.num_layers * self.hidden_size * (2 * query + 2 * kv + 3 * share.intermediate_size)

    def _num_layer_parameters(self, share: Share) -> int:
        """Returns the number of parameters of all layers."""
        query, kv = share.num_heads * self.head_dim, share.num_kv_heads * self.head_dim
        after_sums = self.hidden_size * share.is_leading
        vectors = 2 * self.hidden_size
        vectors += self.qkv_bias * (query + 2 * kv) + self.output_bias * after_sums
        vectors += self.mlp_bias * (2 * share.intermediate_size + after_sums)
        vectors += self.qk_norm * 2 * self.head_dim
        return self._num_matrix_parameters(share) + self.num_layers * vectors
