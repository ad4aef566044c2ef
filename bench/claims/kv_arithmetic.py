"""Claim: the KV size of a token of Llama 3 70B on each of eight devices. Computed by `planning`."""

from matplotlib.figure import Figure

from bench.claims.claim import Claim, Data, Plot, Setting, Table, Verdict, Watch, judged
from bench.claims.drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, powers_axis
from planning.known_models import KNOWN_MODELS

_MODEL = "llama-3-70b"
_TENSOR_PARALLEL = 8
_DTYPE_BYTES = 2
_CONTEXT = 128 * 1024
_CLAIMED_TOKEN_KIB, _CLAIMED_CONTEXT_GIB = 40.0, 5.0
_TOLERANCE = 0.005
_COLOURS = (BLUE, RED, ORANGE, GREEN, PURPLE, GREY)
_MAX_CURVES = len(_COLOURS)
_CONTEXTS = tuple(2**exponent for exponent in range(10, 18))


async def measure(setting: Setting, watch: Watch) -> Data:
    watch.expect(1)
    watch.step("arithmetic")
    rows = [
        {
            "model": name,
            "num_layers": shape.num_layers,
            "num_kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "token_bytes": shape.num_device_kv_values(1) * _DTYPE_BYTES,
        }
        for name, shape in KNOWN_MODELS.items()
    ]
    return {
        "model": _MODEL,
        "tensor_parallel": _TENSOR_PARALLEL,
        "dtype_bytes": _DTYPE_BYTES,
        "context": _CONTEXT,
        "token_bytes": KNOWN_MODELS[_MODEL].num_device_kv_values(_TENSOR_PARALLEL) * _DTYPE_BYTES,
        "rows": rows,
    }


def conditions(data: Data) -> str:
    return (
        "Arithmetic only: two (keys and values) × layers × kv heads of one device × head_dim × "
        f"{data['dtype_bytes']} bytes, from the published config.json with 80 layers and 8 kv heads of 128. At tensor "
        f"parallelism {data['tensor_parallel']} each device has one kv head. 128k is {data['context']:,} tokens."
    )


def verdict(data: Data) -> Verdict:
    token_kib = data["token_bytes"] / 2**10
    context_bytes = data["token_bytes"] * data["context"]
    context_gib = context_bytes / 2**30
    holds = [
        abs(token_kib / _CLAIMED_TOKEN_KIB - 1) <= _TOLERANCE,
        abs(context_gib / _CLAIMED_CONTEXT_GIB - 1) <= _TOLERANCE,
    ]
    ours = f"{token_kib:.1f} KiB per token and device, {context_gib:.2f} GiB for {data['context']:,} tokens"
    reason = (
        f"{data['token_bytes']:,} bytes per token are {token_kib:.1f} KiB of 1,024 bytes, or "
        f"{data['token_bytes'] / 1e3:.2f} kB of 1,000. The claim counts in units of 1,024; in decimal units the "
        f"context takes {context_bytes / 1e9:.2f} GB."
    )
    return Verdict(judged(holds), ours, reason)


def tables(data: Data) -> list[Table]:
    rows = tuple(
        (
            row["model"],
            f"{row['num_layers']} × {row['num_kv_heads']} × {row['head_dim']}",
            f"{row['token_bytes'] / 2**10:.0f}",
            f"{row['token_bytes'] * 8192 / 2**30:.2f}",
            f"{row['token_bytes'] * data['context'] / 2**30:.2f}",
        )
        for row in data["rows"]
    )
    headings = ("model", "layers × kv heads × head_dim", "KiB per token", "GiB for 8k", "GiB for 128k")
    return [Table(f"KV of whole models over all devices, {data['dtype_bytes']} bytes per number.", headings, rows)]


def plots(data: Data) -> list[Plot]:
    caption = "KV of one sequence against its length, by model; dotted: one of eight devices for Llama 3 70B."
    return [Plot("kv-arithmetic", caption, lambda figure: _draw(figure, data), (9.0, 4.2))]


def _draw(figure: Figure, data: Data) -> None:
    axes = figure.subplots()
    kilobytes = {row["token_bytes"]: row["model"] for row in data["rows"]}
    shown = sorted(kilobytes, reverse=True)[:_MAX_CURVES]
    for colour, token_bytes in zip(_COLOURS, shown, strict=False):
        names = ", ".join(row["model"] for row in data["rows"] if row["token_bytes"] == token_bytes)
        axes.plot(_CONTEXTS, [token_bytes * length / 2**30 for length in _CONTEXTS], color=colour, label=names)
    part = [data["token_bytes"] * length / 2**30 for length in _CONTEXTS]
    label = f"{data['model']}, one of {data['tensor_parallel']} devices"
    axes.plot(_CONTEXTS, part, color=_COLOURS[shown.index(_token_bytes(data))], linestyle=":", label=label)
    axes.set_yscale("log", base=2)
    axes.set_yticks([2.0**e for e in range(-4, 7, 2)], ["1/16", "1/4", "1", "4", "16", "64"])
    powers_axis(axes, list(_CONTEXTS), "tokens of the sequence")
    axes.set_xticks(_CONTEXTS, [f"{length // 1024}k" for length in _CONTEXTS])
    axes.set_ylabel("KV, GiB")
    figure.legend(loc="outside right center", fontsize="small")


def _token_bytes(data: Data) -> int:
    return next(int(row["token_bytes"]) for row in data["rows"] if row["model"] == data["model"])


CLAIM = Claim(
    name="kv-arithmetic",
    title="The KV size of a token: Llama 3 70B on eight devices",
    source="Secondary texts on sizing; the shape is that of the published config.json of meta-llama/Meta-Llama-3-70B",
    figure="40 KB of KV per token and GPU at TP = 8, 5 GB for 128k tokens",
    measure=measure,
    conditions=conditions,
    verdict=verdict,
    tables=tables,
    plots=plots,
)
