"""The size of a Llama-like decoder: the number of its weights, and the number of KV values per token.

    embedding   vocab_size × hidden_size                          and once more for the head, if that is not tied
    per layer   queries      hidden_size × num_heads × head_dim      (+ bias)
                keys         hidden_size × num_kv_heads × head_dim   (+ bias)        values the same
                output       num_heads × head_dim × hidden_size      (+ bias)
                MLP          3 × hidden_size × intermediate_size     (+ biases)      gate, up and down
                norms        2 × hidden_size                         (+ 2 × head_dim: qk-norm)
    at the end  norm         hidden_size

The keys and values of a token are 2 × num_layers × num_kv_heads × head_dim numbers.

Under tensor parallelism each device holds its share of the heads, of the columns or rows of the MLP, and of the
vocabulary. Norms, and biases that are added after the sum over the devices, are on every device. If there are more
devices than kv heads, several devices hold the same head, its weights and its KV.
"""

from dataclasses import dataclass

from planning.errors import PlanningError

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
        """Raises PlanningError if the model cannot be divided into `size` equal parts."""
        for name, number in (("attention heads", self.num_heads), ("MLP columns", self.intermediate_size)):
            if number % size:
                raise PlanningError(f"tensor_parallel: {size} devices cannot share {number} {name} of {self.name}")
        if max(size, self.num_kv_heads) % min(size, self.num_kv_heads):
            raise PlanningError(
                f"tensor_parallel: {size} devices cannot share {self.num_kv_heads} kv heads of {self.name}"
            )

    def num_device_kv_heads(self, tensor_parallel: int) -> int:
        """Returns the number of kv heads per device; at least one, because heads are replicated if necessary."""
        return max(1, self.num_kv_heads // tensor_parallel)

    def num_device_parameters(self, tensor_parallel: int) -> int:
        """Returns the number of parameters of the device with the largest share of the vocabulary."""
        tables = 1 if self.tie_word_embeddings else 2
        return tables * self._table(tensor_parallel) + self._num_layer_parameters(tensor_parallel) + self.hidden_size

    def num_read_parameters(self, tensor_parallel: int = 1) -> int:
        """Returns the number of parameters that a device reads in every step.

        These are all except the embedding table, of which a step needs only some rows. A tied table is also the head,
        so it is read.
        """
        untied = 0 if self.tie_word_embeddings else self._table(tensor_parallel)
        return self.num_device_parameters(tensor_parallel) - untied

    def num_layer_matrix_parameters(self, tensor_parallel: int = 1) -> int:
        """Returns the number of parameters in the matrices of all layers; each costs two FLOPs per token."""
        query = self.num_heads // tensor_parallel * self.head_dim
        kv = self.num_device_kv_heads(tensor_parallel) * self.head_dim
        mlp = self.intermediate_size // tensor_parallel
        return self.num_layers * self.hidden_size * (2 * query + 2 * kv + 3 * mlp)

    def num_head_parameters(self, tensor_parallel: int = 1) -> int:
        """Returns the number of parameters in the matrix to logits; each costs two FLOPs per sampled token."""
        return self._table(tensor_parallel)

    def num_device_kv_values(self, tensor_parallel: int = 1) -> int:
        """Returns how many numbers one token has in the pool of each device."""
        return 2 * self.num_layers * self.num_device_kv_heads(tensor_parallel) * self.head_dim

    def attention_flops(self, num_pairs: int, tensor_parallel: int = 1) -> int:
        """Returns the FLOPs of scores and weighted values: 2 × 2 for each pair, head and dimension."""
        return 4 * num_pairs * self.num_layers * (self.num_heads // tensor_parallel) * self.head_dim

    def _table(self, tensor_parallel: int) -> int:
        return -(-self.vocab_size // tensor_parallel) * self.hidden_size

    def _num_layer_parameters(self, tensor_parallel: int) -> int:
        """Returns the number of parameters of all layers."""
        query = self.num_heads // tensor_parallel * self.head_dim
        kv = self.num_device_kv_heads(tensor_parallel) * self.head_dim
        vectors = 2 * self.hidden_size
        vectors += self.qkv_bias * (query + 2 * kv) + self.output_bias * self.hidden_size
        vectors += self.mlp_bias * (2 * self.intermediate_size // tensor_parallel + self.hidden_size)
        vectors += self.qk_norm * 2 * self.head_dim
        return self.num_layer_matrix_parameters(tensor_parallel) + self.num_layers * vectors
