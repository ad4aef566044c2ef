"""A decoder that runs operation by operation on any device. With reference kernels, the other models are tested
against it.

Each layer attends for the rows of decodes, which come first, and then for those of prefills.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.models.decoder import Decoder, Rows
from executor.plans.plan import Ints
from executor.slots.launch import Launch
from kernels import Kernels


class EagerModel:
    """Implements `executor.models.model.Model`.

    pool[num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]
    """

    def __init__(self, decoder: Decoder, kernels: Kernels, pool: Tensor) -> None:
        self.decoder = decoder
        self._kernels = kernels
        self.pool = pool

    def forward(self, launch: Launch) -> Tensor:
        """Returns logits[len(launch.logit_rows), vocab_size]; on a GPU they are complete when this returns."""
        device = self.pool.device
        own = Rows(
            token_ids=_tensor(launch.token_ids, device),
            positions=_tensor(launch.positions, device),
            slot_mapping=_tensor(launch.slot_mapping, device),
            logit_rows=_tensor(launch.logit_rows, device),
        )
        attend = _Attention.of(launch, self.pool.shape[4], self._kernels, device)
        logits = self.decoder.forward(own, self.pool, attend)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return logits

    def copy_blocks(self, copies: Ints) -> None:
        """Copies whole blocks of all layers. copies[n, 2]: (source, destination)."""
        pairs = np.ascontiguousarray(copies.T, dtype=np.int64)
        sources, destinations = torch.from_numpy(pairs).to(self.pool.device)
        self._kernels.copy_blocks(self.pool, sources, destinations)


@dataclass(frozen=True, slots=True)
class _Attention:
    """Implements `executor.models.decoder.Attend`.

    query_starts[prefills + 1] int32 count from the first row of a prefill.
    """

    kernels: Kernels
    num_decodes: int
    block_tables: Tensor
    context_lens: Tensor
    query_starts: Tensor

    @classmethod
    def of(cls, launch: Launch, block_size: int, kernels: Kernels, device: torch.device) -> "_Attention":
        """Returns the attention of a step."""
        num_columns = launch.num_table_columns(block_size)
        starts = launch.query_starts[launch.num_decodes :]
        return cls(
            kernels=kernels,
            num_decodes=launch.num_decodes,
            block_tables=_tensor(launch.block_tables[launch.slots, :num_columns], device),
            context_lens=_tensor(launch.context_lens, device),
            query_starts=_tensor(starts - starts[0], device),
        )

    def __call__(self, query: Tensor, kv: Tensor, out: Tensor, scale: float, window: int) -> None:
        num, tables, lengths = self.num_decodes, self.block_tables, self.context_lens
        if num:
            self.kernels.attention_decode(query[:num], kv, tables[:num], lengths[:num], out[:num], scale, window)
        if num < len(tables):
            self.kernels.attention_prefill(
                query[num:], kv, tables[num:], self.query_starts, lengths[num:], out[num:], scale, window
            )


def _tensor(array: NDArray[np.int32] | NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
