"""The throughput that a machine cannot exceed, and the share of it that two servers reached.

    python -m bench serving-ceiling --model DIR --results PAIRED.json --rates KERNELS.json

PAIRED holds the results of `bench paired`. KERNELS holds those of `bench kernels` on the same machine: the bandwidth of
reads, and the best rate of a linear layer, on all threads. In a closed loop of c clients, or of c samples of their
requests, an output token takes at least

    the layers and the head for it      max( weights ÷ c ÷ bandwidth , FLOPs ÷ rate )      all c share one reading
    the layers for its prompt tokens    FLOPs ÷ rate                                       those that were not cached
    the keys and values of its context  bytes ÷ bandwidth                              samples share those of a prompt

one after the other, because a core that multiplies does not read KV. Norms, sampling, scheduler, clients and network
take no time in this bound, so no server reaches it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from bench.command_line import BenchError, Parser, open_console
from planning.config_file import read_model_shape
from planning.model_shape import DTYPE_BYTES, ModelShape


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a machine: bytes/s from memory, FLOP/s of a linear layer."""

    bandwidth: float
    flops: float

    @classmethod
    def of(cls, measured: dict[str, Any], dtype: str) -> "Rates":
        """Returns the rates in a report of `bench kernels`. Raises ValueError if no linear layer has this dtype."""
        num_threads = max(row["num_threads"] for row in measured["rows"])
        rates = [
            row["tflops"]
            for row in measured["rows"]
            if (row["operation"], row["num_threads"], row["dtype"]) == ("linear", num_threads, dtype) and row["tflops"]
        ]
        if not rates:
            raise ValueError(f"no linear layer in {dtype} on {num_threads} threads was measured")
        read_gb_per_s: float = measured["ceilings"][f"{num_threads} threads"]["read_gb_per_s"]
        return cls(read_gb_per_s * 1e9, max(rates) * 1e12)


@dataclass(frozen=True, slots=True)
class Work:
    """The work of all requests together. Each sample of a request is a sequence."""

    num_sequences: int
    num_prompt_tokens: int
    num_output_tokens: int

    @classmethod
    def of(cls, run: dict[str, Any], num_samples: int = 1) -> "Work":
        """Returns the work of the run that a summary describes."""
        num_prompt_tokens = run["num_prompt_tokens"] - run["num_cached_tokens"]
        return cls(run["num_requests"] * num_samples, num_prompt_tokens, run["num_output_tokens"])


@dataclass(frozen=True, slots=True)
class Turn:
    """The runs of Quire and of the other engine on one trace, as their summaries describe them.

    label  profile of the trace, or its number of clients
    """

    label: str
    concurrency: int
    num_samples: int
    quire: dict[str, Any]
    peer: dict[str, Any]


def read_turns(results: dict[str, Any]) -> list[Turn]:
    """Returns the turns of a measurement with one other engine, those with profiles first. Raises BenchError."""
    engines = {run["engine"] for run in results.get("runs", ())} - {"quire"}
    if len(engines) > 1:
        raise BenchError(f"expected one engine beside Quire, not {', '.join(sorted(engines))}")
    turns = [_turn(results, pair) for pair in _pairs(results)]
    return sorted(turns, key=lambda turn: 0 if turn.label != str(turn.concurrency) else turn.concurrency)


def _pairs(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the pairs of runs with their round and profile. The oldest results have no `runs`, and list the pairs."""
    if "runs" not in results:
        return list(results["pairs"])
    found: dict[tuple[int, str, int], dict[str, Any]] = {}
    for run in results["runs"]:
        profile = run["profile"] or ""
        pair = found.setdefault(
            (run["round"], profile, run["concurrency"]), {"round": run["round"], "profile": profile}
        )
        pair["quire" if run["engine"] == "quire" else "peer"] = run
    return [pair for pair in found.values() if {"quire", "peer"} <= pair.keys()]


def _turn(results: dict[str, Any], pair: dict[str, Any]) -> Turn:
    profile, concurrency = pair.get("profile", ""), pair["quire"]["concurrency"]
    num_samples = next(
        (
            trace.get("num_samples", 1)
            for trace in results.get("traces", ())
            if (trace["round"], trace.get("profile") or "", trace["concurrency"])
            == (pair.get("round"), profile, concurrency)
        ),
        1,
    )
    return Turn(profile or str(concurrency), concurrency, num_samples, pair["quire"], pair["peer"])


def most_tokens_per_s(model: ModelShape, dtype_bytes: int, work: Work, concurrency: int, rates: Rates) -> float:
    """Returns the bound of the module's docstring, in output tokens/s, for `concurrency` sequences at once."""
    layers, head = model.num_layer_matrix_parameters(), model.num_head_parameters()
    read_s = (layers + head) * dtype_bytes / rates.bandwidth / concurrency
    decode_s = max(read_s, 2 * (layers + head) / rates.flops)
    prompt_s = work.num_prompt_tokens / work.num_output_tokens * 2 * layers / rates.flops
    num_context_tokens = (work.num_prompt_tokens + work.num_output_tokens / 2) / work.num_sequences
    kv_s = num_context_tokens * model.num_device_kv_values() * dtype_bytes / rates.bandwidth
    return 1 / (decode_s + prompt_s + kv_s)


def render_table(model: ModelShape, dtype: str, turns: list[Turn], rates: Rates) -> Table:
    """Returns a table with medians of the rounds. Each round has its own trace, and so its own bound."""
    title = f"{model.name}, {dtype}, at {rates.flops / 1e9:.0f} GFLOP/s and {rates.bandwidth / 1e9:.0f} GB/s"
    table = Table(title=title, box=None, pad_edge=False)
    for heading in ("clients", "ceiling, tokens/s", "Quire", "peer", "twice the peer"):
        table.add_column(heading, justify="right")
    for label in dict.fromkeys(turn.label for turn in turns):
        own = [turn for turn in turns if turn.label == label]
        bounds = [
            most_tokens_per_s(
                model,
                DTYPE_BYTES[dtype],
                Work.of(turn.quire, turn.num_samples),
                turn.concurrency * turn.num_samples,
                rates,
            )
            for turn in own
        ]
        quire, peer = (
            median(run["output_tokens_per_s"] / most for run, most in zip(runs, bounds, strict=True))
            for runs in ([turn.quire for turn in own], [turn.peer for turn in own])
        )
        table.add_row(label, f"{median(bounds):,.0f}", f"{quire:.0%}", f"{peer:.0%}", f"{2 * peer:.0%}")
    return table


def main(arguments: Sequence[str]) -> None:
    flags = Parser("serving-ceiling", __doc__)
    flags.add_argument("--model", type=Path, required=True, help="directory of the model that was served")
    flags.add_argument("--results", type=Path, required=True, help="results of `bench paired`")
    flags.add_argument("--rates", type=Path, required=True, help="results of `bench kernels` on the same machine")
    given = flags.parse_args(arguments)
    model, results = read_model_shape(given.model), json.loads(given.results.read_text())
    dtype = results["server"]["dtype"]
    rates = Rates.of(json.loads(given.rates.read_text()), dtype)
    open_console().print(render_table(model, dtype, read_turns(results), rates))
