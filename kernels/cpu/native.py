"""What numba has no word for: raw addresses, atomic counters and 16-bit floats, written as LLVM instructions.

Kernels take addresses (int64) and do their own arithmetic, so that one compiled function serves any stride and
no array has to be wrapped on the way in. The functions named `emit_…` write instructions for a scalar or for a
vector alike; the decorated ones are called from compiled code.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import torch
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import carray  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.compiler import inlined, types

if TYPE_CHECKING:
    from collections.abc import Callable

# How the numbers of a tensor are stored. Compiled code sees these as literals, one variant a storage.
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2

_STORAGES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}

LINE_BYTES = 64
"""Of a cache line."""

_FEATURES = binding.get_host_cpu_features()

HAS_BFLOAT16_DOTS = bool(_FEATURES.get("avx512bf16", False))
"""Whether the processor multiplies bfloat16 as they are."""

_F32, _F16, _I16, _I32, _I64 = ir.FloatType(), ir.HalfType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)

binding.initialize_native_asmparser()  # for emit_dot_pairs

codegen: Any = cgutils  # see compiler.types

Value = Any  # an llvmlite value
Builder = Any  # an llvmlite IRBuilder


def instruction(function: Callable[..., Any]) -> Any:
    """For what compiled code calls and LLVM instructions define. Literal arguments arrive as literal types.

    The function gets numba's types of the arguments, after numba's typing context; it returns the signature and what
    writes the instructions: generate(context, builder, signature, arguments).
    """
    return intrinsic(prefer_literal=True)(function)


def storage_of(dtype: torch.dtype) -> int:
    """How numbers of a dtype are stored. Raises TypeError for one that kernels do not know."""
    storage = _STORAGES.get(dtype)
    if storage is None:
        raise TypeError(f"kernels take float32, bfloat16 and float16, not {dtype}")
    return storage


def storage_bytes(storage: int) -> int:
    """Bytes of one number."""
    return 4 if storage == FLOAT32 else 2


def strided(name: str, heads: torch.Tensor) -> dict[str, int]:
    """Where heads[rows, heads, head_dim] lie, as fields of a job: `name`, `name_token_bytes` and `name_head_bytes`."""
    number_bytes = heads.element_size()
    return {
        name: heads.data_ptr(),
        f"{name}_token_bytes": heads.stride(0) * number_bytes,
        f"{name}_head_bytes": heads.stride(1) * number_bytes,
    }


def shaped(scalar: Any, lanes: int) -> Any:
    """The LLVM type of `lanes` scalars; one lane is the scalar itself."""
    return scalar if lanes == 1 else ir.VectorType(scalar, lanes)


def lanes_of(value: Value) -> int:
    """How many numbers an LLVM value holds."""
    return value.type.count if isinstance(value.type, ir.VectorType) else 1


def constant(scalar: Any, number: float, lanes: int) -> Value:
    """A constant with the same number in every lane."""
    if lanes == 1:
        return ir.Constant(scalar, number)
    return ir.Constant(shaped(scalar, lanes), [ir.Constant(scalar, number)] * lanes)


def call_llvm(builder: Builder, name: str, *arguments: Value) -> Value:
    """Calls an overloaded LLVM intrinsic (such as llvm.fmuladd) whose operands all have one float type."""
    kind = arguments[0].type
    lanes = lanes_of(arguments[0])
    suffix = "f32" if lanes == 1 else f"v{lanes}f32"
    function_type = ir.FunctionType(kind, [kind] * len(arguments))
    function = codegen.get_or_insert_function(builder.module, function_type, f"{name}.{suffix}")
    return builder.call(function, arguments)


def emit_widen(builder: Builder, stored: Value, storage: int) -> Value:
    """Stored numbers, as loaded, as float32."""
    lanes = lanes_of(stored)
    if storage == FLOAT32:
        return stored
    if storage == FLOAT16:
        return builder.fpext(stored, shaped(_F32, lanes))
    # A bfloat16 is the upper half of the float32 of the same value.
    wide = builder.zext(stored, shaped(_I32, lanes))
    return builder.bitcast(builder.shl(wide, constant(_I32, 16, lanes)), shaped(_F32, lanes))


def emit_widen_pairs(builder: Builder, pairs: Value) -> tuple[Value, Value]:
    """Pairs of bfloat16, as loaded: the first ones and the second ones, as float32."""
    lanes = lanes_of(pairs)
    first = builder.shl(pairs, constant(_I32, 16, lanes))
    second = builder.and_(pairs, constant(_I32, 0xFFFF0000, lanes))
    return builder.bitcast(first, shaped(_F32, lanes)), builder.bitcast(second, shaped(_F32, lanes))


def emit_load_pairs(builder: Builder, address: Value, lanes: int) -> Value:
    """`lanes` pairs of 16-bit numbers, each pair as an int32."""
    pointer = builder.inttoptr(address, shaped(_I32, lanes).as_pointer())
    return builder.load(pointer, align=2)


def emit_dot_pairs(builder: Builder, a: Value, b: Value, sums: Value) -> Value:
    """sums + a · b for 16 pairs of bfloat16 each, where HAS_BFLOAT16_DOTS.

    Products are exact; each of the two sums is rounded to nearest, and denormals count as zero.
    """
    vector, pairs = sums.type, shaped(_I32, 16)
    kind = ir.FunctionType(vector, [vector, pairs, pairs])
    # LLVM's own name for it takes other types from version to version.
    return builder.asm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", [sums, a, b], side_effect=False)


def emit_load(builder: Builder, address: Value, storage: int, lanes: int) -> Value:
    """`lanes` stored numbers as float32. Any alignment that suits one number."""
    scalar = (_F32, _I16, _F16)[storage]
    pointer = builder.inttoptr(address, shaped(scalar, lanes).as_pointer())
    return emit_widen(builder, builder.load(pointer, align=storage_bytes(storage)), storage)


def emit_round(builder: Builder, value: Value, storage: int) -> Value:
    """float32 as stored bits, to nearest even; infinities and NaN stay what they are."""
    lanes = lanes_of(value)
    if storage == FLOAT32:
        return value
    if storage == FLOAT16:
        return builder.fptrunc(value, shaped(_F16, lanes))
    bits = builder.bitcast(value, shaped(_I32, lanes))
    odd = builder.and_(builder.lshr(bits, constant(_I32, 16, lanes)), constant(_I32, 1, lanes))
    rounded = builder.add(bits, builder.add(odd, constant(_I32, 0x7FFF, lanes)))
    # The carry of rounding could turn a NaN into zero: quiet it instead.
    quiet = builder.or_(bits, constant(_I32, 0x00400000, lanes))
    is_nan = builder.fcmp_unordered("uno", value, value)
    chosen = builder.select(is_nan, quiet, rounded)
    return builder.trunc(builder.lshr(chosen, constant(_I32, 16, lanes)), shaped(_I16, lanes))


def emit_store(builder: Builder, value: Value, address: Value, storage: int) -> None:
    """Stores float32 numbers, rounded to the storage."""
    rounded = emit_round(builder, value, storage)
    pointer = builder.inttoptr(address, rounded.type.as_pointer())
    builder.store(rounded, pointer, align=storage_bytes(storage))


def emit_splat(builder: Builder, number: Value, lanes: int) -> Value:
    """A vector with `number` in every lane."""
    empty = ir.Constant(ir.VectorType(number.type, lanes), ir.Undefined)
    vector = builder.insert_element(empty, number, ir.Constant(_I32, 0))
    everywhere = ir.Constant(ir.VectorType(_I32, lanes), [ir.Constant(_I32, 0)] * lanes)
    return builder.shuffle_vector(vector, vector, everywhere)


def emit_prefetch(builder: Builder, address: Value) -> None:
    """Asks for the cache line at an address."""
    line = ir.IntType(8).as_pointer()
    function_type = ir.FunctionType(ir.VoidType(), [line, _I32, _I32, _I32])
    function = codegen.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    read_only, to_all_levels, data = (ir.Constant(_I32, hint) for hint in (0, 3, 1))
    builder.call(function, [builder.inttoptr(address, line), read_only, to_all_levels, data])


# 2 ** f on [-0.5, 0.5]: least squares of the relative error at Chebyshev nodes, 2e-9 off before rounding.
_EXP2 = (1.0, 0.69314718, 0.24022648, 0.05550329, 0.0096183736, 0.0013399848, 0.00015370705)


def emit_exp2(builder: Builder, x: Value) -> Value:
    """2 ** x for float32, about 1e-7 relative; below -126 it is zero, above 127 it stays at 2 ** 127."""
    lanes = lanes_of(x)

    def number(value: float) -> Value:
        return constant(_F32, value, lanes)

    vanishes = builder.fcmp_ordered("<", x, number(-126.0))
    clamped = builder.select(builder.fcmp_ordered(">", x, number(127.0)), number(127.0), x)
    clamped = builder.select(vanishes, number(-126.0), clamped)
    whole = call_llvm(builder, "llvm.rint", clamped)
    fraction = builder.fsub(clamped, whole)
    power = number(_EXP2[-1])
    for coefficient in reversed(_EXP2[:-1]):
        power = call_llvm(builder, "llvm.fmuladd", power, fraction, number(coefficient))
    exponent = builder.add(builder.fptosi(whole, shaped(_I32, lanes)), constant(_I32, 127, lanes))
    scale = builder.bitcast(builder.shl(exponent, constant(_I32, 23, lanes)), shaped(_F32, lanes))
    return builder.select(vanishes, number(0.0), builder.fmul(power, scale))


@instruction
def exp2(typingctx: Any, x: Any) -> Any:
    """2 ** x of a float32, as `emit_exp2`; loops over it vectorise."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        return emit_exp2(builder, arguments[0])

    return types.float32(types.float32), generate


@instruction
def bits_of(typingctx: Any, x: Any) -> Any:
    """The bits of a float32, as an int32."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        return builder.bitcast(arguments[0], _I32)

    return types.int32(types.float32), generate


@instruction
def read(typingctx: Any, storage: Any, address: Any, index: Any) -> Any:
    """Number `index` of the stored numbers at `address`, as float32. storage is a literal."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        kind = storage.literal_value
        scalar = (_F32, _I16, _F16)[kind]
        base = builder.inttoptr(arguments[1], scalar.as_pointer())
        stored = builder.load(builder.gep(base, [arguments[2]]), align=storage_bytes(kind))
        return emit_widen(builder, stored, kind)

    return types.float32(storage, types.int64, types.int64), generate


@instruction
def write(typingctx: Any, storage: Any, address: Any, index: Any, value: Any) -> Any:
    """Rounds a float32 to number `index` of the stored numbers at `address`. storage is a literal."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        kind = storage.literal_value
        rounded = emit_round(builder, arguments[3], kind)
        base = builder.inttoptr(arguments[1], rounded.type.as_pointer())
        builder.store(rounded, builder.gep(base, [arguments[2]]), align=storage_bytes(kind))
        return context.get_dummy_value()

    return types.none(storage, types.int64, types.int64, types.float32), generate


@instruction
def rounded(typingctx: Any, storage: Any, value: Any) -> Any:
    """A float32 after a trip through the storage. storage is a literal."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        kind = storage.literal_value
        return emit_widen(builder, emit_round(builder, arguments[1], kind), kind)

    return types.float32(storage, types.float32), generate


@instruction
def _pointer(typingctx: Any, address: Any) -> Any:
    """An address as the untyped pointer that `carray` takes."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@inlined
def array(address: int, count: int, dtype: Any) -> Any:
    """The `count` numbers at `address` as an array; with the dtype of a job and a count of 1, the job is its [0]."""
    return carray(_pointer(address), (count,), dtype)


@instruction
def count_up(typingctx: Any, address: Any) -> Any:
    """Adds one to the int64 counter at `address`, for all threads; returns what it was.

    Acquire and release: who counts later sees what those who counted earlier had written.
    """

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        counter = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(_I64, 1), "acq_rel")

    return types.int64(types.int64), generate


@instruction
def count_of(typingctx: Any, address: Any) -> Any:
    """The int64 counter at `address`, as other threads have counted it up; sees what they had written."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        counter = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.load_atomic(counter, "acquire", 8)

    return types.int64(types.int64), generate


@instruction
def pause(typingctx: Any) -> Any:
    """Tells the processor that this is a loop that waits."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        if platform.machine() in ("x86_64", "AMD64"):
            function_type = ir.FunctionType(ir.VoidType(), [])
            builder.call(codegen.get_or_insert_function(builder.module, function_type, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.none(), generate


@instruction
def call_usleep(typingctx: Any, function: Any, duration_us: Any) -> Any:
    """Calls the C function `int(unsigned)` at address `function`."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        kind = ir.FunctionType(_I32, [_I32])
        function, duration = arguments
        builder.call(builder.inttoptr(function, kind.as_pointer()), [builder.trunc(duration, _I32)])
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), generate


@instruction
def call_kernel(typingctx: Any, function: Any, job: Any) -> Any:
    """Calls the kernel at address `function` with the address of a job."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        kind = ir.FunctionType(ir.VoidType(), [_I64])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), generate


@instruction
def call(typingctx: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
    """Calls the C function at address `function` with six int64 arguments."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        kind = ir.FunctionType(ir.VoidType(), [_I64] * 6)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.none(*[types.int64] * 7), generate


@instruction
def prefetch(typingctx: Any, address: Any) -> Any:
    """Asks for the cache line at `address`, soon to be read. Any address will do; nothing waits for it."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        emit_prefetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.none(types.int64), generate
