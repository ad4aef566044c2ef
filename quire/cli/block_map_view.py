"""The block map for a terminal: the pool as a grid of coloured cells, block tables, and the queue."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from quire.block_map import Block, BlockMap, BlockState, RunningSequence

_COLOURS = (
    "bright_green", "bright_blue", "bright_magenta", "bright_yellow", "bright_cyan", "bright_red",
    "green", "blue", "magenta", "yellow", "cyan", "red",
)  # fmt: skip
_SHARED_BY_REQUESTS = Style(color="bright_white", bold=True)
_CACHED = Style(color="grey58")
_FREE = Style(color="grey30")

# free, cached, active, shared (more than one block table names it)
_GLYPHS = ("·", "▫", "■", "▣")
_ASCII_GLYPHS = (".", "o", "#", "%")


class RequestColours:
    """Assigns colours to requests in order of appearance. A request keeps its colour over all frames."""

    def __init__(self) -> None:
        self._styles: dict[str, Style] = {}

    def style(self, request_id: str) -> Style:
        if request_id not in self._styles:
            self._styles[request_id] = Style(color=_COLOURS[len(self._styles) % len(_COLOURS)])
        return self._styles[request_id]


class PoolGrid:
    """The physical pool: one cell for each block, in order of block ids, without the null block.

    If the pool has more blocks than `max_rows` lines have cells, each cell represents several consecutive blocks and
    shows the busiest of them.
    """

    def __init__(self, block_map: BlockMap, colours: RequestColours, max_rows: int = 16) -> None:
        self._blocks = block_map.blocks[1:]
        self._owners = _owners(block_map.sequences)
        self._colours = colours
        self._max_rows = max_rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(1, options.max_width)
        glyphs = _ASCII_GLYPHS if options.ascii_only else _GLYPHS
        group = max(1, -(-len(self._blocks) // (width * self._max_rows)))
        cells = [self._cell(first, group, glyphs) for first in range(0, len(self._blocks), group)]
        for first in range(0, len(cells), width):
            yield from Segment.simplify(cells[first : first + width])
            yield Segment.line()
        yield _legend(glyphs, group)

    def _cell(self, first: int, group: int, glyphs: Sequence[str]) -> Segment:
        busiest = max(range(first, min(first + group, len(self._blocks))), key=self._busyness)
        return self._block_cell(busiest, self._blocks[busiest], glyphs)

    def _busyness(self, position: int) -> tuple[bool, bool, int]:
        block = self._blocks[position]
        return block.state is BlockState.ACTIVE, block.state is BlockState.CACHED, block.ref_count

    def _block_cell(self, position: int, block: Block, glyphs: Sequence[str]) -> Segment:
        if block.state is BlockState.FREE:
            return Segment(glyphs[0], _FREE)
        if block.state is BlockState.CACHED:
            return Segment(glyphs[1], _CACHED)
        glyph = glyphs[3] if block.ref_count > 1 else glyphs[2]
        owners = self._owners.get(position + 1, ())
        if len(owners) == 1:
            return Segment(glyph, self._colours.style(next(iter(owners))))
        return Segment(glyph, _SHARED_BY_REQUESTS)  # several requests, or one that is about to end


def _owners(sequences: Iterable[RunningSequence]) -> dict[int, set[str]]:
    """Maps each block id to the requests whose block tables name it."""
    owners: dict[int, set[str]] = {}
    for sequence in sequences:
        for block_id in sequence.block_table:
            owners.setdefault(block_id, set()).add(sequence.request_id)
    return owners


def _legend(glyphs: Sequence[str], group: int) -> Text:
    free, cached, active, shared = glyphs
    scale = f"; a cell is {group} blocks" if group > 1 else ""
    text = f"{free} free {cached} cached {active} active, by request {shared} shared, white by several requests{scale}"
    return Text(text, style="dim")


def block_tables(block_map: BlockMap, colours: RequestColours, max_rows: int = 16) -> Table:
    """Returns the running sequences by slot, with their block tables; `*3` marks a block that three tables name."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("slot", "prompt", "tokens", "computed", "prefill"):
        table.add_column(heading, justify="right", no_wrap=True, min_width=len(heading))
    table.add_column("request", no_wrap=True, min_width=12, max_width=20)
    table.add_column("block table")
    for sequence in block_map.sequences[:max_rows]:
        table.add_row(
            str(sequence.slot),
            str(sequence.num_prompt_tokens),
            str(sequence.num_tokens),
            str(sequence.num_computed_tokens),
            "" if (share := sequence.prefill_share) is None else f"{share:.0%}",
            Text(f"{sequence.request_id}[{sequence.index}]"),
            _OneLine(_block_table(sequence.block_table, block_map.blocks)),
            style=colours.style(sequence.request_id),
        )
    hidden = len(block_map.sequences) - max_rows
    if hidden > 0:
        table.add_row("", "", "", "", "", f"and {hidden} more", "")
    return table


class _OneLine:
    """A text that is truncated if space is short, so that the other columns keep their width."""

    def __init__(self, text: str) -> None:
        self._text = Text(text, no_wrap=True, overflow="ellipsis")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, self._text.cell_len).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._text


def _block_table(block_ids: Sequence[int], blocks: Sequence[Block]) -> str:
    """Formats a block table as `12 13*2 14`, with three or more consecutive ids as `20-24` or `20-24*4`."""
    marks = [
        f"*{blocks[id_].ref_count}" if id_ < len(blocks) and blocks[id_].ref_count > 1 else "" for id_ in block_ids
    ]
    # A run ends where the next id is not consecutive, or has a different mark.
    ends = [
        position + 1
        for position, (one, other) in enumerate(pairwise(zip(block_ids, marks, strict=True)))
        if other != (one[0] + 1, one[1])
    ]
    parts: list[str] = []
    for start, end in pairwise([0, *ends, len(block_ids)]):
        if end - start > 2:
            parts.append(f"{block_ids[start]}-{block_ids[end - 1]}{marks[start]}")
        else:
            parts.extend(f"{block_ids[position]}{marks[start]}" for position in range(start, end))
    return " ".join(parts)


def pool_line(block_map: BlockMap) -> Text:
    """Returns the numbers of blocks, the blocks saved by sharing, and the share of token slots without a token."""
    summary, sharing = block_map.summary, block_map.sharing
    return Text.assemble(
        (f"{summary.num_active_blocks} active", "bold"),
        f" ({summary.num_shared_blocks} shared) · ",
        f"{summary.num_cached_blocks} cached · {summary.num_free_blocks} free · ",
        f"sharing saves {sharing.num_table_entries - sharing.num_blocks} of {sharing.num_table_entries} blocks, "
        f"{sharing.saved_ratio:.1%} · waste {block_map.waste.ratio:.1%}",
    )


def queue_line(block_map: BlockMap) -> Text:
    """Returns the numbers of running and waiting sequences, and the counters of the scheduler."""
    return Text.assemble(
        (f"{len(block_map.sequences)} running", "bold"),
        f" · {block_map.num_waiting} waiting ({block_map.num_waiting_prompt_tokens} prompt tokens) · ",
        f"step {block_map.step_id} · {block_map.num_preemptions} preemptions · ",
        f"{block_map.num_cow_copies} CoW copies",
    )


def block_map_view(block_map: BlockMap, colours: RequestColours, max_rows: int = 16) -> Group:
    """Returns the whole view: queue, pool, grid and block tables."""
    return Group(
        queue_line(block_map),
        pool_line(block_map),
        PoolGrid(block_map, colours, max_rows),
        block_tables(block_map, colours, max_rows),
    )
