"""Targets for an H100, the source of each figure, and the figures that a report reached."""

from collections.abc import Mapping
from dataclasses import dataclass
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
    """The figure that was reached; None if the phase failed or was cut off before it had the number."""

    target: Target
    reached: float | None

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


TARGETS: tuple[Target, ...] = (
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
        "vLLM with FlashAttention-3: 6.44; floor 5.0",
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


def outcomes(results: Mapping[str, Any]) -> list[Outcome]:
    """Compares all targets with the results of the phases."""
    return [Outcome(target, _reached(target, results)) for target in TARGETS]


def render_table(found: list[Outcome]) -> Table:
    table = Table(title="targets, set for an H100", box=None, pad_edge=False)
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
