"""Runs the closed loop of `bench gpu-serving` through transformers: static batches, and its continuous batching.

    python -m bench gpu-transformers --shape qwen3-0.6b --device cuda --json FILE

The model has the same shape and random weights, in this process; trace and number of clients are the same. The results
are written after each engine. An engine that fails leaves its error.
"""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.gpu.end_to_end import closed_loop_turn
from bench.gpu.random_models import SHAPES, phase_arguments, write_model
from bench.gpu.scales import NotHere, Scale, scale_on
from bench.report import save
from bench.serving.continuous_batches import ContinuousBatches
from bench.serving.engines import Engine, in_process_engine
from bench.serving.measurer import Turn, shortened
from bench.serving.measurer import measure as measure_turns
from bench.serving.static_batches import StaticBatches
from bench.trace import describe, make_trace

_NUM_WARM_UP_REQUESTS = 2
_WARM_UP_TOKENS = 8
# On the CPU its masks would be sized by all of the host's memory.
_CPU_LIMITS = {"num_blocks": 16, "max_batch_tokens": 256}


def measure(model: Any, scale: Scale, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measures both engines on one model. `keep` takes the results after each."""
    turn = closed_loop_turn(int(model.config.vocab_size), scale)
    limits = _CPU_LIMITS if model.device.type == "cpu" else None
    report: dict[str, Any] = {
        "trace": describe(turn.trace, make_trace(turn.trace)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": str(model.config._attn_implementation),
    }
    for engine in (
        in_process_engine("static", StaticBatches.of(model)),
        in_process_engine("continuous", ContinuousBatches(model, limits)),
    ):
        report[engine.name] = _measure_engine(engine, turn)
        keep(report)
    return report


def _measure_engine(engine: Engine, turn: Turn) -> dict[str, Any]:
    warm_up = shortened(make_trace(turn.trace)[:_NUM_WARM_UP_REQUESTS], _WARM_UP_TOKENS)
    try:
        (run,) = asyncio.run(measure_turns([engine], [turn], warm_up))
    except Exception as error:  # noqa: BLE001  # after any error the other engine is measured
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    return asdict(run.summary)


def random_model(shape: str, device: torch.device) -> Any:
    """Returns a transformers model of the shape, initialised on the device in the dtype of its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as directory:
        config = AutoConfig.from_pretrained(write_model(shape, Path(directory)))
    with device:
        model_class: Any = AutoModelForCausalLM
        model = model_class.from_config(config, dtype=getattr(torch, SHAPES[shape]["torch_dtype"]))
    return model.eval()


def main(arguments: Sequence[str]) -> None:
    given = phase_arguments("gpu-transformers", __doc__, arguments)
    try:
        scale = scale_on(given.device, given.shape, is_small=given.small)
    except NotHere as error:
        save(given.json, {"skipped_because": str(error)})
        return
    model = random_model(given.shape, torch.device(given.device))
    measure(model, scale, lambda report: save(given.json, report))
