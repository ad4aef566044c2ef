"""`quire bench sharing` as a function: measures, prints, saves and draws."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.command import BenchError
from bench.load import LoadError
from bench.report import save
from bench.sharing import SharingSettings, measure
from bench.sharing_report import PlotUnavailable, render_table, report, save_plot
from bench.spawned import beside_services
from quire.services import on_free_ports, service_pair


async def run(settings: SharingSettings, spawn: Mapping[str, Any] | None, output: Path, console: Console) -> None:
    """Measures and writes `output`, and the plot beside it.

    spawn  values for a pair of services to start on free ports; None: a server runs at settings.address
    Raises BenchError, QuireError, and ChildFailed where a service that was started fails.
    """
    try:
        if spawn is None:
            info, results = await measure(settings, console)
        else:
            pair = service_pair(on_free_ports(spawn))
            placed = replace(settings, address=pair.scheduler.listen)
            info, results = await beside_services(pair, lambda: measure(placed, console), console)
        console.print(render_table(results))
        save(output, report(results, asdict(info)))
        console.print(f"saved to {output}")
        for path in save_plot(results, output):
            console.print(f"drawn to {path}")
    except PlotUnavailable as error:
        console.print(str(error), markup=False)
    except (LoadError, OSError) as error:
        raise BenchError(str(error)) from error
