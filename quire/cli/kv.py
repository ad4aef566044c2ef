"""`quire kv`: the block map in the terminal."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import NoReturn

from rich.console import Console, Group
from rich.live import Live

from quire.cli.block_map_view import RequestColours, block_map_view
from quire.client import Client

MAX_SHARE = 0.02
"""Maximum share of time that answers may take. The server makes them between steps, and a large pool takes a while."""
MAX_PAUSE_S = 2.0
"""Maximum time between two answers, for a server that is slow for other reasons."""


def show(client: Client, console: Console) -> None:
    """Prints the current block map."""
    console.print(block_map_view(client.block_map(), RequestColours()))


def show_json(client: Client, console: Console) -> None:
    """Prints the current block map as one JSON object."""
    console.file.write(json.dumps(asdict(client.block_map())) + "\n")


def watch(client: Client, console: Console, interval_s: float) -> None:
    """Redraws the block map until interrupted. Without a terminal, prints one after the other."""
    if not console.is_terminal:
        _draw_repeatedly(client, console.print, interval_s)
    with Live(console=console, auto_refresh=False) as live:
        _draw_repeatedly(client, lambda view: live.update(view, refresh=True), interval_s)


def _draw_repeatedly(client: Client, draw: Callable[[Group], None], interval_s: float) -> NoReturn:
    colours = RequestColours()
    while True:
        asked_s = time.monotonic()
        block_map = client.block_map()
        pause_s = (time.monotonic() - asked_s) / MAX_SHARE
        draw(block_map_view(block_map, colours))
        time.sleep(max(interval_s, min(pause_s, MAX_PAUSE_S)))
