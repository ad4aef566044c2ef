"""Samples a token for each row of logits by its position in the order of likelihood, without sorting.

Finding where top-k, top-p and min-p cut, and finding the token on which a share of the mass falls, are the same
problem: if tokens are taken from the most likely on, at which one does their weight (or count) reach a target? This is
solved digit by digit like a radix sort, but without moving any number. A token's *rank* is an integer that is smaller
for greater logits. Each pass over the row adds up the weights by the next digit of the ranks and selects one::

    rank of 8 digits     0 3 f 0 …
    pass 1               weights of ranks 0…, 1…, 2…, … f…        the target falls into 0…
    pass 2               weights of ranks 00…, 01…, …             … into 03…
                         and so on; 16-bit logits have 4 digits

The last pass leaves a single rank. All its tokens have equal logits and are ordered by id. One program processes a row,
which it reads from the caches: a row of 128,256 bfloat16 numbers has 256 KB. Sums run in a fixed order, so a row gets
the same token in any batch.
"""

import torch
import triton.language as tl

from kernels.triton.jit import kernel
from kernels.triton.rows import STATE_FIELDS

_FIELDS: tl.constexpr = tl.constexpr(STATE_FIELDS)
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_RADIX: tl.constexpr = tl.constexpr(16)
_TILE = 1024

# Digits of a rank: as many as cover the bits of a float32 that numbers of this dtype use.
_NUM_DIGITS = {torch.float32: 8, torch.float16: 5, torch.bfloat16: 4}


def draw_tokens(
    logits: torch.Tensor, states: torch.Tensor, slots: torch.Tensor, uniforms: torch.Tensor, token_ids: torch.Tensor
) -> None:
    """Samples a token for each row of logits[R, V] whose slot in states[N, STATE_FIELDS] has a temperature above 0.

    token_ids[R] int32 holds the most likely ids, as `choose_greedily` writes them. Mutates those of rows that sample
    and have a logit above -inf; NaN counts as -inf. slots[R] int32; uniforms[R] float32 in [0, 1) select the token.
    `executor.sampling.sampler` defines the cuts; weights and their sums are float32. Launches one kernel, and does not
    wait.
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


# --- one row ----------------------------------------------------------------------------------------------------------


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
    """Draws among all tokens that pass min_p: the first whose cumulative weight, by id, exceeds the uniform's share."""
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
            # The sums of cumsum are added in another order and may round to the target itself.
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
    """Draws among the likeliest tokens: top-k of all, then the fewest that reach top-p, then those that pass min_p.

    After each stage, the tokens that are kept are all those before the rank `last` and the first num_last tokens of
    that rank, by id; `mass` is their weight.
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
        # With top-p close to 1, rounding errors can put the crossing behind what top-k keeps. Then top-p cuts nothing.
        if crossing <= last:
            weight = _weight(_score(crossing, num_digits), peak, temperature)
            num_crossing = tl.maximum(_at_most(tl.ceil((limit - before) / weight), vocab_size), 1)
            num_last = tl.where(crossing < last, num_crossing, tl.minimum(num_crossing, num_last))
            last = crossing
            mass = before + num_last * weight
    if _weight(_score(last, num_digits), peak, temperature) < min_p:
        mass, last = _mass_before(scores, vocab_size, peak, temperature, last, min_p, num_digits, tile)
        num_last = vocab_size

    target = uniform * mass
    rank, before = _find(scores, vocab_size, peak, temperature, target, False, num_digits, tile)
    weight = _weight(_score(rank, num_digits), peak, temperature)
    nth = _at_most((target - before) / weight, vocab_size)
    # Sums of different passes round differently: these limits keep a token that was cut off from being drawn.
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
    """Returns the rank at which the tokens, likeliest first, reach the target, and the sum of the tokens before it.

    The sum adds up weights, or counts the tokens if `counts` is set. If rounding errors keep the sum below the target,
    the rank is the last one that has any tokens.
    """
    digits = tl.arange(0, _RADIX)
    rank = tl.full((), 0, tl.uint32)
    before = tl.full((), 0.0, tl.float32)
    for place in range(num_digits):
        shift = 4 * (num_digits - 1 - place)
        amounts = tl.zeros((tile, _RADIX), tl.float32)  # added up at the end, so that threads synchronize only once
        for start in range(0, vocab_size, tile):
            ids, own = _tile_of(scores, start, vocab_size, tile)
            amount = (ids < vocab_size).to(tl.float32) if counts else _weight(own, peak, temperature)
            # With other leading digits the difference exceeds one digit here, also when it wraps around.
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
    """Returns the weight of the tokens before the rank `last` that weigh min_p or more, and the last of their ranks."""
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
    """Returns the id of the nth token of a rank, counted from 0, or of its last token if it has fewer."""
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
    """Returns the ids from `start` on and their scores, -inf beyond the vocabulary."""
    ids = start + tl.arange(0, tile)
    return ids, _cleaned(tl.load(scores + ids, mask=ids < vocab_size, other=float("-inf")))


# --- one number -------------------------------------------------------------------------------------------------------


@kernel()
def _cleaned(score: tl.tensor) -> tl.tensor:
    """Returns a score as float32, with -inf for NaN and 0 for -0, so that equal scores have equal bits."""
    wide = score.to(tl.float32)
    return tl.where(wide == wide, tl.where(wide == 0.0, 0.0, wide), float("-inf"))


@kernel()
def _weight(score: tl.tensor, peak: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Returns exp((score - peak) / temperature): 1 for the greatest score, even if it is infinite; never overflows."""
    return tl.where(score == peak, 1.0, tl.exp2((score - peak) / temperature * _LOG2_E))


@kernel()
def _rank(score: tl.tensor, num_digits: tl.constexpr) -> tl.tensor:
    """Returns a uint32 below 16 ** num_digits that is smaller for greater scores.

    The bits of positive float32 numbers have the order of the numbers, those of negative ones the reverse order.
    """
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits, 0x7FFFFFFF - bits).to(tl.uint32, bitcast=True) >> (32 - 4 * num_digits)


@kernel()
def _score(rank: tl.tensor, num_digits: tl.constexpr) -> tl.tensor:
    """Returns the score that has a given rank."""
    first_negative: tl.constexpr = 1 << (4 * num_digits - 1)
    bits = tl.where(rank < first_negative, first_negative - 1 - rank, rank) << (32 - 4 * num_digits)
    return bits.to(tl.float32, bitcast=True)


@kernel()
def _at_most(number: tl.tensor, most: tl.tensor) -> tl.tensor:
    """Returns a number of 0 or more, limited to `most` and rounded down to int32."""
    return tl.minimum(number, most.to(tl.float32)).to(tl.int32)
