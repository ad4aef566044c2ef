"""Services for the time of a measurement."""

import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import Field, replace
from typing import Any, ClassVar, Protocol, TypeVar

from rich.console import Console

from quire.async_client import AsyncClient
from quire.cli.child import LogSink
from quire.cli.restarts import RestartPolicy
from quire.cli.serve import serving_probe
from quire.cli.services import ServicePair, on_free_ports, service_pair
from quire.cli.supervisor import Supervisor

# A measurement through which a service died is void.
_NO_RESTARTS = RestartPolicy(max_restarts=0)


class Settings(Protocol):
    """Of a measurement: a frozen dataclass with the address of the server that is measured."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def address(self) -> str: ...


T = TypeVar("T")
S = TypeVar("S", bound=Settings)


async def measured(
    settings: S,
    spawn: Mapping[str, Any] | None,
    measure: Callable[[S, Console], Coroutine[Any, Any, T]],
    console: Console,
) -> T:
    """Measures the server at settings.address, or one that is started for it on free ports, with the values `spawn`.

    Raises ChildFailed where a service that was started fails, and what the measurement does.
    """
    if spawn is None:
        return await measure(settings, console)
    pair = service_pair(on_free_ports(spawn))
    placed = replace(settings, address=pair.scheduler.listen)
    return await beside_services(pair, lambda: measure(placed, console), console)


def _nowhere(name: str, line: str) -> None:
    """What services print is of interest only when they fail, and the failure brings their last words."""


async def beside_services(
    pair: ServicePair, measure: Callable[[], Coroutine[Any, Any, T]], console: Console, log: LogSink = _nowhere
) -> T:
    """Starts both, measures when they serve, and ends them. Raises ChildFailed where one of them fails."""
    async with Supervisor(pair.children(), log=log, policy=_NO_RESTARTS) as supervisor:
        with console.status("starting the services"):
            started_s = time.monotonic()
            async with AsyncClient(pair.scheduler.listen) as client:
                await supervisor.until_ready(serving_probe(client))
        console.print(f"ready after {time.monotonic() - started_s:.1f} s")
        return await supervisor.beside(measure())
