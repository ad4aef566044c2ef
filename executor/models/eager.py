"""A decoder that is run operation by operation, on any device."""

import numpy as np
import torch
from torch import Tensor

from executor.batch import Batch, DeviceBatch
from executor.models.decoder import Decoder
from executor.plan import Ints
from kernels import Kernels


class EagerModel:
    """See `executor.runner.Model`. pool[num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]."""

    def __init__(self, decoder: Decoder, kernels: Kernels, pool: Tensor) -> None:
        self.decoder = decoder
        self._kernels = kernels
        self.pool = pool

    def forward(self, batch: Batch, block_tables: Ints) -> Tensor:
        """Logits[num_samples, vocab_size]; on a GPU they are there when this returns."""
        on_device = DeviceBatch.of(batch, block_tables, self.pool.device)
        logits = self.decoder.forward(on_device, self.pool)
        if self.pool.device.type == "cuda":
            torch.cuda.synchronize(self.pool.device)
        return logits

    def copy_blocks(self, copies: Ints) -> None:
        """copies[n, 2]: (source, destination)."""
        pairs = np.ascontiguousarray(copies.T, dtype=np.int64)
        sources, destinations = torch.from_numpy(pairs).to(self.pool.device)
        self._kernels.copy_blocks(self.pool, sources, destinations)
