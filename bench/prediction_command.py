"""`quire bench prediction` as a function: measures, predicts, prints, saves."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.command import BenchError
from bench.load import LoadError
from bench.prediction import Prediction, PredictionSettings, measure_and_predict, render_table
from bench.report import save
from bench.spawned import measured
from planning.errors import PlanningError


async def run(
    settings: PredictionSettings, spawn: Mapping[str, Any] | None, output: Path | None, console: Console
) -> Prediction:
    """Measures and predicts, and writes `output` where it is given.

    spawn  values for a pair of services to start on free ports; None: a server runs at settings.address
    Raises BenchError, QuireError, and ChildFailed where a service that was started fails.
    """
    try:
        prediction = await measured(settings, spawn, measure_and_predict, console)
        console.print(render_table(prediction))
        if output is not None:
            save(output, asdict(prediction))
            console.print(f"saved to {output}")
    except (LoadError, PlanningError, OSError) as error:
        raise BenchError(str(error)) from error
    return prediction
