"""`quire bench prediction` as a function: measures, predicts, prints, saves."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.command import BenchError
from bench.load import LoadError
from bench.prediction import Prediction, PredictionSettings, measure_and_predict, render_table
from bench.report import save
from bench.spawned import beside_services
from planning.errors import PlanningError
from quire.services import on_free_ports, service_pair


async def run(
    settings: PredictionSettings, spawn: Mapping[str, Any] | None, output: Path | None, console: Console
) -> Prediction:
    """Measures and predicts, and writes `output` where it is given.

    spawn  values for a pair of services to start on free ports; None: a server runs at settings.address
    Raises BenchError, QuireError, and ChildFailed where a service that was started fails.
    """
    try:
        if spawn is None:
            prediction = await measure_and_predict(settings, console)
        else:
            pair = service_pair(on_free_ports(spawn))
            placed = replace(settings, address=pair.scheduler.listen)
            prediction = await beside_services(pair, lambda: measure_and_predict(placed, console), console)
        console.print(render_table(prediction))
        if output is not None:
            save(output, asdict(prediction))
            console.print(f"saved to {output}")
    except (LoadError, PlanningError, OSError) as error:
        raise BenchError(str(error)) from error
    return prediction
