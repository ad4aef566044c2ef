"""The throughput that a machine cannot exceed, and the share of it that two servers reached.

    python -m bench serving-ceiling --model DIR --results PAIRED.json --rates KERNELS.json

PAIRED holds the results of `bench paired`. KERNELS holds those of `bench kernels` on the same machine: the bandwidth of
reads, and the best rate of a linear layer, on all threads. In a closed loop of c clients an output token takes at least

    the layers and the head for it      max( weights ÷ c ÷ bandwidth , FLOPs ÷ rate )      all c share one reading
    the layers for its prompt tokens    FLOPs ÷ rate                                       those that were not cached
    the keys and values of its context  bytes ÷ bandwidth

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

from bench.command_line import Parser, open_console
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
    """The work of all requests together."""

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int

    @classmethod
    def of(cls, run: dict[str, Any]) -> "Work":
        """Returns the work of the run that a summary describes."""
        num_prompt_tokens = run["num_prompt_tokens"] - run["num_cached_tokens"]
        return cls(run["num_requests"], num_prompt_tokens, run["num_output_tokens"])


def most_tokens_per_s(model: ModelShape, dtype_bytes: int, work: Work, concurrency: int, rates: Rates) -> float:
    """Returns the bound of the module's docstring, in output tokens/s."""
    layers, head = model.num_layer_matrix_parameters(), model.num_head_parameters()
    read_s = (layers + head) * dtype_bytes / rates.bandwidth / concurrency
    decode_s = max(read_s, 2 * (layers + head) / rates.flops)
    prompt_s = work.num_prompt_tokens / work.num_output_tokens * 2 * layers / rates.flops
    num_context_tokens = (work.num_prompt_tokens + work.num_output_tokens / 2) / work.num_requests
    kv_s = num_context_tokens * model.num_device_kv_values() * dtype_bytes / rates.bandwidth
    return 1 / (decode_s + prompt_s + kv_s)


def render_table(model: ModelShape, dtype: str, pairs: list[dict[str, Any]], rates: Rates) -> Table:
    title = f"{model.name}, {dtype}, at {rates.flops / 1e9:.0f} GFLOP/s and {rates.bandwidth / 1e9:.0f} GB/s"
    table = Table(title=title, box=None, pad_edge=False)
    for heading in ("clients", "ceiling, tokens/s", "Quire", "peer", "twice the peer"):
        table.add_column(heading, justify="right")
    for concurrency in sorted({pair["quire"]["concurrency"] for pair in pairs}):
        own = [pair for pair in pairs if pair["quire"]["concurrency"] == concurrency]
        most = most_tokens_per_s(model, DTYPE_BYTES[dtype], Work.of(own[0]["quire"]), concurrency, rates)
        quire, peer = (median(pair[name]["output_tokens_per_s"] for pair in own) / most for name in ("quire", "peer"))
        table.add_row(str(concurrency), f"{most:,.0f}", f"{quire:.0%}", f"{peer:.0%}", f"{2 * peer:.0%}")
    return table


def main(arguments: Sequence[str]) -> None:
    flags = Parser("serving-ceiling", __doc__)
    flags.add_argument("--model", type=Path, required=True, help="directory of the model that was served")
    flags.add_argument("--results", type=Path, required=True, help="results of `bench paired`")
    flags.add_argument("--rates", type=Path, required=True, help="results of `bench kernels` on the same machine")
    given = flags.parse_args(arguments)
    model = read_model_shape(given.model)
    dtype = model.dtype or "float32"
    rates = Rates.of(json.loads(given.rates.read_text()), dtype)
    open_console().print(render_table(model, dtype, json.loads(given.results.read_text())["pairs"], rates))
