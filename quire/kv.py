"""`quire kv`: the block map in the terminal."""

import json
import time
from dataclasses import asdict

from rich.console import Console
from rich.live import Live

from quire.block_map_view import RequestColours, block_map_view
from quire.client import Client


def show(client: Client, console: Console) -> None:
    """The block map as it is now."""
    console.print(block_map_view(client.block_map(), RequestColours()))


def show_json(client: Client, console: Console) -> None:
    """All of it as one JSON object."""
    console.file.write(json.dumps(asdict(client.block_map())) + "\n")


def watch(client: Client, console: Console, interval_s: float) -> None:
    """Redraws it until interrupted; without a terminal to redraw on, prints one after the other."""
    colours = RequestColours()
    if not console.is_terminal:
        while True:
            console.print(block_map_view(client.block_map(), colours))
            time.sleep(interval_s)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(block_map_view(client.block_map(), colours), refresh=True)
            time.sleep(interval_s)
