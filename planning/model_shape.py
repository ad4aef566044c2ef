"""A decoder of the Llama kind, counted: how many numbers its weights are, and how many a token keeps in the pool.

    embedding   vocab_size × hidden_size                          and once more for the head, if that is not tied
    a layer     queries      hidden_size × num_heads × head_dim      (+ bias)
                keys         hidden_size × num_kv_heads × head_dim   (+ bias)        values the same
                output       num_heads × head_dim × hidden_size      (+ bias)
                MLP          3 × hidden_size × intermediate_size     (+ biases)      gate, up and down
                norms        2 × hidden_size                         (+ 2 × head_dim: qk-norm)
    at the end  norm         hidden_size

A token's keys and values: 2 × num_layers × num_kv_heads × head_dim numbers.

Under tensor parallelism each device holds its heads, its columns or rows of the MLP and its share of the vocabulary;
norms (and biases that are added after the sum over devices) are on every one. Where there are more devices than kv
heads, each head is on several: its weights and its KV are held as many times.
"""

from dataclasses import dataclass

from planning.errors import PlanningError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """qkv_bias, output_bias, mlp_bias  whether these projections add one
    qk_norm                          RMS norms over each head's query and key
    dtype                            of the checkpoint; None where config.json does not say
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
        """Raises PlanningError where the model cannot be cut into so many equal parts."""
        for name, number in (("attention heads", self.num_heads), ("MLP columns", self.intermediate_size)):
            if number % size:
                raise PlanningError(f"tensor_parallel: {size} devices cannot share {number} {name} of {self.name}")
        if max(size, self.num_kv_heads) % min(size, self.num_kv_heads):
            raise PlanningError(
                f"tensor_parallel: {size} devices cannot share {self.num_kv_heads} kv heads of {self.name}"
            )

    def num_device_kv_heads(self, tensor_parallel: int) -> int:
        """At least one: with more devices than heads, heads are replicated."""
        return max(1, self.num_kv_heads // tensor_parallel)

    def num_device_parameters(self, tensor_parallel: int) -> int:
        """On each device, the one with the largest share of the vocabulary."""
        tables = 1 if self.tie_word_embeddings else 2
        return tables * self._table(tensor_parallel) + self._num_layer_parameters(tensor_parallel) + self.hidden_size

    def num_read_parameters(self, tensor_parallel: int = 1) -> int:
        """What a device reads in every step: all but the table of the embedding, of which a step needs some rows. A
        tied table is the head, and read."""
        untied = 0 if self.tie_word_embeddings else self._table(tensor_parallel)
        return self.num_device_parameters(tensor_parallel) - untied

    def num_layer_matrix_parameters(self, tensor_parallel: int = 1) -> int:
        """Of the matrices in all layers: two FLOPs each for every token."""
        query = self.num_heads // tensor_parallel * self.head_dim
        kv = self.num_device_kv_heads(tensor_parallel) * self.head_dim
        mlp = self.intermediate_size // tensor_parallel
        return self.num_layers * self.hidden_size * (2 * query + 2 * kv + 3 * mlp)

    def num_head_parameters(self, tensor_parallel: int = 1) -> int:
        """Of the matrix to logits: two FLOPs each for every token that is sampled."""
        return self._table(tensor_parallel)

    def num_device_kv_values(self, tensor_parallel: int = 1) -> int:
        """Numbers that one token keeps in the pool of each device."""
        return 2 * self.num_layers * self.num_device_kv_heads(tensor_parallel) * self.head_dim

    def attention_flops(self, num_pairs: int, tensor_parallel: int = 1) -> int:
        """Scores and weighted values: 2 × 2 FLOPs for each pair, head and dimension."""
        return 4 * num_pairs * self.num_layers * (self.num_heads // tensor_parallel) * self.head_dim

    def _table(self, tensor_parallel: int) -> int:
        return -(-self.vocab_size // tensor_parallel) * self.hidden_size

    def _num_layer_parameters(self, tensor_parallel: int) -> int:
        """Of all layers."""
        query = self.num_heads // tensor_parallel * self.head_dim
        kv = self.num_device_kv_heads(tensor_parallel) * self.head_dim
        vectors = 2 * self.hidden_size
        vectors += self.qkv_bias * (query + 2 * kv) + self.output_bias * self.hidden_size
        vectors += self.mlp_bias * (2 * self.intermediate_size // tensor_parallel + self.hidden_size)
        vectors += self.qk_norm * 2 * self.head_dim
        return self.num_layer_matrix_parameters(tensor_parallel) + self.num_layers * vectors
