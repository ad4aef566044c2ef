"""`quire bench serve` as a function: checks what was asked for, starts a server if it should, measures, saves."""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from bench.load import LoadError
from bench.report import RunSummary, save
from bench.serve import BenchSettings, Subject, finish, measure_others, measure_quire
from bench.spawned import measured

if TYPE_CHECKING:
    from bench.ceilings import Ceilings

_CEILING_BUDGET_S = 1.0


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

    spawn  values for a pair of services to start on free ports, and to end before others have their turn; None: a
           server runs at settings.address
    Raises BenchError, QuireError, and ChildFailed where a service that was started fails.
    """
    try:
        measure = measure_quire if spawn is None else _measure_after_a_rest
        subject, runs = await measured(settings, spawn, measure, console)
        runs += await measure_others(settings, subject, console)
        values = finish(subject, runs, console)
        if spawn is not None:
            with console.status("measuring what this machine can do at best"):
                values["ceilings"] = asdict(_ceilings())
        save(output, values)
    except (LoadError, OSError) as error:
        raise BenchError(str(error)) from error
    console.print(f"saved to {output}")


def _ceilings() -> "Ceilings":
    """Of the device that the services, which ran here, have used; nothing else runs any more."""
    import torch

    from bench.ceilings import measure_ceilings

    return measure_ceilings(
        torch.device("cuda" if torch.cuda.is_available() else "cpu"), (torch.float32,), _CEILING_BUDGET_S
    )


async def _measure_after_a_rest(settings: BenchSettings, console: Console) -> tuple[Subject, list[RunSummary]]:
    """Of a server that has just been started."""
    await asyncio.sleep(settings.rest_s)
    return await measure_quire(settings, console)
