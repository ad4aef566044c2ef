"""Repairs the loops of Triton 3.6's interpreter with numpy 2.5."""

from __future__ import annotations

from typing import Any


def repair_indices() -> None:
    """Makes the interpreter turn its scalars into loop bounds.

    It keeps a scalar as an array of one element. Triton 3.6 passes that array to `int`, which numpy 2.5 refuses.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def repaired_patch(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = repaired_patch
