"""The view of the demonstration: growing texts, and the block pool below them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.layout import Layout
from rich.panel import Panel
from rich.style import Style
from rich.table import Table
from rich.text import Text

from quire.block_map import BlockMap
from quire.cli.block_map_view import PoolGrid, RequestColours, block_tables, pool_line, queue_line
from quire.cli.demo_scenes import Scene
from quire.events import Finished

_NUM_COLUMNS = 3
_NUM_POOL_LINES = 15
_MAX_SHOWN = 1200


@dataclass(slots=True)
class Reading:
    """One sequence of a scene, and the text that it has so far."""

    scene: Scene
    index: int
    is_sent: bool = False
    text: str = ""
    num_tokens: int = 0
    finished: Finished | None = None
    error: str = ""

    @property
    def name(self) -> str:
        return f"{self.scene.name}[{self.index}]"

    @property
    def status(self) -> str:
        if self.error:
            return "failed"
        if self.finished is not None:
            return f"{self.num_tokens} tokens, {self.finished.reason}"
        if self.num_tokens:
            return f"{self.num_tokens} tokens"
        return "waiting" if self.is_sent else "to come"


@dataclass(slots=True)
class Readings:
    """The sequences of all scenes, in order."""

    all: list[Reading] = field(default_factory=list)

    @classmethod
    def of(cls, scenes: Sequence[Scene]) -> "Readings":
        return cls([Reading(scene, index) for scene in scenes for index in range(scene.num_sequences)])

    def by_scene(self, scene: Scene) -> list[Reading]:
        return [reading for reading in self.all if reading.scene is scene]

    @property
    def num_tokens(self) -> int:
        return sum(reading.num_tokens for reading in self.all)


class _Tail:
    """The last lines of a text that fit: the prompt dimmed, the generated text in colour."""

    def __init__(self, reading: Reading, style: Style, num_lines: int) -> None:
        self._reading, self._style, self._num_lines = reading, style, num_lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        reading = self._reading
        prompt = reading.scene.shown_prompt + (" " if reading.scene.is_chat else "")
        text = Text.assemble((prompt, "dim"), (reading.text.replace("\n", " "), self._style))
        if reading.error:
            text.append(reading.error, "red")
        yield from text.wrap(console, options.max_width)[-self._num_lines :]


def live_view(readings: Readings, block_map: BlockMap | None, colours: RequestColours, size: tuple[int, int]) -> Layout:
    """Returns a screen of `size` (columns, lines)."""
    texts, pool = Layout(name="texts"), Layout(name="pool", size=min(_NUM_POOL_LINES, size[1] // 2))
    num_rows = -(-len(readings.all) // _NUM_COLUMNS)
    height = max(3, (size[1] - min(_NUM_POOL_LINES, size[1] // 2)) // num_rows)
    grid = Table.grid(expand=True)
    for _ in range(_NUM_COLUMNS):
        grid.add_column(ratio=1)
    for first in range(0, len(readings.all), _NUM_COLUMNS):
        row = readings.all[first : first + _NUM_COLUMNS]
        grid.add_row(*(_panel(reading, colours.style(reading.scene.name), height) for reading in row))
    texts.update(grid)
    pool.update(_pool_panel(block_map, colours))
    layout = Layout()
    layout.split_column(texts, pool)
    return layout


def _panel(reading: Reading, style: Style, height: int) -> Panel:
    border = style if reading.finished is None else Style(color=style.color, dim=True)
    return Panel(
        _Tail(reading, style, height - 2),
        title=Text(f"{reading.name} · {reading.scene.about}", style),
        subtitle=Text(reading.status, "dim"),
        height=height,
        border_style=border,
        title_align="left",
        subtitle_align="right",
    )


def _pool_panel(block_map: BlockMap | None, colours: RequestColours) -> Panel:
    if block_map is None:
        return Panel("", title="block pool")
    body = Table.grid(expand=True)
    body.add_row(queue_line(block_map))
    body.add_row(pool_line(block_map))
    body.add_row(PoolGrid(block_map, colours, max_rows=3))
    body.add_row(block_tables(block_map, colours, max_rows=8))
    return Panel(body, title="block pool", title_align="left")


def print_frame(
    console: Console, elapsed_s: float, readings: Readings, block_map: BlockMap, colours: RequestColours
) -> None:
    """Prints a frame, for a terminal that cannot redraw."""
    console.rule(f"after {elapsed_s:.1f} s", characters="-")
    for reading in readings.all:
        tail = " ".join(reading.text.split())[-60:]
        console.print(Text(f"{reading.name:>15}  {reading.status:<18} … {tail}", overflow="crop"), no_wrap=True)
    console.print(queue_line(block_map))
    console.print(pool_line(block_map))
    console.print(PoolGrid(block_map, colours, max_rows=4))
    console.print(block_tables(block_map, colours, max_rows=12))


def print_texts(console: Console, readings: Readings, colours: RequestColours) -> None:
    """Prints each prompt and the text generated after it. Very long texts are cut."""
    for reading in readings.all:
        style = colours.style(reading.scene.name)
        heading = f"{reading.name} · {reading.scene.about} · {reading.status}"
        console.print(Text(f"\n{heading}", style + Style(bold=True)))
        prompt = reading.scene.shown_prompt + ("\n" if reading.scene.is_chat else "")
        text = reading.text if len(reading.text) < _MAX_SHOWN else reading.text[:_MAX_SHOWN] + " …"
        console.print(Text.assemble((prompt, "dim"), text, (reading.error, "red")))
