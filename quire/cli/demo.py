"""`quire demo`: runs both services on free ports, streams several completions, and shows the block pool.

It ends by itself, with exit status 0 if all completions have arrived. On a terminal it redraws one screen; otherwise it
prints a few frames. At the end it prints the texts and a summary.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from quire.async_client import AsyncClient
from quire.block_map import BlockMap
from quire.cli import exit_codes
from quire.cli.block_map_view import RequestColours
from quire.cli.demo_scenes import SCENES, Scene
from quire.cli.demo_view import Reading, Readings, live_view, print_frame, print_texts
from quire.cli.service_flags import DEMO_DEFAULTS
from quire.cli.services import ServicePair, service_pair
from quire.cli.supervisor import Supervisor
from quire.cli.watch import PROBE_TIMEOUT_S, health_probe
from quire.errors import QuireError
from quire.events import Delta, Finished, Started

_REDRAW_S = 0.1
_FRAMES_S = (0.2, 0.8, 1.6, 3.0, 6.0, 12.0)


@dataclass(slots=True)
class _Show:
    """The state of the demonstration."""

    readings: Readings
    colours: RequestColours = field(default_factory=RequestColours)
    block_maps: list[BlockMap] = field(default_factory=list)
    cached_tokens: int = 0
    started_s: float = field(default_factory=time.perf_counter)
    streamed_s: float = 0.0

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started_s


async def run(values: Mapping[str, Any], console: Console, scenes: tuple[Scene, ...] = SCENES) -> int:
    """Runs the demonstration; returns the exit code. Raises ChildFailed if a service cannot be started.

    values  fields of the services' configurations, the model among them
    """
    pair = service_pair(DEMO_DEFAULTS | dict(values))
    is_starting = True

    def log(name: str, line: str) -> None:
        if is_starting or name == "supervisor":
            console.print(Text(f"{name:>10} | {line}", "dim"), soft_wrap=True)

    async with (
        Supervisor(pair.children(), log=log) as supervisor,
        AsyncClient(pair.scheduler.listen, admin=pair.admin_address) as client,
        health_probe(pair.admin_address) as is_serving,
    ):
        await supervisor.until_ready(lambda: is_serving(PROBE_TIMEOUT_S))
        is_starting = False
        console.print(pair.ready_line(), highlight=False, soft_wrap=True)
        show = await supervisor.beside(perform(client, console, scenes))
        exits = await supervisor.stop()
    print_summary(console, show, pair)
    have_all_come = all(reading.finished is not None for reading in show.readings.all)
    have_ended_well = all(ended.ended_well for ended in exits)
    return exit_codes.OK if have_all_come and have_ended_well else exit_codes.FAILED


async def perform(client: AsyncClient, console: Console, scenes: tuple[Scene, ...]) -> _Show:
    """Sends the requests of all scenes, shows them while they run, and prints their texts."""
    show = _Show(Readings.of(scenes))
    streaming = asyncio.gather(*(_stream(client, scene, show) for scene in scenes))
    watching = asyncio.create_task(_watch(client, show))
    showing = asyncio.create_task(_redraw(console, show) if _can_redraw(console) else _print_frames(console, show))
    try:
        await streaming
        show.streamed_s = show.elapsed_s
    finally:
        for task in (streaming, watching, showing):
            task.cancel()
        await asyncio.wait({watching, showing})
    show.block_maps.append(await client.block_map())
    print_texts(console, show.readings, show.colours)
    return show


def print_summary(console: Console, show: _Show, pair: ServicePair) -> None:
    """Prints a few lines of numbers."""
    wastes = [waste for block_map in show.block_maps if (waste := block_map.waste).num_allocated_token_slots]
    allocated = sum(waste.num_allocated_token_slots for waste in wastes)
    wasted = allocated - sum(waste.num_used_token_slots for waste in wastes)
    last = show.block_maps[-1]
    num_tokens = show.readings.num_tokens
    console.print(
        Text(
            f"\n{num_tokens} tokens in {show.streamed_s:.1f} s: {num_tokens / show.streamed_s:.0f} tokens/s · "
            f"waste {wasted / allocated if allocated else 0:.1%} of the allocated token slots · "
            f"{show.cached_tokens} prompt tokens from the prefix cache · {last.num_cow_copies} CoW copies · "
            f"{last.num_preemptions} preemptions",
            "bold",
        )
    )
    console.print(f"model {pair.executor.model}; both services have ended", highlight=False, soft_wrap=True)


async def _stream(client: AsyncClient, scene: Scene, show: _Show) -> None:
    """Sends the request of one scene. Its error is shown in its place, and the other scenes continue."""
    readings = show.readings.by_scene(scene)
    await asyncio.sleep(scene.start_after_s)
    for reading in readings:
        reading.is_sent = True
    try:
        async with client.generate(scene.prompt, **scene.named_options) as events:
            async for event in events:
                match event:
                    case Started():
                        show.cached_tokens += event.cached_tokens
                    case Delta():
                        _read(readings[event.index], event)
                    case Finished():
                        readings[event.index].finished = event
    except QuireError as error:
        for reading in readings:
            reading.error = str(error)


def _read(reading: Reading, delta: Delta) -> None:
    reading.text += delta.text
    reading.num_tokens += len(delta.token_ids)


async def _watch(client: AsyncClient, show: _Show) -> None:
    while True:
        show.block_maps.append(await client.block_map())
        await asyncio.sleep(_REDRAW_S)


def _can_redraw(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


async def _redraw(console: Console, show: _Show) -> None:
    def screen() -> Any:
        size = (console.size.width, console.size.height)
        return live_view(show.readings, show.block_maps[-1] if show.block_maps else None, show.colours, size)

    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(screen(), refresh=True)
            await asyncio.sleep(_REDRAW_S)


async def _print_frames(console: Console, show: _Show) -> None:
    for frame_s in _FRAMES_S:
        await asyncio.sleep(frame_s - show.elapsed_s)
        if show.block_maps:
            print_frame(console, show.elapsed_s, show.readings, show.block_maps[-1], show.colours)
