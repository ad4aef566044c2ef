"""A model with its KV pool, as a step uses it."""

from typing import Protocol

from torch import Tensor

from executor.plans.plan import Ints
from executor.slots.launch import Launch


class Model(Protocol):
    """Weights and the KV pool[num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]."""

    @property
    def pool(self) -> Tensor: ...

    def forward(self, launch: Launch) -> Tensor:
        """Returns logits[len(launch.logit_rows), vocab_size], which the caller may use and change until the next call.

        Writes the KV of all rows.
        """
        ...

    def copy_blocks(self, copies: Ints) -> None:
        """Copies whole blocks of all layers. copies[n, 2]: (source, destination)."""
        ...
