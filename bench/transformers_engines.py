"""What transformers does with the closed loop of `bench.end_to_end`: static batches, and its continuous batching.

    python -m bench.transformers_engines --shape qwen3-0.6b --device cuda --json FILE

A model of the same shape with random weights, in this process; the same trace, the same number of clients. What has
been measured is written after each engine, and one that fails says why.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from bench.continuous_baseline import ContinuousBatches
from bench.end_to_end import FULL, IN_SMALL, Scale, trace_settings
from bench.load import LoadResult
from bench.random_models import SHAPES, phase_arguments, write_model
from bench.report import save, summarize
from bench.static_baseline import StaticBatches
from bench.trace import TraceRequest, describe, make_trace

Engine = Callable[[Sequence[TraceRequest], int], LoadResult]

_NUM_WARM_UP_REQUESTS = 2
_WARM_UP_TOKENS = 8
# On the CPU it would size its masks by all of the host's memory.
_CPU_LIMITS = {"num_blocks": 16, "max_batch_tokens": 256}


def measure(model: Any, scale: Scale, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Both engines on one model. `keep` is given what is known after each."""
    settings = trace_settings(int(model.config.vocab_size), scale)
    trace = make_trace(settings)
    engines: dict[str, Engine] = {
        "static": StaticBatches.of(model).run,
        "continuous": ContinuousBatches(model, _CPU_LIMITS if model.device.type == "cpu" else None).run,
    }
    report: dict[str, Any] = {
        "trace": describe(settings, trace),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": str(model.config._attn_implementation),
    }
    for name, run in engines.items():
        report[name] = _measure_engine(name, run, trace, scale.num_clients)
        keep(report)
    return report


def _measure_engine(name: str, run: Engine, trace: Sequence[TraceRequest], num_clients: int) -> dict[str, Any]:
    warm_up = [
        replace(request, max_tokens=min(request.max_tokens, _WARM_UP_TOKENS))
        for request in trace[:_NUM_WARM_UP_REQUESTS]
    ]
    try:
        run(warm_up, len(warm_up))
        return asdict(summarize(name, run(trace, num_clients)))
    except Exception as error:  # noqa: BLE001  # whatever it is, the other engine is measured
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def random_model(shape: str, device: torch.device) -> Any:
    """A transformers model of the shape, initialised on the device in the dtype of its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as directory:
        config = AutoConfig.from_pretrained(write_model(shape, Path(directory)))
    with device:
        model_class: Any = AutoModelForCausalLM
        model = model_class.from_config(config, dtype=getattr(torch, SHAPES[shape]["torch_dtype"]))
    return model.eval()


def main() -> None:
    given = phase_arguments(__doc__)
    model = random_model(given.shape, torch.device(given.device))
    measure(model, IN_SMALL if given.small else FULL, lambda report: save(given.json, report))


if __name__ == "__main__":
    main()
