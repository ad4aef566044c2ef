"""Services for the time of a measurement."""

import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rich.console import Console

from quire.async_client import AsyncClient
from quire.restarts import RestartPolicy
from quire.serve import serving_probe
from quire.services import ServicePair
from quire.supervisor import Supervisor

# A measurement through which a service died is void.
_NO_RESTARTS = RestartPolicy(max_restarts=0)

T = TypeVar("T")


async def beside_services(pair: ServicePair, measure: Callable[[], Coroutine[Any, Any, T]], console: Console) -> T:
    """Starts both, measures when they serve, and ends them. Raises ChildFailed where one of them fails."""
    # What they print is of interest only when they fail, and the failure brings their last words.
    async with Supervisor(pair.children(), log=lambda name, line: None, policy=_NO_RESTARTS) as supervisor:
        with console.status("starting the services"):
            started_s = time.monotonic()
            async with AsyncClient(pair.scheduler.listen) as client:
                await supervisor.until_ready(serving_probe(client))
        console.print(f"ready after {time.monotonic() - started_s:.1f} s")
        return await supervisor.beside(measure())
