"""The softmax of attention over the scores of a chunk of tokens: see `kernels.cpu.tiles`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from llvmlite import ir  # type: ignore[import-untyped]

from kernels.cpu.compiler import types
from kernels.cpu.native import (
    BFLOAT16,
    FLOAT32,
    Builder,
    Value,
    call_llvm,
    codegen,
    constant,
    emit_load,
    emit_round_pairs,
    emit_splat,
    emit_store,
    instruction,
    lanes_of,
    shaped,
)
from kernels.cpu.tokens import at_index, halves_of

if TYPE_CHECKING:
    from collections.abc import Callable

# Scores of one row that are held at once: a context is cut into chunks of this many tokens, at multiples of it.
CHUNK = 512

# Numbers from the scores of one row to the next; a power of two would use few sets of the first-level cache.
SCORE_STRIDE = CHUNK + 16

# The softmax of a row processes its scores in vectors of this size.
SCORE_LANES = 32

# Vectors of a row that are compared in turns: a comparison takes four cycles, and needs the one before it.
_COMPARED = 4

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)

# Polynomials for 2 ** f on [-0.5, 0.5] (see native): relative errors of 1e-7, and of 3e-6, a thousandth of bfloat16's.
_POWERS = {
    FLOAT32: (1.0, 0.6931469, 0.24022238, 0.05550893, 0.009671698, 0.0013218672),
    BFLOAT16: (1.0, 0.69312197, 0.24023719, 0.055916894, 0.009600395),
}


def _emit_powers(builder: Builder, x: Value, kind: int) -> Value:
    """Computes 2 ** x of float32 for x up to 0, as precisely as weights of this kind need; 2 ** -126 for lesser x.

    `emit_exp2` takes half as long again, because it handles all x.
    """
    lanes = lanes_of(x)
    bottom = constant(_F32, -126.0, lanes)
    x = builder.select(builder.fcmp_ordered("<", x, bottom), bottom, x)
    whole = call_llvm(builder, "llvm.rint", x)
    fraction = builder.fsub(x, whole)
    power = constant(_F32, _POWERS[kind][-1], lanes)
    for coefficient in reversed(_POWERS[kind][:-1]):
        power = call_llvm(builder, "llvm.fmuladd", power, fraction, constant(_F32, coefficient, lanes))
    exponent = builder.shl(builder.fptosi(whole, shaped(_I32, lanes)), constant(_I32, 23, lanes))
    return builder.bitcast(builder.add(builder.bitcast(power, shaped(_I32, lanes)), exponent), x.type)


@instruction
def soften_row(
    typingctx: Any, storage: Any, scores: Any, begin: Any, start: Any, stop: Any, end: Any, scale: Any
) -> Any:
    """Computes a softmax without its division: the scores become 2 ** (scale * score - greatest).

    begin and end are multiples of SCORE_LANES. The row sees the scores [start, stop) of [begin, end); start is not
    before begin::

        begin ── 0 ── start ── 2 ** (scale * score - greatest) ── stop ── 0 ── end

    Returns (greatest, sum); a row that sees nothing gets (-inf, 0). NaN among the scores makes the sum NaN. With the
    literal storage BFLOAT16, the results, not their sum, are rounded and stored without gaps from the first score on.
    """
    kind = storage.literal_value

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        scores, begin, start, stop, end, scale = arguments[1:]
        lanes, step, mask = SCORE_LANES, ir.Constant(_I64, SCORE_LANES), ir.Constant(_I64, -SCORE_LANES)
        lowest, zero = constant(_F32, -math.inf, lanes), constant(_F32, 0.0, lanes)
        lane_ids = ir.Constant(ir.VectorType(_I32, lanes), [ir.Constant(_I32, lane) for lane in range(lanes)])
        starts, stops = (emit_splat(builder, builder.trunc(edge, _I32), lanes) for edge in (start, stop))
        scales = emit_splat(builder, scale, lanes)

        def at_most(a: Value, b: Value) -> Value:
            return builder.select(builder.icmp_signed("<", a, b), a, b)

        # Every score of [whole_from, whole_to) is seen.
        whole_from = at_most(end, builder.and_(builder.add(start, ir.Constant(_I64, lanes - 1)), mask))
        whole_to = builder.and_(at_most(stop, end), mask)
        whole_to = builder.select(builder.icmp_signed(">", whole_from, whole_to), whole_from, whole_to)

        def each(whole_rest: Value, emit: Callable[[Value, Callable[[Value, Value], Value]], None]) -> None:
            """Emits loops over the scores: emit(index of the vector, function that replaces what is not seen).

            Leaves out [whole_from, whole_rest).
            """
            ranges = (begin, whole_from, False), (whole_rest, whole_to, True), (whole_to, end, False)
            for first, last, is_whole in ranges:
                with codegen.for_range_slice(builder, first, last, step, inc=True) as (index, _):

                    def seen(value: Value, other: Value, index: Value = index, is_whole: bool = is_whole) -> Value:
                        if is_whole:
                            return value
                        ids = builder.add(emit_splat(builder, builder.trunc(index, _I32), lanes), lane_ids)
                        after = builder.icmp_signed(">=", ids, starts)
                        return builder.select(builder.and_(after, builder.icmp_signed("<", ids, stops)), value, other)

                    emit(index, seen)

        greatest = [codegen.alloca_once_value(builder, lowest) for _ in range(_COMPARED)]
        for place in greatest:
            builder.store(lowest, place)

        def score_at(index: Value) -> Value:
            return emit_load(builder, at_index(builder, scores, index, 4), FLOAT32, lanes)

        def compare(place: Value, score: Value) -> None:
            held = builder.load(place)
            builder.store(builder.select(builder.fcmp_ordered(">", score, held), score, held), place)

        turn = ir.Constant(_I64, _COMPARED * lanes)
        turns = builder.sdiv(builder.sub(whole_to, whole_from), turn)
        in_turns_to = builder.add(whole_from, builder.mul(turns, turn))
        with codegen.for_range_slice(builder, whole_from, in_turns_to, turn, inc=True) as (index, _):
            for i, place in enumerate(greatest):
                compare(place, score_at(builder.add(index, ir.Constant(_I64, i * lanes))))
        each(in_turns_to, lambda index, seen: compare(greatest[0], seen(score_at(index), lowest)))
        for place in greatest[1:]:
            compare(greatest[0], builder.load(place))
        top = builder.load(greatest[0])
        while top.type.count > 1:
            lower, upper = halves_of(builder, top)
            top = builder.select(builder.fcmp_ordered(">", lower, upper), lower, upper)
        top = builder.extract_element(top, ir.Constant(_I32, 0))
        nothing = builder.fcmp_ordered("==", top, ir.Constant(_F32, -math.inf))
        base = builder.select(nothing, ir.Constant(_F32, 0.0), builder.fmul(top, scale))
        offsets = emit_splat(builder, builder.fneg(base), lanes)

        total = codegen.alloca_once_value(builder, zero)
        builder.store(zero, total)

        def weigh(index: Value, seen: Callable[[Value, Value], Value]) -> None:
            power = call_llvm(builder, "llvm.fmuladd", score_at(index), scales, offsets)
            weight = seen(_emit_powers(builder, power, kind), zero)
            builder.store(builder.fadd(builder.load(total), weight), total)
            if kind == FLOAT32:
                emit_store(builder, weight, at_index(builder, scores, index, 4))
            else:
                packed = emit_round_pairs(builder, *halves_of(builder, weight))
                pointer = builder.inttoptr(at_index(builder, scores, index, 2), packed.type.as_pointer())
                builder.store(packed, pointer, align=2)

        each(whole_from, weigh)
        whole = builder.load(total)
        while whole.type.count > 1:
            whole = builder.fadd(*halves_of(builder, whole))
        whole = builder.extract_element(whole, ir.Constant(_I32, 0))
        base = builder.select(nothing, top, base)
        return context.make_tuple(builder, signature.return_type, [base, whole])

    pair = types.UniTuple(types.float32, 2)
    return pair(storage, *[types.int64] * 5, types.float32), generate
