"""A decoder that is run operation by operation, on any device, with the kernels of the reference: the yardstick.

Each layer attends to the rows of decodes, which come first, and then to those of prefills, by the arrays of the batch.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.models.decoder import Decoder, Rows
from executor.plans.plan import Ints
from executor.slots.batch import Batch
from kernels import Kernels


class EagerModel:
    """See `executor.device.runner.Model`. pool[num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]."""

    def __init__(self, decoder: Decoder, kernels: Kernels, pool: Tensor) -> None:
        self.decoder = decoder
        self._kernels = kernels
        self.pool = pool

    def forward(self, batch: Batch, block_tables: Ints) -> Tensor:
        """Logits[num_samples, vocab_size]; on a GPU they are there when this returns."""
        device = self.pool.device
        rows = Rows(
            token_ids=_tensor(batch.token_ids, device),
            positions=_tensor(batch.positions, device),
            slot_mapping=_tensor(batch.slot_mapping, device),
            sample_rows=_tensor(batch.sample_rows.astype(np.int64), device),
        )
        logits = self.decoder.forward(rows, self.pool, _Attention.of(batch, block_tables, self._kernels, device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return logits

    def copy_blocks(self, copies: Ints) -> None:
        """copies[n, 2]: (source, destination)."""
        pairs = np.ascontiguousarray(copies.T, dtype=np.int64)
        sources, destinations = torch.from_numpy(pairs).to(self.pool.device)
        self._kernels.copy_blocks(self.pool, sources, destinations)


@dataclass(frozen=True, slots=True)
class _Attention:
    """See `executor.models.decoder.Attend`. query_starts[prefills + 1] int32 count from the first prefill row."""

    kernels: Kernels
    num_decodes: int
    block_tables: Tensor
    context_lens: Tensor
    query_starts: Tensor

    @classmethod
    def of(cls, batch: Batch, block_tables: Ints, kernels: Kernels, device: torch.device) -> "_Attention":
        """block_tables[max_num_seqs, max_blocks_per_seq]: those of all slots."""
        num_columns = -(-int(batch.context_lens.max()) // batch.block_size)
        starts = batch.query_starts[batch.num_decodes :]
        return cls(
            kernels=kernels,
            num_decodes=batch.num_decodes,
            block_tables=_tensor(block_tables[batch.slots, :num_columns], device),
            context_lens=_tensor(batch.context_lens, device),
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
