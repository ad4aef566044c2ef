"""Patches of Triton's interpreter: it runs with numpy 2.5, and does not replace the same functions again and again."""

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


def patch_once() -> None:
    """Makes the interpreter replace the functions of triton.language once for each launch.

    It replaces them again in every call of one kernel function by another, which takes a third of the time of tests.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    languages = {id(interpreter.tl), id(interpreter.tl.core)}
    replaced: set[int] = set()

    def patch_missing(function: Any) -> Any:
        seen = {id(value) for value in function.__globals__.values()} & languages
        if seen and seen <= replaced:
            return None  # the interpreter restores the outermost scope only
        scope = patch(function)
        restore = scope.restore

        def restore_all() -> None:
            replaced.clear()
            restore()

        replaced.update(seen)
        scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_missing
