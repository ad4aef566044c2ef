"""Targets for an H100 and an H200, the source of each figure, and the figures that the phases reached.

Both devices multiply equally fast. An H200 reads 4.3 TB/s where an H100 reads 3.0 (expected, not measured), so its
targets for work that memory bounds are those of the H100, scaled by this ratio, unless the anchor gives another reason.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table


@dataclass(frozen=True, slots=True)
class Target:
    """One line of the table.

    path      path of the number in a report's phases
    factor    factor from the report's unit to the target's
    divide_by path of a second number, by which the first is divided; None: it is not divided
    stretch   a better figure to aim for, or None
    at_most   True if lower is better
    """

    what: str
    path: tuple[str, ...]
    unit: str
    wanted: float
    anchor: str
    stretch: float | None = None
    at_most: bool = False
    factor: float = 1.0
    divide_by: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figure that was reached; None if the phase did not run, or ended before it had the number.

    is_partial  True if the phase that measured it did not pass
    """

    target: Target
    reached: float | None
    is_partial: bool = False

    @property
    def is_met(self) -> bool | None:
        if self.reached is None:
            return None
        return self.reached <= self.target.wanted if self.target.at_most else self.reached >= self.target.wanted


def _row(name: str, field: str) -> tuple[str, ...]:
    return ("kernels", "rows", name, field)


_8B, _0_6B = "llama-3.1-8b", "qwen3-0.6b"
_QUIRE_8B = (f"end_to_end {_8B}", "closed_loop", "output_tokens_per_s")
_QUIRE_0_6B = (f"end_to_end {_0_6B}", "closed_loop", "output_tokens_per_s")


def _transformers(shape: str, engine: str) -> tuple[str, ...]:
    return (f"transformers {shape}", engine, "output_tokens_per_s")


_H100: tuple[Target, ...] = (
    Target(
        "decode attention, D128, 4 heads per kv head, b=64, 4k",
        _row("attention_decode D128 b=64 4096", "gb_per_s"),
        "TB/s",
        2.7,
        "FlashInfer, 8 heads per kv head: 82 % of bandwidth",
        factor=1e-3,
    ),
    Target("same, 1k", _row("attention_decode D128 b=64 1024", "gb_per_s"), "TB/s", 2.0, "60 %", factor=1e-3),
    Target(
        "same, b=1, 1k, in a graph",
        _row("attention_decode D128 b=1 1024", "us"),
        "µs/layer",
        15,
        "FlashInfer 12.3",
        at_most=True,
    ),
    Target(
        "same, b=1, 16k, in a graph",
        _row("attention_decode D128 b=1 16384", "us"),
        "µs/layer",
        30,
        "FlashInfer 25.1",
        at_most=True,
    ),
    Target(
        "causal paged prefill, 4k",
        _row("attention_prefill D128 4096", "tflops"),
        "TFLOP/s",
        300,
        "FlashAttention-2 template 310, FlashAttention-3 475",
        stretch=400,
    ),
    Target(
        "8B, b=1, time per output token",
        (f"end_to_end {_8B}", "single", "tpot_ms"),
        "ms",
        6.5,
        "vLLM with FlashAttention-3: 6.44; floor 5.0, expected 6.7 at 512 tokens",
        stretch=5.8,
        at_most=True,
    ),
    Target(
        "8B, b=64, 1k, one step",
        (f"end_to_end {_8B}", "batch", "step", "period_ms"),
        "ms",
        10.5,
        "floor 7.9 at 3.0 TB/s",
        stretch=9.0,
        at_most=True,
    ),
    Target(
        "8B, device idle between decode steps",
        (f"end_to_end {_8B}", "batch", "step", "idle_ratio"),
        "%",
        5,
        "vLLM 0.5: busy 38 % of the time",
        stretch=2,
        at_most=True,
        factor=100,
    ),
    Target(
        "8B, 64 clients, to transformers generate, static",
        _QUIRE_8B,
        "x",
        10,
        "vLLM: 24 x transformers",
        divide_by=_transformers(_8B, "static"),
    ),
    Target(
        "8B, 64 clients, to its continuous batching",
        _QUIRE_8B,
        "x",
        2,
        "chosen",
        divide_by=_transformers(_8B, "continuous"),
    ),
    Target(
        "0.6B, 64 clients, to transformers generate, static",
        _QUIRE_0_6B,
        "x",
        10,
        "as for 8B",
        divide_by=_transformers(_0_6B, "static"),
    ),
    Target(
        "0.6B, 64 clients, to its continuous batching",
        _QUIRE_0_6B,
        "x",
        2,
        "as for 8B",
        divide_by=_transformers(_0_6B, "continuous"),
    ),
)


_READ_TB_PER_S = {"H100": 3.0, "H200": 4.3}
_FASTER = _READ_TB_PER_S["H200"] / _READ_TB_PER_S["H100"]
_NOT_FASTER = "as for an H100: arithmetic bounds it"
_ON_BOTH_SIDES = "as for an H100: the other engine has the same device"

# Changes of the H100's targets: the same rows, other figures.
_H200_CHANGES: dict[tuple[str, ...], dict[str, Any]] = {
    _row("attention_decode D128 b=64 4096", "gb_per_s"): {"wanted": 3.8, "anchor": "88 % of 4.3 TB/s"},
    _row("attention_decode D128 b=64 1024", "gb_per_s"): {
        "wanted": round(2.0 * _FASTER, 2),
        "anchor": "2.0 on an H100, x 4.3 / 3.0",
    },
    _row("attention_decode D128 b=1 1024", "us"): {"anchor": "as for an H100: launches bound it, not memory"},
    _row("attention_decode D128 b=1 16384", "us"): {
        "wanted": 23,
        "anchor": "30 on an H100, of which reading 67 MB is 22 µs, here 16 µs",
    },
    _row("attention_prefill D128 4096", "tflops"): {"anchor": _NOT_FASTER},
    (f"end_to_end {_8B}", "single", "tpot_ms"): {
        "wanted": 4.6,
        "stretch": round(5.8 / _FASTER, 1),
        "anchor": "floor 3.5, expected 4.9 at 512 tokens; stretch: 5.8 on an H100, x 3.0 / 4.3",
    },
    (f"end_to_end {_8B}", "batch", "step", "period_ms"): {
        "wanted": 7.4,
        "stretch": round(9.0 / _FASTER, 1),
        "anchor": "floor 5.5 at 4.3 TB/s; stretch: 9.0 on an H100, x 3.0 / 4.3",
    },
    (f"end_to_end {_8B}", "batch", "step", "idle_ratio"): {"anchor": "as for an H100"},
    _QUIRE_8B: {"anchor": _ON_BOTH_SIDES},
    _QUIRE_0_6B: {"anchor": _ON_BOTH_SIDES},
}
_H200 = tuple(replace(target, **_H200_CHANGES[target.path]) for target in _H100)
TARGETS: dict[str, tuple[Target, ...]] = {"H100": _H100, "H200": _H200}
# These have the name of the device, but less bandwidth or power.
_SLOWER = re.compile(r"PCIe|NVL", re.IGNORECASE)


def targets_for(device: str) -> tuple[Target, ...]:
    """Returns the targets for a device by the name that it reports, such as `NVIDIA H200`; none for other devices."""
    if _SLOWER.search(device):
        return ()
    return next((found for name, found in TARGETS.items() if re.search(rf"\b{name}\b", device)), ())


def outcomes(
    targets: Sequence[Target], results: Mapping[str, Any], partial_phases: Collection[str] = ()
) -> list[Outcome]:
    """Compares targets with the results of the phases."""
    return [
        Outcome(
            target,
            _reached(target, results),
            any(path[0] in partial_phases for path in (target.path, target.divide_by or target.path)),
        )
        for target in targets
    ]


def render_table(device: str, found: Sequence[Outcome]) -> Table:
    table = Table(title=f"targets for {device}", box=None, pad_edge=False)
    for heading in ("what", "unit"):
        table.add_column(heading)
    for heading in ("target", "stretch", "reached"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("anchor")
    for outcome in found:
        target = outcome.target
        sign = "≤" if target.at_most else "≥"
        reached = "-" if outcome.reached is None else f"{outcome.reached:.3g}"
        mark = {None: "", True: " ✓", False: " ✗"}[outcome.is_met]
        if outcome.is_partial and outcome.reached is not None:
            mark += " partial"
        stretch = "" if target.stretch is None else f"{target.stretch:g}"
        table.add_row(target.what, target.unit, f"{sign} {target.wanted:g}", stretch, reached + mark, target.anchor)
    return table


def _reached(target: Target, results: Mapping[str, Any]) -> float | None:
    value = _at(results, target.path)
    if value is None or target.divide_by is None:
        return None if value is None else value * target.factor
    other = _at(results, target.divide_by)
    return value / other * target.factor if other else None


def _at(results: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    """Returns the number at the end of a path. In a list of rows, a name is the operation and the label."""
    here: Any = results
    for name in path:
        if isinstance(here, list):
            here = next((row for row in here if f"{row['operation']} {row['label']}" == name), None)
        else:
            here = here.get(name) if isinstance(here, Mapping) else None
    return float(here) if isinstance(here, int | float) else None
