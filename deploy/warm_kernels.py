"""Compiles the CPU kernels for the shapes of most models into the cache when an image is built.

numba's cache depends on the CPU. On another kind of CPU the executor compiles once more, into the volume that
compose.yaml mounts over this cache.
"""

import itertools

import torch

from kernels import AttentionShape
from kernels.cpu import warm_up

HEAD_DIMS = (32, 64, 128)
DTYPES = (torch.float32, torch.bfloat16)

for head_dim, dtype in itertools.product(HEAD_DIMS, DTYPES):
    warm_up(AttentionShape(dtype=dtype, num_heads=2, num_kv_heads=1, head_dim=head_dim, block_size=16))
    print(f"compiled: head_dim {head_dim}, {str(dtype).removeprefix('torch.')}", flush=True)
