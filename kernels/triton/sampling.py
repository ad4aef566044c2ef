"""A token for each row of logits that samples, by its place in the order of likelihood: nothing is sorted.

Where top-k, top-p and min-p cut, and which token a share of the mass falls on, are questions of one kind: up to which
token do those before it, the likeliest first, weigh so much (or are so many)? It is answered digit by digit, as a radix
sort would, but without moving a number. A token's *rank* is a number that is the smaller the greater its logit is; each
pass over the row weighs the tokens by the next digit of their ranks and decides for one::

    rank of 8 digits     0 3 f 0 …
    pass 1               weights of ranks 0…, 1…, 2…, … f…        the target falls into 0…
    pass 2               weights of ranks 00…, 01…, …             … into 03…
                         and so on; 16-bit logits have 4 digits

What is left in the end is a rank, all of whose tokens have equal logits: they follow each other by id. One program does
a row, from the caches: a row of 128,256 bfloat16 has 256 KB. Sums run in a fixed order, so a row gets the same token in
any batch.
"""

import torch
import triton.language as tl

from kernels.triton.jit import kernel
from kernels.triton.rows import STATE_FIELDS

_FIELDS: tl.constexpr = tl.constexpr(STATE_FIELDS)
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_RADIX: tl.constexpr = tl.constexpr(16)
_TILE = 1024

# Digits of a rank: those of the bits of a float32 that numbers of this dtype use.
_NUM_DIGITS = {torch.float32: 8, torch.float16: 5, torch.bfloat16: 4}


def draw_tokens(
    logits: torch.Tensor, states: torch.Tensor, slots: torch.Tensor, uniforms: torch.Tensor, token_ids: torch.Tensor
) -> None:
    """A token of each row of logits[R, V] whose slot in states[N, STATE_FIELDS] has a temperature above 0.

    token_ids[R] int32: the likeliest ids, as `choose_greedily` leaves them. Mutates those of rows that sample and have
    any logit above -inf; NaN counts as -inf. slots[R] int32; uniforms[R] float32 in [0, 1) decide. What cuts mean is
    said in `executor.sampling.sampler`; weights and their sums are float32. Launches one kernel, and waits for nothing.
    """
    num_rows, vocab_size = logits.shape
    if not num_rows:
        return
    _draw_rows[(num_rows,)](
        logits,
        states,
        slots,
        uniforms,
        token_ids,
        logits.stride(0),
        vocab_size,
        num_digits=_NUM_DIGITS[logits.dtype],
        tile=_TILE,
        num_warps=8,
    )


@kernel(unspecialized=("states", "slots", "uniforms", "token_ids"))
def _draw_rows(
    logits: tl.tensor,
    states: tl.tensor,
    slots: tl.tensor,
    uniforms: tl.tensor,
    token_ids: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    num_digits: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    state = states + tl.load(slots + row).to(tl.int64) * _FIELDS
    temperature = tl.load(state + 4).to(tl.float32, bitcast=True)
    scores = logits + row * row_stride
    peak = _cleaned(tl.load(scores + tl.load(token_ids + row)))
    if (temperature > 0.0) & (peak > float("-inf")):
        top_k = tl.minimum(tl.load(state + 5), vocab_size)
        top_p = tl.load(state + 6).to(tl.float32, bitcast=True)
        min_p = tl.load(state + 7).to(tl.float32, bitcast=True)
        uniform = tl.load(uniforms + row)
        if (top_k > 0) | (top_p < 1.0):
            token = _draw_likely(scores, vocab_size, peak, temperature, top_k, top_p, min_p, uniform, num_digits, tile)
        else:
            token = _draw_by_id(scores, vocab_size, peak, temperature, min_p, uniform, num_digits, tile)
        tl.store(token_ids + row, token)


# --- a row ------------------------------------------------------------------------------------------------------------


@kernel()
def _draw_by_id(
    scores: tl.tensor,
    vocab_size: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
    uniform: tl.tensor,
    num_digits: tl.constexpr,
    tile: tl.constexpr,
) -> tl.tensor:
    """Among all tokens of min_p and more: the first whose cumulative weight, by id, exceeds the uniform's share."""
    everything = _rank(tl.full((), float("-inf"), tl.float32), num_digits)
    total, _ = _mass_before(scores, vocab_size, peak, temperature, everything, min_p, num_digits, tile)
    target = uniform * total
    passed = tl.full((), 0.0, tl.float32)
    token = tl.full((), -1, tl.int32)
    last = tl.zeros((tile,), tl.int32)
    for start in range(0, vocab_size, tile):
        ids, own = _tile_of(scores, start, vocab_size, tile)
        weights = _weight(own, peak, temperature)
        weights = tl.where(weights >= min_p, weights, 0.0)
        last = tl.where(weights > 0.0, ids, last)
        mass = tl.sum(weights, 0)
        if (token < 0) & (passed + mass > target):
            exceeds = (weights > 0.0) & (passed + tl.cumsum(weights, 0) > target)
            token = tl.min(tl.where(exceeds, ids, vocab_size), 0)
            # Sums in another order: they may round to the target itself.
            token = tl.minimum(token, tl.max(last, 0))
        passed += mass
    return tl.where(token < 0, tl.max(last, 0), token)


@kernel()
def _draw_likely(
    scores: tl.tensor,
    vocab_size: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    uniform: tl.tensor,
    num_digits: tl.constexpr,
    tile: tl.constexpr,
) -> tl.tensor:
    """Among the likeliest: top-k of all, of these the fewest that reach top-p, of these those of min_p and more.

    What is kept, at each stage: all tokens before the rank `last`, and of that rank the first num_last, by id; `mass`
    is what they weigh.
    """
    last = _rank(tl.full((), float("-inf"), tl.float32), num_digits)
    num_last = vocab_size
    if top_k > 0:
        last, before = _find(scores, vocab_size, peak, temperature, top_k.to(tl.float32), True, num_digits, tile)
        num_last = top_k - before.to(tl.int32)
    mass, _ = _mass_before(scores, vocab_size, peak, temperature, last, 0.0, num_digits, tile)
    mass += num_last * _weight(_score(last, num_digits), peak, temperature)
    if top_p < 1.0:
        limit = top_p * mass
        crossing, before = _find(scores, vocab_size, peak, temperature, limit, False, num_digits, tile)
        weight = _weight(_score(crossing, num_digits), peak, temperature)
        num_crossing = tl.maximum(_at_most(tl.ceil((limit - before) / weight), vocab_size), 1)
        num_last = tl.where(crossing < last, num_crossing, tl.minimum(num_crossing, num_last))
        last = tl.minimum(crossing, last)
        mass = before + num_last * weight
    if _weight(_score(last, num_digits), peak, temperature) < min_p:
        mass, last = _mass_before(scores, vocab_size, peak, temperature, last, min_p, num_digits, tile)
        num_last = vocab_size

    target = uniform * mass
    rank, before = _find(scores, vocab_size, peak, temperature, target, False, num_digits, tile)
    weight = _weight(_score(rank, num_digits), peak, temperature)
    nth = _at_most((target - before) / weight, vocab_size)
    # Sums of different passes round differently: what is cut off is not to be drawn for that.
    nth = tl.where(rank < last, nth, tl.where(rank == last, tl.minimum(nth, num_last - 1), num_last - 1))
    rank = tl.minimum(rank, last)
    return _nth_of_rank(scores, vocab_size, rank, nth, num_digits, tile)


# --- passes over a row ------------------------------------------------------------------------------------------------


@kernel()
def _find(
    scores: tl.tensor,
    vocab_size: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    target: tl.tensor,
    counts: tl.constexpr,
    num_digits: tl.constexpr,
    tile: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The rank with which tokens, the likeliest first, reach the target, and what those before it make.

    counts: they make one each, not their weight. Where rounding keeps them from it, it is the last rank that has any.
    """
    digits = tl.arange(0, _RADIX)
    rank = tl.full((), 0, tl.uint32)
    before = tl.full((), 0.0, tl.float32)
    for place in range(num_digits):
        shift = 4 * (num_digits - 1 - place)
        amounts = tl.zeros((tile, _RADIX), tl.float32)  # summed up at the end: threads wait for each other once
        for start in range(0, vocab_size, tile):
            ids, own = _tile_of(scores, start, vocab_size, tile)
            amount = (ids < vocab_size).to(tl.float32) if counts else _weight(own, peak, temperature)
            # With other leading digits the difference has more than one digit here, also where it wraps around.
            rest = (_rank(own, num_digits) - rank) >> shift
            amounts += tl.where(rest[:, None] == digits.to(tl.uint32)[None, :], amount[:, None], 0.0)
        sums = tl.sum(amounts, 0)
        reaches = (sums > 0.0) & (before + tl.cumsum(sums, 0) >= target)
        digit = tl.min(tl.where(reaches, digits, _RADIX), 0)
        digit = tl.minimum(digit, tl.max(tl.where(sums > 0.0, digits, 0), 0))
        before += tl.sum(tl.where(digits < digit, sums, 0.0), 0)
        rank += digit.to(tl.uint32) << shift
    return rank, before


@kernel()
def _mass_before(
    scores: tl.tensor,
    vocab_size: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    last: tl.tensor,
    min_p: tl.tensor,
    num_digits: tl.constexpr,
    tile: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """What the tokens before the rank `last` weigh that weigh min_p or more, and the last rank among these."""
    masses, found = tl.zeros((tile,), tl.float32), tl.zeros((tile,), tl.uint32)
    for start in range(0, vocab_size, tile):
        own = _tile_of(scores, start, vocab_size, tile)[1]
        ranks, weights = _rank(own, num_digits), _weight(own, peak, temperature)
        counts = (ranks < last) & (weights >= min_p)
        masses += tl.where(counts, weights, 0.0)
        found = tl.maximum(found, tl.where(counts, ranks, 0))
    return tl.sum(masses, 0), tl.max(found, 0)


@kernel()
def _nth_of_rank(
    scores: tl.tensor,
    vocab_size: tl.tensor,
    rank: tl.tensor,
    nth: tl.tensor,
    num_digits: tl.constexpr,
    tile: tl.constexpr,
) -> tl.tensor:
    """The id of the nth token of a rank, counted from 0; the last one's if it has no more."""
    seen = tl.full((), 0, tl.int32)
    token = tl.full((), 0, tl.int32)
    for start in range(0, vocab_size, tile):
        ids, own = _tile_of(scores, start, vocab_size, tile)
        has_rank = (ids < vocab_size) & (_rank(own, num_digits) == rank)
        count = tl.sum(has_rank.to(tl.int32), 0)
        if (count > 0) & (seen <= nth):
            places = seen + tl.cumsum(has_rank.to(tl.int32), 0) - 1
            token = tl.max(tl.where(has_rank & (places <= nth), ids, 0), 0)
        seen += count
    return token


@kernel()
def _tile_of(
    scores: tl.tensor, start: tl.tensor, vocab_size: tl.tensor, tile: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Ids from `start` on, and their scores, -inf beyond the vocabulary."""
    ids = start + tl.arange(0, tile)
    return ids, _cleaned(tl.load(scores + ids, mask=ids < vocab_size, other=float("-inf")))


# --- a number ---------------------------------------------------------------------------------------------------------


@kernel()
def _cleaned(score: tl.tensor) -> tl.tensor:
    """As float32, -inf for NaN; equal ones get equal bits: -0 becomes 0."""
    wide = score.to(tl.float32)
    return tl.where(wide == wide, tl.where(wide == 0.0, 0.0, wide), float("-inf"))


@kernel()
def _weight(score: tl.tensor, peak: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """exp((score - peak) / temperature): 1 for the likeliest token, also if that is infinite, and never an overflow."""
    return tl.where(score == peak, 1.0, tl.exp2((score - peak) / temperature * _LOG2_E))


@kernel()
def _rank(score: tl.tensor, num_digits: tl.constexpr) -> tl.tensor:
    """uint32 below 16 ** num_digits: the smaller, the greater the score is.

    Bits of a positive float32 order as the numbers do, those of a negative one the other way round.
    """
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits, 0x7FFFFFFF - bits).to(tl.uint32, bitcast=True) >> (32 - 4 * num_digits)


@kernel()
def _score(rank: tl.tensor, num_digits: tl.constexpr) -> tl.tensor:
    """The score of a rank."""
    first_negative: tl.constexpr = 1 << (4 * num_digits - 1)
    bits = tl.where(rank < first_negative, first_negative - 1 - rank, rank) << (32 - 4 * num_digits)
    return bits.to(tl.float32, bitcast=True)


@kernel()
def _at_most(number: tl.tensor, most: tl.tensor) -> tl.tensor:
    """A number of 0 or more, rounded down to int32."""
    return tl.minimum(number, most.to(tl.float32)).to(tl.int32)
