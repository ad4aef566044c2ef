"""The table of all measurements: names on the command line, modules and descriptions.

A module is loaded only when its measurement is run, and has `main(arguments)`, which returns an exit status or None.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

from bench.command_line import BenchError


@dataclass(frozen=True, slots=True)
class Command:
    """A measurement. `preset` is put before the flags that the user gives, which override it."""

    module: str
    description: str
    preset: tuple[str, ...] = ()


COMMANDS: dict[str, Command] = {
    "serve": Command(
        "bench.serving.serve", "Closed-loop load on a server, compared with other engines on the same trace."
    ),
    "paired": Command(
        "bench.serving.serve",
        "The same as `serve --spawn` in three rounds of turns; ratios are medians of the rounds.",
        ("--spawn", "--rounds", "3", "--concurrency", "1,4,8,16,32,64", "--name", "paired"),
    ),
    "prediction": Command("bench.serving.prediction", "Simulated throughput compared with measured throughput."),
    "serving-ceiling": Command("bench.serving.ceiling", "The throughput that a machine cannot exceed, computed."),
    "sharing": Command("bench.sharing.command", "Blocks saved by sharing: samples, beams and a system prompt."),
    "claims": Command("bench.claims.command", "Claims about paged KV memory and continuous batching, with verdicts."),
    "kernels": Command("bench.kernels.command", "Time and rate of every kernel, against the machine's ceilings."),
    "scheduler-cost": Command("bench.overhead.scheduler_cost", "Cost of one step in the scheduler core."),
    "shell-cost": Command("bench.overhead.shell_cost", "Cost of a streamed token in the scheduler process."),
    "gateway-cost": Command("bench.overhead.gateway_cost", "Cost of OpenAI's API, beside that of streams over gRPC."),
    "router-cost": Command(
        "bench.overhead.router_cost", "Cost of a request through a gateway that chooses among schedulers."
    ),
    "routing": Command(
        "bench.serving.routing", "Cached prompt tokens and first tokens of several replicas, by routing policy."
    ),
    "structured-cost": Command(
        "bench.overhead.structured_cost", "Throughput when every request follows a grammar, beside that without."
    ),
    "sampling-cost": Command("bench.overhead.sampling_cost", "Cost of sampling in a batch of 64 sequences."),
    "schemas": Command("bench.schemas.command", "JSON schemas as grammars: what compiles, and what is accepted."),
    "observability-cost": Command("bench.overhead.observability_cost", "Cost of metrics, logs and the live page."),
    "attacks": Command("bench.attacks.command", "Attacks on the services, beside a victim with ordinary requests."),
    "shares": Command("bench.attacks.shares", "Tokens of tenants of which one sends far more than the others."),
    "overload": Command("bench.attacks.overload", "Goodput under three times the load that the server can serve."),
    "attacker": Command("bench.attacks.attacker", "One attack of `attacks`, as a process of its own."),
    "loop-gaps": Command(
        "bench.attacks.loop_gaps", "The longest time for which one request holds the scheduler's event loop."
    ),
    "recovery": Command("bench.overhead.recovery", "Time to detect a lost process and to serve again."),
    "survival": Command("bench.overhead.survival", "Answers of streams while services are killed and stopped."),
    "gpu-check": Command("bench.gpu.check", "Tests, kernels and serving on the local GPU, in one report."),
    "gpu-bundle": Command("bench.gpu.bundle", "Wheels and stubs for gpu-check on a machine without a package index."),
    "gpu-environment": Command("bench.gpu.environment", "Phase of gpu-check: packages, stubs, the GPU and its tools."),
    "gpu-correctness": Command("bench.gpu.correctness", "Phase of gpu-check: the tests of what runs on a device."),
    "gpu-serving": Command("bench.gpu.end_to_end", "Phase of gpu-check: both services on random weights."),
    "gpu-transformers": Command("bench.gpu.transformers", "Phase of gpu-check: transformers on the same load."),
}


def run(name: str, arguments: Sequence[str]) -> int:
    """Runs the measurement `name` and returns its exit status.

    Raises BenchError, QuireError, ModelNotFound or OSError if the measurement fails, SystemExit for wrong flags.
    """
    command = COMMANDS[name]
    try:
        module = importlib.import_module(command.module)
    except ModuleNotFoundError as error:
        if error.name in ("quire.v1", "quire.executor"):
            raise BenchError(f"{error}; `make protos` generates the stubs, and a bundle has them") from error
        raise BenchError(f"{error}; pip install 'quire[executor,bench,dev]' installs what is measured") from error
    status: int | None = module.main([*command.preset, *arguments])
    return status or 0


def listing() -> str:
    """Returns one line for each measurement."""
    width = max(map(len, COMMANDS))
    return "\n".join(f"  {name:{width}}  {command.description}" for name, command in COMMANDS.items())
