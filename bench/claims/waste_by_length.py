"""Claim: paged waste is bounded by a block, so its share shrinks as sequences grow.

Compares measurements with a computed line.
"""

import statistics

from matplotlib.figure import Figure

from bench.claims.claim import Claim, Data, Plot, Setting, Table, Verdict, Watch, judged, percent
from bench.claims.core_runs import CoreSetting, run_core
from bench.claims.drawing import BLUE, GREY, RED, percent_axis, powers_axis
from scheduler.core import Scheduler

BLOCK_SIZE = 16
_MAX_MODEL_LEN = 2048
_CENTRES = (16, 32, 64, 128, 256, 512, 1024)
_CLAIMED_WASTE = 0.04


def expected_waste(num_tokens: float, block_size: int) -> float:
    """Returns the expected waste near `num_tokens` tokens, if all remainders in the last block are equally likely."""
    tail = (block_size - 1) / 2
    return tail / (num_tokens + tail)


async def measure(setting: Setting, watch: Watch) -> Data:
    """Grows sequences to lengths around each centre and compares the token slots that they hold and use."""
    centres = _CENTRES[:4] if setting.is_quick else _CENTRES
    per_centre = 8 if setting.is_quick else 48
    watch.expect(len(centres))
    rows = []
    for centre in centres:
        watch.step(f"about {centre} tokens")
        lengths = spread_lengths(centre, per_centre)
        shares, num_tails = zip(*(_at_end(length) for length in lengths), strict=True)
        rows.append(
            {
                "num_tokens": statistics.fmean(lengths),
                "mean_waste": statistics.fmean(shares),
                "least_waste": min(shares),
                "most_waste": max(shares),
                "most_unused_slots": max(num_tails),
                "expected_waste": expected_waste(statistics.fmean(lengths), BLOCK_SIZE),
            }
        )
    return {"block_size": BLOCK_SIZE, "max_model_len": _MAX_MODEL_LEN, "num_sequences": per_centre, "rows": rows}


def spread_lengths(centre: int, number: int) -> list[int]:
    """Returns lengths from a quarter below to a quarter above `centre`, or by half a block if that is more."""
    reach = max(centre // 4, BLOCK_SIZE // 2)
    return [centre - reach + round(2 * reach * place / (number - 1)) for place in range(number)]


def _at_end(num_tokens: int) -> tuple[float, int]:
    """Returns unused over held token slots, and unused ones, when a sequence has `num_tokens` tokens in the pool."""
    seen: list[tuple[int, int]] = []

    def observe(step: int, core: Scheduler) -> None:
        seen.extend((each.num_planned_tokens, len(each.block_table) * BLOCK_SIZE) for each in core.state.batch.running)

    num_blocks = _MAX_MODEL_LEN // BLOCK_SIZE
    core = CoreSetting(num_blocks, 1, _MAX_MODEL_LEN, BLOCK_SIZE)
    run_core(core, [(num_tokens // 2, num_tokens - num_tokens // 2 + 1)], observe)
    num_used, num_held = seen[-1]
    if num_used != num_tokens:
        raise RuntimeError(f"a sequence of {num_tokens} tokens ended with {num_used} in the pool")
    return (num_held - num_used) / num_held, num_held - num_used


def conditions(data: Data) -> str:
    return (
        f"The shipped scheduler core, paged, with blocks of {data['block_size']}. Each point has "
        f"{data['num_sequences']} sequences. Their lengths are spread evenly around it by a quarter (at least half a "
        "block), and waste is read when they have reached their length. The line is computed: half a block less half "
        "a token, divided by the sum of that and the length."
    )


def verdict(data: Data) -> Verdict:
    rows, size = data["rows"], data["block_size"]
    is_bounded = all(row["most_unused_slots"] < size for row in rows)
    tolerance = 2.5 / data["num_sequences"] ** 0.5
    follows = all(abs(row["mean_waste"] - row["expected_waste"]) <= tolerance * row["expected_waste"] for row in rows)
    enough = (size - 1) / 2 * (1 / _CLAIMED_WASTE - 1)
    ours = (
        f"at most {max(row['most_unused_slots'] for row in rows)} of {size} token slots unused per sequence; below "
        f"{percent(_CLAIMED_WASTE, 0)} from {enough:.0f} tokens on"
    )
    bound = "No sequence holds an unused block." if is_bounded else "A sequence holds more than the end of a block."
    line = (
        "The means follow the computed line. So 3–4 % is a property of the block size and the length, not of paging "
        f"itself: with blocks of {size} it holds from about {enough:.0f} tokens on."
        if follows
        else "The means do not follow the computed line: sequences hold more than the end of their last block."
    )
    return Verdict(judged([is_bounded, follows]), ours, f"{bound} {line}")


def tables(data: Data) -> list[Table]:
    rows = tuple(
        (
            f"{row['num_tokens']:.0f}",
            percent(row["mean_waste"]),
            percent(row["expected_waste"]),
            percent(row["least_waste"]),
            percent(row["most_waste"]),
            percent(1 - row["num_tokens"] / data["max_model_len"]),
        )
        for row in data["rows"]
    )
    headings = ("tokens, mean", "waste", "computed", "least", "most", "contiguous")
    return [
        Table(
            "Unused over held token slots, paged, and for a contiguous reservation of the longest request.",
            headings,
            rows,
        )
    ]


def plots(data: Data) -> list[Plot]:
    caption = (
        "Waste against the length of a sequence: measured means with their range, the computed line, and the waste of "
        "reserving the longest possible request at that length."
    )
    return [Plot("waste-by-length", caption, lambda figure: _draw(figure, data), (9.0, 4.0))]


def _draw(figure: Figure, data: Data) -> None:
    axes = figure.subplots()
    rows = data["rows"]
    lengths = [row["num_tokens"] for row in rows]
    means = [100 * row["mean_waste"] for row in rows]
    ranges = [
        [100 * (row["mean_waste"] - row["least_waste"]) for row in rows],
        [100 * (row["most_waste"] - row["mean_waste"]) for row in rows],
    ]
    line = [2 ** (exponent / 8) for exponent in range(28, 84)]
    line = [length for length in line if 0.7 * lengths[0] <= length <= 1.4 * lengths[-1]]
    axes.plot(line, [100 * (1 - length / data["max_model_len"]) for length in line], color=RED, label="contiguous")
    axes.plot(
        line, [100 * expected_waste(length, data["block_size"]) for length in line], color=GREY, label="paged, computed"
    )
    axes.errorbar(lengths, means, ranges, fmt="o", color=BLUE, capsize=3, linewidth=1.2, label="paged, measured")
    axes.axhline(100 * _CLAIMED_WASTE, color=GREY, linestyle=":", linewidth=1.2)
    axes.annotate("4 %", (line[-1], 100 * _CLAIMED_WASTE), xytext=(0, 4), textcoords="offset points", ha="right")
    powers_axis(axes, [2**e for e in range(4, 11) if 2**e <= 1.1 * lengths[-1]], "tokens of the sequence")
    percent_axis(axes, "unused over held token slots, %")
    axes.legend(loc="center", bbox_to_anchor=(0.42, 0.62))


CLAIM = Claim(
    name="waste-by-length",
    title="Paged waste is less than a block per sequence, whatever its length",
    source="Kwon et al., SOSP 2023, sections 1 and 4.3; secondary texts: 3–4 % waste when paged",
    figure="unused memory only in the last block of a sequence; under 4 %",
    measure=measure,
    conditions=conditions,
    verdict=verdict,
    tables=tables,
    plots=plots,
)
