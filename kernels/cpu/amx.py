"""Products of bfloat16 in the matrix registers of Intel's processors (Advanced Matrix Extensions, AMX).

A matrix register holds up to 16 rows of 64 bytes: 32 bfloat16, or 16 float32 sums. One instruction adds the products of
up to 16 rows and 16 outputs over BLOCK inputs; it takes 16 cycles, in which vectors of float32 multiply a sixteenth of
that. Of the eight registers four hold sums, so four products follow the loading of their rows and weights::

    rows[16, BLOCK]  ·  panel[BLOCK / 2, 16 outputs, 2]  →  sums[16, 16 outputs]

    up to 16 rows       a register of rows, four of weights (one after the other): a whole PANEL of 64 outputs
    up to ROWS rows     two registers of rows, two of weights: half of a PANEL, then the other half

Loading a register takes 8 cycles from the first-level cache, and some 25 from the second. The weights come from there,
so more than 16 rows, which read each weight once for two products, are much faster.

The instruction sums the inputs with even and those with odd numbers separately, each from zero and in their order, adds
both, and adds the result to the sum (Intel, Architecture Instruction Set Extensions, TDPBF16PS). Denormals count as
zero. A row has the same bits however many rows share the registers, and vectors of float32 can compute these bits too:
`kernels.cpu.few_rows` does so for a few rows.

A thread configures its registers before it uses them, and releases them afterwards: their contents are large, and the
system saves them when it takes the processor away.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Any

from llvmlite import binding, ir  # type: ignore[import-untyped]

from kernels.cpu.compiler import inlined, types
from kernels.cpu.native import LINE_BYTES, Builder, Value, codegen, emit_prefetch, instruction

MATRIX = 3
"""The format of rows whose products are computed here, beside the storages of `kernels.cpu.native`."""

ROWS = 32
"""Rows that are multiplied at once at most: two registers of them."""

BLOCK = 32
"""Inputs that an instruction multiplies. A number of inputs that is no multiple of it needs vectors."""

_I64, _VOID = ir.IntType(64), ir.VoidType()

_ROW_BYTES = 64
_REGISTER_ROWS = 16
_QUARTERS = 4  # of a PANEL, each of which is the width of a register
_NUM_REGISTERS = 8

_FEATURES = ("amx-tile", "amx-bf16", "avx512bf16")

# Linux gives a process matrix registers when it asks for them: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def _is_permitted() -> bool:
    """Asks for the matrix registers. All threads of the process get them."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    if not all(binding.get_host_cpu_features().get(feature, False) for feature in _FEATURES):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


HAS_AMX = _is_permitted()
"""The processor multiplies bfloat16 in matrix registers, and the system lets this process use them."""


def _emit(builder: Builder, text: str, *operands: Value) -> None:
    """Writes one assembly instruction, which may read and write memory. $0, $1, … are the operands."""
    kind = ir.FunctionType(_VOID, [operand.type for operand in operands])
    constraints = ",".join(["r"] * len(operands) + ["~{memory}"])
    builder.asm(kind, text, constraints, list(operands), side_effect=True)


def _configurations() -> bytes:
    """Returns the configurations of the registers for 0 to ROWS rows, as LDTILECFG reads them. 0 rows are a fault."""
    configurations = b""
    for num_rows in range(ROWS + 1):
        first, second = min(num_rows, _REGISTER_ROWS), max(0, num_rows - _REGISTER_ROWS)
        whole = _REGISTER_ROWS
        if num_rows <= _REGISTER_ROWS:  # see `_multiply_one`
            rows = (first, first, first, first, first, whole, whole, whole)
        else:  # see `_multiply_two`
            rows = (first, first, second, second, first, second, whole, whole)
        columns = _ROW_BYTES.to_bytes(2, "little") * _NUM_REGISTERS
        configurations += bytes((1, 0)).ljust(16, b"\0") + columns.ljust(32, b"\0") + bytes(rows).ljust(16, b"\0")
    return configurations


def _emit_configure(builder: Builder, num_rows: Value) -> None:
    """Prepares the registers for tiles of num_rows rows, and clears them. Takes some 400 cycles."""
    table = _configurations()
    content = ir.Constant(ir.ArrayType(ir.IntType(8), len(table)), bytearray(table))
    first = builder.ptrtoint(codegen.global_constant(builder, "amx_configurations", content), _I64)
    _emit(builder, "ldtilecfg ($0)", builder.add(first, builder.mul(num_rows, ir.Constant(_I64, _ROW_BYTES))))


@instruction
def _configure(typingctx: Any, num_rows: Any) -> Any:
    """See `_emit_configure`."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        _emit_configure(builder, arguments[0])
        return context.get_dummy_value()

    return types.none(types.int64), generate


@instruction
def begin_products(typingctx: Any, row_format: Any, full_rows: Any) -> Any:
    """Prepares this thread for products of tiles that have full_rows rows, most of them; at least one.

    row_format is a literal.
    """

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        if row_format.literal_value == MATRIX:
            _emit_configure(builder, arguments[1])
        return context.get_dummy_value()

    return types.none(row_format, types.int64), generate


@instruction
def end_products(typingctx: Any, row_format: Any) -> Any:
    """Ends what `begin_products` began."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        if row_format.literal_value == MATRIX:
            _emit(builder, "tilerelease")
        return context.get_dummy_value()

    return types.none(row_format), generate


def _emit_load(builder: Builder, register: int, place: Value, row_bytes: Value) -> None:
    _emit(builder, f"tileloadd ($0,$1,1), %tmm{register}", place, row_bytes)


def _emit_begin(builder: Builder, adds: bool, register: int, sums: Value, sum_bytes: Value) -> None:
    """Loads sums into a register, or clears it."""
    if adds:
        _emit_load(builder, register, sums, sum_bytes)
    else:
        _emit(builder, f"tilezero %tmm{register}")


def _emit_end(builder: Builder, register: int, sums: Value, sum_bytes: Value) -> None:
    """Stores the sums of a register."""
    _emit(builder, f"tilestored %tmm{register}, ($0,$1,1)", sums, sum_bytes)


def _quarter_of(builder: Builder, place: Value, quarter: int) -> Value:
    """Returns the address of a quarter of a row of PANEL outputs."""
    return builder.add(place, ir.Constant(_I64, quarter * _ROW_BYTES))


def _emit_ahead(builder: Builder, line_ahead: Value, block: Value, lines: range) -> None:
    """Prefetches these of the BLOCK / 2 cache lines of a block."""
    first = builder.add(line_ahead, builder.mul(block, ir.Constant(_I64, BLOCK // 2 * LINE_BYTES)))
    for line in lines:
        emit_prefetch(builder, builder.add(first, ir.Constant(_I64, line * LINE_BYTES)))


_WEIGHT_BLOCK_BYTES = BLOCK * 2 * _REGISTER_ROWS * _QUARTERS
_LINE = ir.Constant(_I64, _QUARTERS * _ROW_BYTES)


@instruction
def _multiply_one(
    typingctx: Any,
    adds: Any,
    rows: Any,
    row_bytes: Any,
    panel: Any,
    num_blocks: Any,
    sums: Any,
    sum_bytes: Any,
    ahead: Any,
) -> Any:
    """Computes `multiply_matrix` for as many rows as the registers are configured for, at most 16.

    Registers 0 to 3 hold the sums of the quarters of the panel, register 4 the rows, the others weights.
    """

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        rows, row_bytes, panel, num_blocks, sums, sum_bytes, line_ahead = arguments[1:]
        places = [_quarter_of(builder, sums, quarter) for quarter in range(_QUARTERS)]
        for quarter, place in enumerate(places):
            _emit_begin(builder, adds.literal_value, quarter, place, sum_bytes)
        with codegen.for_range(builder, num_blocks) as loop:
            own = builder.add(rows, builder.mul(loop.index, ir.Constant(_I64, BLOCK * 2)))
            _emit_load(builder, 4, own, row_bytes)
            weights = builder.add(panel, builder.mul(loop.index, ir.Constant(_I64, _WEIGHT_BLOCK_BYTES)))
            for quarter in range(_QUARTERS):
                register = 5 + quarter % 3
                _emit_load(builder, register, _quarter_of(builder, weights, quarter), _LINE)
                _emit(builder, f"tdpbf16ps %tmm{register}, %tmm4, %tmm{quarter}")
            if ahead != types.none:
                _emit_ahead(builder, line_ahead, loop.index, range(BLOCK // 2))
        for quarter, place in enumerate(places):
            _emit_end(builder, quarter, place, sum_bytes)
        return context.get_dummy_value()

    return types.none(adds, *[types.int64] * 6, ahead), generate


@instruction
def _multiply_two(
    typingctx: Any,
    adds: Any,
    rows: Any,
    row_bytes: Any,
    panel: Any,
    num_blocks: Any,
    sums: Any,
    sum_bytes: Any,
    ahead: Any,
) -> Any:
    """Computes `multiply_matrix` for as many rows as the registers are configured for, more than 16.

    Registers 0 and 1 hold the sums of the first 16 rows with two quarters of the panel, 2 and 3 those of the other
    rows, 4 and 5 the rows, 6 and 7 weights.
    """

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        rows, row_bytes, panel, num_blocks, sums, sum_bytes, line_ahead = arguments[1:]
        more_rows = builder.add(rows, builder.mul(row_bytes, ir.Constant(_I64, _REGISTER_ROWS)))
        more_sums = builder.add(sums, builder.mul(sum_bytes, ir.Constant(_I64, _REGISTER_ROWS)))
        for half in range(2):
            quarters = (2 * half, 2 * half + 1)
            places = [_quarter_of(builder, place, quarter) for place in (sums, more_sums) for quarter in quarters]
            for register, place in enumerate(places):
                _emit_begin(builder, adds.literal_value, register, place, sum_bytes)
            with codegen.for_range(builder, num_blocks) as loop:
                offset = builder.mul(loop.index, ir.Constant(_I64, BLOCK * 2))
                weights = builder.add(panel, builder.mul(loop.index, ir.Constant(_I64, _WEIGHT_BLOCK_BYTES)))
                _emit_load(builder, 4, builder.add(rows, offset), row_bytes)
                _emit_load(builder, 6, _quarter_of(builder, weights, quarters[0]), _LINE)
                _emit(builder, "tdpbf16ps %tmm6, %tmm4, %tmm0")
                _emit_load(builder, 7, _quarter_of(builder, weights, quarters[1]), _LINE)
                _emit(builder, "tdpbf16ps %tmm7, %tmm4, %tmm1")
                _emit_load(builder, 5, builder.add(more_rows, offset), row_bytes)
                _emit(builder, "tdpbf16ps %tmm6, %tmm5, %tmm2")
                _emit(builder, "tdpbf16ps %tmm7, %tmm5, %tmm3")
                if ahead != types.none:
                    lines = BLOCK // 4
                    _emit_ahead(builder, line_ahead, loop.index, range(half * lines, (half + 1) * lines))
            for register, place in enumerate(places):
                _emit_end(builder, register, place, sum_bytes)
        return context.get_dummy_value()

    return types.none(adds, *[types.int64] * 6, ahead), generate


@inlined
def multiply_matrix(
    num_rows: int,
    full_rows: int,
    adds: Any,
    rows: int,
    row_bytes: int,
    panel: int,
    num_blocks: int,
    sums: int,
    sum_bytes: int,
    ahead: int | None,
) -> None:
    """Computes sums[row, :] += rows[row] · panel over num_blocks blocks of inputs, for one to ROWS rows.

    See `kernels.cpu.panels.multiply_rows`. The registers are configured for full_rows rows before and afterwards.
    """
    if num_rows != full_rows:
        _configure(num_rows)
    if num_rows > _REGISTER_ROWS:
        _multiply_two(adds, rows, row_bytes, panel, num_blocks, sums, sum_bytes, ahead)
    else:
        _multiply_one(adds, rows, row_bytes, panel, num_blocks, sums, sum_bytes, ahead)
    if num_rows != full_rows:
        _configure(full_rows)


_DENORMALS_ARE_ZERO = 0x8040  # the bits FTZ and DAZ of the register MXCSR


@instruction
def count_denormals(typingctx: Any, row_format: Any, as_zero: Any) -> Any:
    """Lets denormals count as zero in this thread's vectors, as they do in matrix registers, or as what they are.

    row_format and as_zero are literals. Does nothing for other formats than MATRIX.
    """

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        if row_format.literal_value != MATRIX:
            return context.get_dummy_value()
        kind = ir.IntType(32)
        place = codegen.alloca_once(builder, kind)
        address = builder.ptrtoint(place, _I64)
        _emit(builder, "stmxcsr ($0)", address)
        kept = builder.and_(builder.load(place), ir.Constant(kind, ~_DENORMALS_ARE_ZERO & 0xFFFFFFFF))
        builder.store(builder.or_(kept, ir.Constant(kind, _DENORMALS_ARE_ZERO * as_zero.literal_value)), place)
        _emit(builder, "ldmxcsr ($0)", address)
        return context.get_dummy_value()

    return types.none(row_format, as_zero), generate
