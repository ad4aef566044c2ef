"""Claim: small blocks waste less, large blocks are read faster. Waste, kernel time and throughput for 4 to 128."""

from dataclasses import replace
from itertools import pairwise

import torch
from matplotlib.figure import Figure

import kernels
from bench.claims.claim import Claim, Data, Plot, Setting, Table, Verdict, Watch, judged, percent
from bench.claims.drawing import BLUE, GREEN, RED, powers_axis
from bench.claims.served import Served, device_of, run_load, trace_for, warm_up, with_services
from bench.kernels.attention_cases import decode, mixed_contexts
from bench.kernels.cases import LARGE, SMALL
from bench.stopwatch import time_rounds
from quire.async_client import AsyncClient

_SIZES = (4, 8, 16, 32, 64, 128)
_DEFAULT_SIZE = 16
_NUM_ROWS, _SHORTEST, _LONGEST = 32, 32, 1024
_MAX_WASTE = 0.06
_NEAR_BEST = 0.85


async def measure(setting: Setting, watch: Watch) -> Data:
    sizes = (8, 16) if setting.is_quick else _SIZES
    num_clients = 4 if setting.is_quick else 32
    watch.expect(2 * len(sizes))
    device = device_of(setting.flags)
    rows = []
    for size in sizes:
        watch.step(f"kernel, blocks of {size}")
        rows.append({"block_size": size} | _kernel(size, device, 0.05 if setting.is_quick else 1.0))
    for row in rows:
        watch.step(f"{num_clients} clients, blocks of {row['block_size']}")
        served = await _serve(setting, row["block_size"], num_clients)
        row |= served.row()
    return {"num_clients": num_clients, "kernel": _kernel_case(device), "rows": rows}


def _kernel(size: int, device: torch.device, budget_s: float) -> Data:
    """Times decode attention of one layer; on a CPU with one thread, so that CPU time excludes other work."""
    is_gpu = device.type == "cuda"
    model = replace(LARGE if is_gpu else SMALL, block_size=size)
    dtype = torch.bfloat16 if is_gpu else torch.float32
    case = decode(model, dtype, mixed_contexts(_NUM_ROWS, _SHORTEST, _LONGEST), f"blocks of {size}")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            prepared = case.prepare(kernels.select(device), device)
            timing = time_rounds(prepared.run, prepared.num_calls, device, budget_s, in_graph=is_gpu)
    finally:
        torch.set_num_threads(num_threads)
    gb_per_s = case.num_bytes / timing.median_s / 1e9
    return {"kernel_us": timing.median_s * 1e6, "kernel_gb_per_s": gb_per_s, "kernel_spread": timing.spread_ratio}


def _kernel_case(device: torch.device) -> str:
    where = (
        "one layer of Llama 3.1 8B, bfloat16, in a graph"
        if device.type == "cuda"
        else ("one layer of 8 heads, 4 kv heads of 64, float32, one thread, CPU time")
    )
    return f"{_NUM_ROWS} sequences of {_SHORTEST} to {_LONGEST} tokens, {where}"


async def _serve(setting: Setting, size: int, num_clients: int) -> Served:
    async def measure(client: AsyncClient) -> Served:
        info = await client.server_info()
        await warm_up(client, trace_for(setting, info, 8, 0))
        trace = trace_for(setting, info, (2 if setting.is_quick else 6) * num_clients, num_clients)
        return await run_load(client, trace, num_clients)

    return await with_services(setting, {"block_size": size}, measure)


def conditions(data: Data) -> str:
    return (
        f"Decode attention alone: {data['kernel']}; every call reads buffers that are in no cache; medians. Throughput "
        f"and waste: real services, one pair for each block size, {data['num_clients']} clients in a closed loop, "
        f"{data['rows'][0]['num_requests']} requests of mixed lengths, the same for each size. Waste is sampled during "
        "the run."
    )


def verdict(data: Data) -> Verdict:
    rows = data["rows"]
    first, last = rows[0], rows[-1]
    default = next(row for row in rows if row["block_size"] == _DEFAULT_SIZE)
    best = max(row["output_tokens_per_s"] for row in rows)
    waste_grows = all(a["waste_ratio"] < b["waste_ratio"] for a, b in pairwise(rows))
    kernel_gains = first["kernel_us"] > default["kernel_us"] * (1 + default["kernel_spread"])
    is_balanced = default["output_tokens_per_s"] >= _NEAR_BEST * best and default["waste_ratio"] <= _MAX_WASTE
    ours = (
        f"from {first['block_size']} to {last['block_size']}: waste {percent(first['waste_ratio'])} to "
        f"{percent(last['waste_ratio'])}, kernel {first['kernel_us']:.0f} to {last['kernel_us']:.0f} µs; at "
        f"{_DEFAULT_SIZE}: {percent(default['waste_ratio'])}, {default['kernel_us']:.0f} µs, "
        f"{percent(default['output_tokens_per_s'] / best, 0)} of the best throughput"
    )
    reason = (
        f"Waste {'grows with every size' if waste_grows else 'does not grow with every size'}. Compared with blocks of "
        f"{_DEFAULT_SIZE}, decode attention over blocks of {first['block_size']} takes "
        f"{first['kernel_us'] / default['kernel_us']:.2f} × the time, and over blocks of {last['block_size']} "
        f"{last['kernel_us'] / default['kernel_us']:.2f} × the time. "
    )
    reason += (
        f"A block size of {_DEFAULT_SIZE} wastes little and is near the best throughput."
        if is_balanced
        else f"A block size of {_DEFAULT_SIZE} is not the best choice on this machine."
    )
    if not kernel_gains:
        reason += (
            " The kernel has nothing to gain from larger blocks here: it reads a block in place, head by head, and the "
            "keys of one head in a block are already longer than a cache line."
        )
    return Verdict(judged([waste_grows, kernel_gains, is_balanced]), ours, reason)


def tables(data: Data) -> list[Table]:
    rows = tuple(
        (
            str(row["block_size"]),
            percent(row["waste_ratio"]),
            f"{row['kernel_us']:.0f}",
            f"{row['kernel_gb_per_s']:.1f}",
            percent(row["kernel_spread"], 0),
            f"{row['output_tokens_per_s']:.0f}",
            f"{row['mean_step_ms']:.2f}",
        )
        for row in data["rows"]
    )
    headings = ("block size", "waste", "kernel, µs", "GB/s", "spread", "tokens/s", "ms a step")
    return [Table("One row for each block size.", headings, rows)]


def plots(data: Data) -> list[Plot]:
    caption = "Waste, time of decode attention, and throughput against the block size."
    return [Plot("block-size", caption, lambda figure: _draw(figure, data), (9.6, 3.6))]


def _draw(figure: Figure, data: Data) -> None:
    rows = data["rows"]
    sizes = [row["block_size"] for row in rows]
    panels = (
        ("waste_ratio", 100.0, "waste, %", RED),
        ("kernel_us", 1.0, "decode attention, µs per layer", GREEN),
        ("output_tokens_per_s", 1.0, "output tokens/s", BLUE),
    )
    for axes, (name, scale, label, colour) in zip(figure.subplots(1, 3), panels, strict=True):
        axes.plot(sizes, [scale * row[name] for row in rows], marker="o", color=colour)
        powers_axis(axes, sizes, "block size, tokens")
        axes.margins(y=0.1)
        axes.set_ylim(bottom=0)
        axes.set_title(label, loc="left")


CLAIM = Claim(
    name="block-size",
    title="The block size trades waste against the kernel's efficiency",
    source="Kwon et al., SOSP 2023, section 7.2 and figure 18: 16 to 128 serve ShareGPT well, 16 and 32 Alpaca; the "
    "default is 16",
    figure="small blocks: little waste, slow kernel; large blocks: the opposite; 16 is large enough for the kernel and "
    "small enough for little waste",
    measure=measure,
    conditions=conditions,
    verdict=verdict,
    tables=tables,
    plots=plots,
)
