"""Matrix products in full precision: the reference promises sums in float32, which a GPU may cut short by default."""

import torch

from executor.errors import ConfigError

_REDUCED = (
    "allow_tf32",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


def sum_in_float32() -> None:
    """Switches off TF32 and sums in half precision, for the whole process. Call it before anything is computed.

    TF32 rounds the inputs of float32 products to 10 bits. With reduced-precision reductions, a half-precision product
    whose sum is split among multiprocessors rounds the parts before it adds them. Raises ConfigError if a shortcut
    stays on: TORCH_ALLOW_TF32_CUBLAS_OVERRIDE in the environment overrides torch.
    """
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    for name in _REDUCED:
        setattr(products, name, False)
    convolutions.allow_tf32 = False
    left = [name for name in _REDUCED if getattr(products, name)]
    if left or convolutions.allow_tf32:
        names = ", ".join(left) or "cudnn.allow_tf32"
        raise ConfigError(f"{names} cannot be switched off: unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
