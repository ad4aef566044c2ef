"""Compiles the CPU kernels for the shapes of most models into the cache when an image is built.

numba's cache depends on the CPU. On another kind of CPU the executor compiles once more, into the volume that
compose.yaml mounts over this cache.
"""

import importlib
import itertools

import torch

# An installation has the tree's packages inside `quire`; a type checker of the tree does not find them there.
kernels = importlib.import_module("quire.kernels")
cpu = importlib.import_module("quire.kernels.cpu")

HEAD_DIMS = (32, 64, 128)
DTYPES = (torch.float32, torch.bfloat16)

for head_dim, dtype in itertools.product(HEAD_DIMS, DTYPES):
    cpu.warm_up(kernels.AttentionShape(dtype=dtype, num_heads=2, num_kv_heads=1, head_dim=head_dim, block_size=16))
    print(f"compiled: head_dim {head_dim}, {str(dtype).removeprefix('torch.')}", flush=True)
