"""`quire bench sharing` as a function: measures, prints, saves and draws."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.command import BenchError
from bench.load import LoadError
from bench.report import save
from bench.sharing import SharingSettings, measure
from bench.sharing_report import PlotUnavailable, render_table, report, save_plot
from bench.spawned import measured


async def run(settings: SharingSettings, spawn: Mapping[str, Any] | None, output: Path, console: Console) -> None:
    """Measures and writes `output`, and the plot beside it.

    spawn  values for a pair of services to start on free ports; None: a server runs at settings.address
    Raises BenchError, QuireError, and ChildFailed where a service that was started fails.
    """
    try:
        info, results = await measured(settings, spawn, measure, console)
        console.print(render_table(results))
        save(output, report(results, asdict(info)))
        console.print(f"saved to {output}")
        for path in save_plot(results, output):
            console.print(f"drawn to {path}")
    except PlotUnavailable as error:
        console.print(str(error), markup=False)
    except (LoadError, OSError) as error:
        raise BenchError(str(error)) from error
