"""Patches of Triton's interpreter: it runs with numpy 2.5, and does not do the same work again and again.

They hold for the whole process, in which nothing but the interpreter may use `triton.language`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any


def patch_interpreter() -> None:
    _repair_indices()
    _replace_functions_once()
    _reuse_types()
    _leave_out_overflow_checks()


def _repair_indices() -> None:
    """Makes the interpreter turn its scalars into loop bounds.

    It keeps a scalar as an array of one element. Triton 3.6 passes that array to `int`, which numpy 2.5 refuses.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def repaired_patch(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = repaired_patch


def _replace_functions_once() -> None:
    """Makes the interpreter replace the functions of triton.language once.

    It replaces them again for each launch and in every call of one kernel function by another, which takes 40 % of the
    time of tests.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    languages = {id(interpreter.tl), id(interpreter.tl.core)}
    seen: set[int] = set()  # modules with kernels, by the id of their names, and languages
    restores_nothing = interpreter._LangPatchScope()

    def patch_missing(function: Any) -> Any:
        names = function.__globals__
        if id(names) not in seen:
            used = {id(value) for value in names.values()} & languages
            if not used or not used <= seen:
                patch(function)
            seen.update({id(names)}, used)
        return restores_nothing

    interpreter._patch_lang = patch_missing


def _reuse_types() -> None:
    """Makes the interpreter reuse what it derives from a type or a shape.

    It derives them anew for each value, which takes a third of the time of tests.
    """
    from triton.language import core
    from triton.runtime import interpreter

    numpy_type_of = interpreter._get_np_dtype
    numpy_types: dict[str, Any] = {}

    def numpy_type(value_type: Any) -> Any:
        scalar = value_type.scalar
        if scalar.name not in numpy_types:
            numpy_types[scalar.name] = numpy_type_of(scalar)
        return numpy_types[scalar.name]

    init_block = core.block_type.__init__
    blocks: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *[getattr(size, "value", size) for size in shape]
        if key not in blocks:
            init_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    init = core.tensor.__init__
    shapes: dict[int, tuple[Any, ...]] = {}  # by the id of the type's shape, which is kept so that the id is not reused

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else None
        if id(shape) not in shapes:
            init(self, handle, type)
            shapes[id(shape)] = self.shape, self.numel, shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel, _ = shapes[id(shape)]

    interpreter._get_np_dtype = numpy_type
    core.block_type.__init__ = init_block_type
    core.tensor.__init__ = init_tensor


def _leave_out_overflow_checks() -> None:
    """Makes the interpreter compute sums of integers once, not again in 64 bits. On GPUs only debug builds do that."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
