"""Says whether this process runs Triton's interpreter, and repairs its bfloat16."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def repair_bfloat16() -> None:
    """Makes the interpreter round to bfloat16 as devices do, and multiply matrices of bfloat16.

    Numpy has no bfloat16, so the interpreter keeps the bits as uint16. In Triton 3.6.0 to 3.9.0 it rounds towards zero,
    and `tl.dot` multiplies the bits as integers.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def repaired_cast(builder: Any, source: Any, target: Any) -> Any:
        if (source.dtype.scalar, target.scalar) == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.array(source.data)).to(torch.bfloat16)
            return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
        return cast(builder, source, target)

    def repaired_dot(builder: Any, a: Any, b: Any, *others: Any) -> Any:
        return dot(builder, widened(a), widened(b), *others)

    def widened(matrix: Any) -> Any:
        if matrix.dtype.scalar != tl.bfloat16:
            return matrix
        return TensorHandle((matrix.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = repaired_cast, repaired_dot
