"""Shows a plan as tables, or converts it to plain values."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from planning.capacity import Capacity
from planning.deployment import Deployment
from planning.roofline import Efficiencies

_EFFICIENCIES = Efficiencies()  # those of `find_capacity` too


def notes(deployment: Deployment) -> list[str]:
    """Returns the notes that explain the figures."""
    model, parallel = deployment.model, deployment.tensor_parallel
    lines = [
        "GB and MB are decimal (10^9, 10^6 bytes), KiB and GiB binary (2^10, 2^30).",
        f"Floors: {_EFFICIENCIES.bandwidth:.0%} of {deployment.device.bandwidth / 1e12:.2f} TB/s (data sheet); matrix "
        f"products at {_EFFICIENCIES.compute:.0%} and prefill attention at {_EFFICIENCIES.prefill:.0%} of "
        f"{deployment.device.flops(deployment.dtype_bytes) / 1e12:,.0f} TFLOP/s; no overhead, no all-reduce.",
        "Contiguous: every sequence reserves max_model_len in one run. Paged: it holds only the blocks it fills.",
    ]
    if deployment.num_kv_copies > 1:
        lines.append(
            f"{parallel} devices share {model.num_kv_heads} kv heads: each head, and its KV, is on "
            f"{deployment.num_kv_copies} devices."
        )
    if parallel > 1:
        lines.append(
            "All sizes are per device: those of the device with the most, if the model does not divide evenly."
        )
    if deployment.max_model_len > model.max_position_embeddings:
        lines.append(f"{model.name} was made for {model.max_position_embeddings:,} tokens; this plan exceeds that.")
    return lines


def as_values(deployment: Deployment, capacity: Capacity) -> dict[str, Any]:
    """Returns the plan as plain values, for JSON."""
    return {
        "model": asdict(deployment.model) | {"num_parameters": deployment.model.num_parameters},
        "device": asdict(deployment.device),
        "tensor_parallel": deployment.tensor_parallel,
        "dtype": deployment.dtype,
        "block_size": deployment.block_size,
        "max_model_len": deployment.max_model_len,
        "gpu_memory_utilization": deployment.memory_share,
        "weight_bytes": deployment.weight_bytes,
        "read_bytes": deployment.read_bytes,
        "kv_bytes_per_token": deployment.kv_bytes_per_token,
        "kv_bytes_per_block": deployment.block_bytes,
        "kv_bytes_per_max_model_len": deployment.max_model_len * deployment.kv_bytes_per_token,
        "num_kv_copies": deployment.num_kv_copies,
        "num_blocks": deployment.num_blocks,
        "decode_floor_s": capacity.decode_floor_s,
        "prefill_floors_s": [{"num_tokens": n, "floor_s": floor_s} for n, floor_s in capacity.prefill_floors_s],
        "rows": [asdict(row) for row in capacity.rows],
        "efficiencies": asdict(_EFFICIENCIES),
        "notes": notes(deployment),
    }


def show(deployment: Deployment, capacity: Capacity, console: Console) -> None:
    """Prints the plan as two tables and notes."""
    model, parallel = deployment.model, deployment.tensor_parallel
    devices = deployment.device.name if parallel == 1 else f"{parallel} x {deployment.device.name}"
    each = "" if parallel == 1 else " on each device"
    facts = Table(title=f"{model.name}, {deployment.dtype}, on {devices}", show_header=False)
    facts.add_column()
    facts.add_column(justify="right")
    facts.add_row("parameters", f"{model.num_parameters:,}")
    facts.add_row(f"weights{each}", f"{deployment.weight_bytes / 1e9:.2f} GB")
    facts.add_row("weights read by a step", f"{deployment.read_bytes / 1e9:.2f} GB")
    per_token = deployment.kv_bytes_per_token
    facts.add_row(f"KV of a token{each}", f"{per_token:,} bytes = {per_token / 1024:g} KiB")
    facts.add_row(f"KV of a block of {deployment.block_size}", f"{deployment.block_bytes / 1024:g} KiB")
    longest = deployment.max_model_len * per_token
    facts.add_row(f"KV of {deployment.max_model_len:,} tokens", f"{longest / 1e9:.2f} GB = {longest / 2**30:.2f} GiB")
    share = f"{deployment.memory_share:.0%} of {deployment.device.memory_bytes / 1e9:.1f} GB"
    facts.add_row(f"pool ({share}, minus weights)", f"{deployment.pool_bytes / 1e9:.2f} GB")
    facts.add_row("blocks, without the null block", f"{deployment.num_usable_blocks:,}")
    facts.add_row("tokens in the pool", f"{deployment.num_usable_blocks * deployment.block_size:,}")
    facts.add_row("decode floor, one sequence", f"{capacity.decode_floor_s * 1e3:.2f} ms")
    for num_tokens, floor_s in capacity.prefill_floors_s:
        facts.add_row(f"prefill floor, {num_tokens:,} tokens", f"{floor_s * 1e3:.1f} ms")
    console.print(facts)
    rows = Table(title="sequences that fit at once")
    for heading in ("length", "tokens each", "contiguous", "paged", "decode floor, all paged"):
        rows.add_column(heading, justify="left" if heading == "length" else "right")
    for row in capacity.rows:
        held = f"{row.num_tokens:,.0f}"
        rows.add_row(
            row.name, held, f"{row.num_contiguous:,}", f"{row.num_paged:,}", f"{row.decode_floor_s * 1e3:.2f} ms"
        )
    console.print(rows)
    for line in notes(deployment):
        console.print(line, style="dim", highlight=False)
