"""Hand-written results of claims: the smallest data with every field that they read."""

from collections.abc import Mapping
from typing import Any

Data = dict[str, Any]


def served_row(number: int, requests_per_s: float, **more: Any) -> Data:
    return {
        "concurrency": number,
        "num_requests": 4 * number,
        "wall_s": 1.0,
        "requests_per_s": requests_per_s,
        "output_tokens_per_s": 90 * requests_per_s,
        "ttft_p50_ms": 20.0,
        "latency_p50_ms": 900.0,
        "mean_batch": 0.8 * number,
        "max_batch": number,
        "mean_step_ms": 2.5,
        "num_steps": 100,
        "waste_ratio": 0.03,
        "num_preemptions": 0,
        "num_equal_outputs": 4 * number,
    } | more


def fragmentation(used: Mapping[str, float]) -> Data:
    rows = []
    for memory, share in used.items():
        lost = 1 - share
        shares = {"used": share, "reserved": 0.2 * lost, "internal": 0.5 * lost, "external": 0.3 * lost}
        rows.append(
            {
                "memory": memory,
                "num_requests": 64,
                "num_served": 256,
                "shares": shares,
                "mean_running": 10.0,
                "max_running": 11,
                "num_steps": 1000,
            }
        )
    return {
        "block_size": 16,
        "num_blocks": 1500,
        "max_model_len": 2048,
        "lengths": "ShareGPT-like",
        "rows": rows,
    }


def batching(rates: Mapping[str, tuple[float, float]]) -> Data:
    """Returns results with these requests per second at 16 and 32 clients, by mode."""
    rows = [
        served_row(number, rate, batching=name)
        for name, pair in rates.items()
        for number, rate in zip((16, 32), pair, strict=True)
    ]
    curves = [
        {"batching": name, "num_clients": 32, "seconds": [0.0, 0.1, 0.2], "num_sequences": [32, 30, 2]}
        for name in rates
    ]
    return {"num_rounds": 1, "rows": rows, "curves": curves}


def fixed_pool(most: Mapping[str, int], paged_rate: float) -> Data:
    rows = [
        served_row(64, paged_rate if name == "paged" else 10.0, memory=name, max_batch=number, mean_batch=number * 0.9)
        for name, number in most.items()
    ]
    return {
        "num_blocks": 768,
        "block_size": 16,
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "num_clients": 64,
        "num_requests": 256,
        "rows": rows,
        "curves": [{"memory": name, "seconds": [0.0, 1.0], "num_sequences": [1, n]} for name, n in most.items()],
    }


def block_sizes(kernel_us: tuple[float, float, float], rates: tuple[float, float, float]) -> Data:
    """Returns results for blocks of 4, 16 and 128."""
    rows = [
        served_row(32, rate, block_size=size, waste_ratio=waste, kernel_us=us, kernel_gb_per_s=10.0, kernel_spread=0.1)
        for size, waste, us, rate in zip((4, 16, 128), (0.01, 0.03, 0.2), kernel_us, rates, strict=True)
    ]
    return {"num_clients": 32, "kernel": "one layer", "rows": rows}


def sharing(samples: float, beams: float) -> Data:
    paper = {"samples": [0.162, 0.305], "beams": [0.443, 0.663], "system prompt": None}
    saved = {"samples": samples, "beams": beams, "system prompt": 0.6}
    rows = [
        {
            "mode": mode,
            "lengths": "ShareGPT-like" if paper[mode] else "Alpaca-like",
            "num_sharers": number,
            "saved_ratio": saved[mode],
            "mean_unshared": 10.0,
            "mean_blocks": 10.0 * (1 - saved[mode]),
            "mean_prompt_tokens": 100.0,
            "mean_output_tokens": 50.0,
            "num_cow_copies": 3,
            "paper": paper[mode],
        }
        for mode in paper
        for number in (2, 4)
    ]
    return {"num_requests": 8, "rows": rows}


def transformers(static: float, continuous: float) -> Data:
    """Returns results with these requests per second at 64 clients, where Quire has 48."""
    rates = {"quire": 48.0, "generate": static, "generate_batch": continuous}
    rows = [
        served_row(number, rate * number / 64, engine=engine) for engine, rate in rates.items() for number in (1, 64)
    ]
    return {"dtype": "float32", "rows": rows}


def timeline(idle: Mapping[str, float], num_steps: Mapping[str, int]) -> Data:
    modes = [
        {
            "batching": name,
            "num_steps": num_steps[name],
            "busy_ratio": 0.5,
            "idle_ratio": ratio,
            "mean_wait": 3.0,
            "spans": [[0, 0, 0, 5], [1, 1, 2, num_steps[name]]],
        }
        for name, ratio in idle.items()
    ]
    return {"num_slots": 2, "lengths": [[8, 5], [8, 9]], "arrival_steps": [0, 1], "modes": modes}


def waste_by_length(most_unused: int, mean_waste: float) -> Data:
    row = {
        "num_tokens": 100.0,
        "mean_waste": mean_waste,
        "least_waste": 0.0,
        "most_waste": 0.13,
        "most_unused_slots": most_unused,
        "expected_waste": 7.5 / 107.5,
    }
    return {
        "block_size": 16,
        "max_model_len": 2048,
        "num_sequences": 48,
        "rows": [row, row | {"num_tokens": 200.0}],
    }


def kv_arithmetic(token_bytes: int) -> Data:
    row = {"model": "llama-3-70b", "num_layers": 80, "num_kv_heads": 8, "head_dim": 128, "token_bytes": 8 * token_bytes}
    return {
        "model": "llama-3-70b",
        "tensor_parallel": 8,
        "dtype_bytes": 2,
        "context": 131072,
        "token_bytes": token_bytes,
        "rows": [row, row | {"model": "llama-2-7b", "token_bytes": 524288}],
    }


def simulator(error: float, factor: float) -> Data:
    comparisons = [
        {
            "num_clients": number,
            "is_fitted": number == 1,
            "num_requests": 24,
            "measured_tokens_per_s": 1000.0,
            "predicted_tokens_per_s": 1000.0 * (1 + error),
            "error_ratio": error,
            "measured_ttft_s": 0.02,
            "predicted_ttft_s": 0.02,
            "measured_tpot_s": 0.005,
            "predicted_tpot_s": 0.005,
        }
        for number in (1, 4)
    ]
    summary = {
        "real_time_factor": factor,
        "wall_s": 86_400 / factor,
        "num_requests": 1000,
        "num_steps": 5000,
        "num_leapt_steps": 4000,
        "output_tokens_per_s": 2700.0,
        "mean_batch": 20.0,
        "max_batch": 60,
        "busy_ratio": 0.9,
        "waste_ratio": 0.02,
        "tenants": [{"latency_s": {"p50": 3.0, "p99": 9.0}}],
    }
    day = {
        "model": "llama-3.1-8b",
        "device": "h100",
        "rate": 8.0,
        "swing": 0.6,
        "duration_s": 86_400.0,
        "summary": summary,
        "timeline": [{"time_s": 3600.0 * hour, "num_running": hour, "num_waiting": 0} for hour in range(3)],
    }
    fit = {"num_steps": 400, "mean_error_ratio": 0.1}
    return {"prediction": {"fit": fit, "comparisons": comparisons}, "day": day}


def routing(ttft: float, throughput: float, stale: float) -> Data:
    """Fleets in which the choice by cost has these shares of round robin's mean TTFT and throughput."""
    factors = {
        ("round-robin", 0.0): (1.0, 1.0),
        ("least-loaded", 0.0): (0.9, 1.0),
        ("ring", 0.0): (0.5, 1.0),
        ("cost", 0.0): (ttft, throughput),
        ("cost", 500.0): (ttft * stale, throughput),
        ("oracle", 0.0): (ttft, throughput),
    }
    rows = [
        {
            "num_replicas": num_replicas,
            "num_requests": 100,
            "routing": name,
            "event_delay_ms": delay_ms,
            "rate": 110.0,
            "hit_ratio": 0.5,
            "ttft_mean_s": mean,
            "ttft_p50_s": mean,
            "ttft_p99_s": 2 * mean,
            "tpot_mean_s": 0.02,
            "output_tokens_per_s": 1000.0 * rate,
            "request_imbalance": 1.1,
            "busy_imbalance": 1.1,
        }
        for num_replicas in (8, 64, 1000)
        for (name, delay_ms), (mean, rate) in factors.items()
        if num_replicas < 1000 or (name in ("round-robin", "ring", "cost") and not delay_ms)
    ]
    return {"model": "llama-3.1-8b", "device": "h100", "rows": rows}
