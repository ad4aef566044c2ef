"""Operations that numba lacks, as LLVM instructions: raw addresses, atomic counters and 16-bit floats.

Kernels take addresses (int64) and do their own arithmetic, so that one compiled function serves any stride and no
array has to be wrapped for a call. The functions named `emit_…` write instructions, for scalars and vectors alike; the
decorated ones are called from compiled code.
"""

from __future__ import annotations

import platform
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import carray  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.compiler import inlined, types

if TYPE_CHECKING:
    from collections.abc import Callable

# Storage formats of the numbers of a tensor. Compiled code sees them as literals and has one variant for each.
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2

_STORAGES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}

LINE_BYTES = 64
"""Size of a cache line."""

_FEATURES = binding.get_host_cpu_features()

HAS_BFLOAT16_ROUNDING = bool(_FEATURES.get("avx512bf16", False))
"""The processor has an instruction that rounds vectors of float32 to bfloat16."""

HAS_BFLOAT16_DOTS = HAS_BFLOAT16_ROUNDING and binding.get_host_cpu_name().startswith("znver")
"""The processor has instructions that multiply bfloat16 numbers directly, and they are faster than those of float32.

AMD's multiply at twice the rate of float32, Intel's at half of it, so that widening is faster there: linear layers of
64 rows make 83 GFLOP/s with them and 124 without (Emerald Rapids, one thread, 2026-11-24).
"""

_F32, _F16, _I16, _I32, _I64 = ir.FloatType(), ir.HalfType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)

binding.initialize_native_asmparser()  # for emit_dot_pairs

if platform.machine() in ("x86_64", "AMD64") and not _FEATURES.get("f16c", False):
    # LLVM calls functions of the compiler's library to convert float16 there, and ends the process without them.
    with suppress(RuntimeError):
        binding.load_library_permanently("libgcc_s.so.1")

codegen: Any = cgutils  # see compiler.types

Value = Any  # an llvmlite value
Builder = Any  # an llvmlite IRBuilder


def instruction(function: Callable[..., Any]) -> Any:
    """Declares a function that compiled code can call and that is defined by LLVM instructions.

    The decorated function takes numba's typing context and the types of the arguments; literal arguments have literal
    types. It returns the signature and the function that writes the instructions: generate(context, builder, signature,
    arguments).
    """
    return intrinsic(prefer_literal=True)(function)


def storage_of(dtype: torch.dtype) -> int:
    """Returns the storage format of a dtype. Raises TypeError for a dtype that kernels do not support."""
    storage = _STORAGES.get(dtype)
    if storage is None:
        raise TypeError(f"kernels take float32, bfloat16 and float16, not {dtype}")
    return storage


def storage_bytes(storage: int) -> int:
    """Returns the number of bytes of one stored number."""
    return 4 if storage == FLOAT32 else 2


def strided(name: str, heads: torch.Tensor) -> dict[str, int]:
    """Returns the address and strides of heads[rows, heads, head_dim] as fields of a job.

    The fields are `name`, `name_token_bytes` and `name_head_bytes`.
    """
    number_bytes = heads.element_size()
    return {
        name: heads.data_ptr(),
        f"{name}_token_bytes": heads.stride(0) * number_bytes,
        f"{name}_head_bytes": heads.stride(1) * number_bytes,
    }


def shaped(scalar: Any, lanes: int) -> Any:
    """Returns the LLVM type of `lanes` scalars; one lane is the scalar itself."""
    return scalar if lanes == 1 else ir.VectorType(scalar, lanes)


def lanes_of(value: Value) -> int:
    """Returns how many numbers an LLVM value holds."""
    return value.type.count if isinstance(value.type, ir.VectorType) else 1


def constant(scalar: Any, number: float, lanes: int) -> Value:
    """Returns a constant with the same number in every lane."""
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
    """Widens loaded numbers to float32."""
    lanes = lanes_of(stored)
    if storage == FLOAT32:
        return stored
    if storage == FLOAT16:
        return builder.fpext(stored, shaped(_F32, lanes))
    # A bfloat16 is the upper half of the float32 of the same value.
    wide = builder.zext(stored, shaped(_I32, lanes))
    return builder.bitcast(builder.shl(wide, constant(_I32, 16, lanes)), shaped(_F32, lanes))


def emit_widen_pairs(builder: Builder, pairs: Value) -> tuple[Value, Value]:
    """Widens loaded pairs of bfloat16 to float32; returns the first and the second numbers of the pairs."""
    lanes = lanes_of(pairs)
    first = builder.shl(pairs, constant(_I32, 16, lanes))
    second = builder.and_(pairs, constant(_I32, 0xFFFF0000, lanes))
    return builder.bitcast(first, shaped(_F32, lanes)), builder.bitcast(second, shaped(_F32, lanes))


def emit_load_pairs(builder: Builder, address: Value, lanes: int) -> Value:
    """Loads `lanes` words of 4 bytes as int32: pairs of 16-bit numbers, or the bits of float32."""
    pointer = builder.inttoptr(address, shaped(_I32, lanes).as_pointer())
    return builder.load(pointer, align=2)


def emit_dot_pairs(builder: Builder, a: Value, b: Value, sums: Value) -> Value:
    """Computes sums + a · b for 16 pairs of bfloat16 each; only if HAS_BFLOAT16_DOTS.

    Products are exact; each of the two sums is rounded to nearest, and denormals count as zero.
    """
    vector, pairs = sums.type, shaped(_I32, 16)
    kind = ir.FunctionType(vector, [vector, pairs, pairs])
    # Inline assembly, because the types of LLVM's intrinsic differ between its versions.
    return builder.asm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", [sums, a, b], side_effect=False)


def emit_round_pairs(builder: Builder, a: Value, b: Value) -> Value:
    """Rounds two vectors of 16 float32 to 32 bfloat16, to nearest even, in the order a, b.

    Only if HAS_BFLOAT16_ROUNDING. Denormals become zero.
    """
    kind = ir.FunctionType(shaped(_I16, 32), [a.type, b.type])
    return builder.asm(kind, "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v", [a, b], side_effect=False)


def emit_load(builder: Builder, address: Value, storage: int, lanes: int) -> Value:
    """Loads `lanes` stored numbers as float32. The address needs only the alignment of one number."""
    scalar = (_F32, _I16, _F16)[storage]
    pointer = builder.inttoptr(address, shaped(scalar, lanes).as_pointer())
    return emit_widen(builder, builder.load(pointer, align=storage_bytes(storage)), storage)


def emit_round(builder: Builder, value: Value, storage: int) -> Value:
    """Rounds float32 to stored bits, to nearest even; infinities and NaN are kept."""
    lanes = lanes_of(value)
    if storage == FLOAT32:
        return value
    if storage == FLOAT16:
        return builder.fptrunc(value, shaped(_F16, lanes))
    bits = builder.bitcast(value, shaped(_I32, lanes))
    odd = builder.and_(builder.lshr(bits, constant(_I32, 16, lanes)), constant(_I32, 1, lanes))
    rounded = builder.add(bits, builder.add(odd, constant(_I32, 0x7FFF, lanes)))
    # The carry of rounding could turn a NaN into zero, so NaN becomes a quiet NaN instead.
    quiet = builder.or_(bits, constant(_I32, 0x00400000, lanes))
    is_nan = builder.fcmp_unordered("uno", value, value)
    chosen = builder.select(is_nan, quiet, rounded)
    return builder.trunc(builder.lshr(chosen, constant(_I32, 16, lanes)), shaped(_I16, lanes))


def emit_store(builder: Builder, value: Value, address: Value) -> None:
    """Stores float32 numbers. The address needs only the alignment of one number."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=storage_bytes(FLOAT32))


def emit_splat(builder: Builder, number: Value, lanes: int) -> Value:
    """Returns a vector with `number` in every lane."""
    empty = ir.Constant(ir.VectorType(number.type, lanes), ir.Undefined)
    vector = builder.insert_element(empty, number, ir.Constant(_I32, 0))
    everywhere = ir.Constant(ir.VectorType(_I32, lanes), [ir.Constant(_I32, 0)] * lanes)
    return builder.shuffle_vector(vector, vector, everywhere)


def emit_prefetch(builder: Builder, address: Value) -> None:
    """Prefetches the cache line at an address."""
    line = ir.IntType(8).as_pointer()
    function_type = ir.FunctionType(ir.VoidType(), [line, _I32, _I32, _I32])
    function = codegen.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    read_only, to_all_levels, data = (ir.Constant(_I32, hint) for hint in (0, 3, 1))
    builder.call(function, [builder.inttoptr(address, line), read_only, to_all_levels, data])


# Polynomial for 2 ** f on [-0.5, 0.5]: least squares of the relative error at Chebyshev nodes, 2e-9 before rounding.
_EXP2 = (1.0, 0.69314718, 0.24022648, 0.05550329, 0.0096183736, 0.0013399848, 0.00015370705)


def emit_exp2(builder: Builder, x: Value) -> Value:
    """Computes 2 ** x of float32 with a relative error of about 1e-7; zero below -126, and 2 ** 127 above 127."""
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
    """Computes 2 ** x of a float32, as `emit_exp2`; LLVM vectorizes loops over it."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        return emit_exp2(builder, arguments[0])

    return types.float32(types.float32), generate


@instruction
def bits_of(typingctx: Any, x: Any) -> Any:
    """Returns the bits of a float32 as an int32."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        return builder.bitcast(arguments[0], _I32)

    return types.int32(types.float32), generate


@instruction
def read(typingctx: Any, storage: Any, address: Any, index: Any) -> Any:
    """Reads number `index` of the stored numbers at `address` as float32. storage is a literal."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        kind = storage.literal_value
        scalar = (_F32, _I16, _F16)[kind]
        base = builder.inttoptr(arguments[1], scalar.as_pointer())
        stored = builder.load(builder.gep(base, [arguments[2]]), align=storage_bytes(kind))
        return emit_widen(builder, stored, kind)

    return types.float32(storage, types.int64, types.int64), generate


@instruction
def write(typingctx: Any, storage: Any, address: Any, index: Any, value: Any) -> Any:
    """Writes a float32, rounded, as number `index` of the stored numbers at `address`. storage is a literal."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        kind = storage.literal_value
        rounded = emit_round(builder, arguments[3], kind)
        base = builder.inttoptr(arguments[1], rounded.type.as_pointer())
        builder.store(rounded, builder.gep(base, [arguments[2]]), align=storage_bytes(kind))
        return context.get_dummy_value()

    return types.none(storage, types.int64, types.int64, types.float32), generate


@instruction
def rounded(typingctx: Any, storage: Any, value: Any) -> Any:
    """Returns a float32 rounded to the storage and widened again. storage is a literal."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        kind = storage.literal_value
        return emit_widen(builder, emit_round(builder, arguments[1], kind), kind)

    return types.float32(storage, types.float32), generate


@instruction
def _pointer(typingctx: Any, address: Any) -> Any:
    """Returns an address as the untyped pointer that `carray` takes."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@inlined
def array(address: int, count: int, dtype: Any) -> Any:
    """Returns the `count` items at `address` as an array. With the dtype of a job and a count of 1, [0] is the job."""
    return carray(_pointer(address), (count,), dtype)


@instruction
def count_up(typingctx: Any, address: Any) -> Any:
    """Atomically adds one to the int64 counter at `address` and returns its previous value.

    The operation acquires and releases: a thread sees everything that threads which counted earlier had written.
    """

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        counter = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(_I64, 1), "acq_rel")

    return types.int64(types.int64), generate


@instruction
def count_of(typingctx: Any, address: Any) -> Any:
    """Atomically reads the int64 counter at `address`; acquires what the threads that counted had written."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        counter = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.load_atomic(counter, "acquire", 8)

    return types.int64(types.int64), generate


@instruction
def pause(typingctx: Any) -> Any:
    """Tells the processor that it is in a spin loop."""

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
def call(typingctx: Any, function: Any, *numbers: Any) -> Any:
    """Calls the C function at address `function` with these int64 arguments."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        kind = ir.FunctionType(ir.VoidType(), [_I64] * len(numbers))
        own = [builder.extract_value(arguments[1], i) for i in range(len(numbers))]
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), own)
        return context.get_dummy_value()

    return types.none(types.int64, types.StarArgTuple([types.int64] * len(numbers))), generate


@instruction
def prefetch(typingctx: Any, address: Any) -> Any:
    """Prefetches the cache line at `address`. Any address is allowed, and nothing waits for the data."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        emit_prefetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.none(types.int64), generate
