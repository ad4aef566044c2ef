"""`quire bench serve` as a function: checks what was asked for, starts a server if it should, measures, saves."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.load import LoadError
from bench.report import save
from bench.serve import BenchSettings, measure
from quire.async_client import AsyncClient
from quire.restarts import RestartPolicy
from quire.serve import serving_probe
from quire.services import ServicePair, on_free_ports, service_pair
from quire.supervisor import Supervisor

# A measurement through which a service died is void.
_NO_RESTARTS = RestartPolicy(max_restarts=0)


class BenchError(Exception):
    """A measurement that cannot be made, or that failed."""


def parse_concurrencies(text: str) -> tuple[int, ...]:
    """`1,4,16` → (1, 4, 16). Raises BenchError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise BenchError(f"concurrency: expected numbers above 0, with commas between them, not {text!r}")
    return tuple(dict.fromkeys(int(part) for part in parts))


async def run(settings: BenchSettings, spawn: Mapping[str, Any] | None, output: Path, console: Console) -> None:
    """Measures and writes `output`.

    spawn  values for a pair of services to start on free ports; None: a server runs at settings.address
    Raises BenchError, QuireError, and ChildFailed where a service that was started fails.
    """
    try:
        if spawn is None:
            values = await measure(settings, console)
        else:
            values = await _measure_spawned(settings, service_pair(on_free_ports(spawn)), console)
        save(output, values)
    except (LoadError, OSError) as error:
        raise BenchError(str(error)) from error
    console.print(f"saved to {output}")


async def _measure_spawned(settings: BenchSettings, pair: ServicePair, console: Console) -> dict[str, Any]:
    # What they print is of interest only when they fail, and the failure brings their last words.
    async with Supervisor(pair.children(), log=lambda name, line: None, policy=_NO_RESTARTS) as supervisor:
        with console.status("starting the services"):
            async with AsyncClient(pair.scheduler.listen) as client:
                await supervisor.until_ready(serving_probe(client))
        return await supervisor.beside(measure(replace(settings, address=pair.scheduler.listen), console))
