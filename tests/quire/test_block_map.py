"""The numbers of a block map, and its view in a terminal."""

import io
from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console

from quire.block_map import Block, BlockMap, BlockState, PoolSummary, RunningSequence
from quire.cli.block_map_view import PoolGrid, RequestColours, block_map_view

FREE, CACHED = Block(BlockState.FREE, 0, 0), Block(BlockState.CACHED, 0, 1)
ACTIVE, SHARED = Block(BlockState.ACTIVE, 1, 0), Block(BlockState.ACTIVE, 2, 0)


def sequence(request_id: str, slot: int, num_tokens: int, *block_table: int) -> RunningSequence:
    return RunningSequence(request_id, 0, slot, num_tokens, num_tokens - 1, 3, block_table)


def block_map(blocks: list[Block], *sequences: RunningSequence, block_size: int = 4) -> BlockMap:
    """Returns a block map whose summary has two wasted token slots, which the block tables do not show."""
    counts = Counter(block.state for block in blocks)
    num_shared = sum(block.ref_count > 1 for block in blocks)
    num_slots = counts[BlockState.ACTIVE] * block_size
    summary = PoolSummary(
        num_free_blocks=counts[BlockState.FREE],
        num_cached_blocks=counts[BlockState.CACHED],
        num_active_blocks=counts[BlockState.ACTIVE],
        num_shared_blocks=num_shared,
        num_used_token_slots=max(0, num_slots - 2),
        num_wasted_token_slots=min(2, num_slots),
        num_running=len(sequences),
        num_waiting=2,
        num_preemptions=1,
        num_cow_copies=5,
    )
    return BlockMap(block_size, (FREE, *blocks), sequences, 2, 30, 9, 1, 5, summary)


def drawn(renderable: object, width: int = 80, colour: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=colour, color_system="standard" if colour else None)
    console.print(renderable)
    return out.getvalue()


@pytest.mark.parametrize(
    ("sequences", "num_entries", "num_blocks"),
    [
        ([], 0, 0),
        ([sequence("a", 0, 8, 1, 2)], 2, 2),
        ([sequence("a", 0, 7, 1, 2), sequence("b", 1, 6, 1, 3)], 4, 3),
        ([sequence("a", 0, 7, 1, 2), sequence("a", 1, 6, 1, 2), sequence("a", 2, 6, 1, 2)], 6, 2),
        # The null block belongs to no sequence.
        ([sequence("a", 0, 5, 1, 0)], 1, 1),
    ],
)
def test_sharing(sequences: list[RunningSequence], num_entries: int, num_blocks: int) -> None:
    sharing = block_map([ACTIVE] * 3, *sequences).sharing
    assert (sharing.num_table_entries, sharing.num_blocks) == (num_entries, num_blocks)
    assert sharing.saved_ratio == pytest.approx(1 - num_blocks / num_entries if num_entries else 0.0)


def test_waste_is_the_count_of_the_server() -> None:
    pool = block_map([ACTIVE, SHARED], sequence("a", 0, 5, 1, 2))
    assert (pool.waste.num_allocated_token_slots, pool.waste.num_used_token_slots, pool.waste.ratio) == (8, 6, 0.25)
    assert replace(pool.summary, num_used_token_slots=0, num_wasted_token_slots=0).waste.ratio == 0.0


def test_counts_exclude_the_null_block() -> None:
    pool = block_map([FREE, CACHED, ACTIVE, SHARED, SHARED])
    assert [pool.num_blocks(state) for state in (BlockState.FREE, BlockState.CACHED, BlockState.ACTIVE)] == [
        1,
        1,
        3,
    ]
    assert pool.num_shared_blocks == 2


def test_the_grid_has_a_cell_for_each_block_in_order() -> None:
    pool = block_map([FREE, CACHED, ACTIVE, SHARED, FREE, ACTIVE], sequence("a", 0, 12, 3, 4, 6))
    rows = drawn(PoolGrid(pool, RequestColours()), width=4).splitlines()
    assert rows[:2] == ["·▫■▣", "·■"]


def test_a_large_pool_shows_the_busiest_block_of_each_group() -> None:
    blocks = [FREE] * 40
    blocks[5], blocks[6], blocks[12], blocks[39] = CACHED, ACTIVE, CACHED, SHARED
    pool = block_map(blocks, sequence("a", 0, 8, 7, 40))
    grid = drawn(PoolGrid(pool, RequestColours(), max_rows=1), width=10)
    assert grid.splitlines()[0] == "·■·▫·····▣"
    assert "4 blocks" in grid.replace("\n", " ")


def test_each_request_keeps_its_own_colour() -> None:
    colours = RequestColours()
    first, second = colours.style("a"), colours.style("b")
    assert first != second
    assert colours.style("a") == first
    pool = block_map([ACTIVE, ACTIVE, SHARED], sequence("a", 0, 8, 1, 3), sequence("b", 1, 8, 2, 3))
    grid = drawn(PoolGrid(pool, colours), colour=True).splitlines()[0]
    cells = [part.split("m") for part in grid.split("\x1b[") if "■" in part or "▣" in part]
    assert [glyph for _, glyph in cells] == ["■", "■", "▣"]
    assert len({code for code, _ in cells}) == 3  # a's, b's, and the one of blocks that several requests share


def test_block_tables_mark_shared_blocks_and_shorten_runs() -> None:
    pool = block_map(
        [SHARED, SHARED, ACTIVE, ACTIVE, ACTIVE, ACTIVE, ACTIVE],
        sequence("left", 0, 20, 1, 2, 3, 4, 5),
        sequence("right", 1, 12, 1, 2, 7),
    )
    lines = drawn(block_map_view(pool, RequestColours()), width=120).splitlines()
    left, right = (next(line for line in lines if f"{name}[0]" in line) for name in ("left", "right"))
    assert left.split("left[0]")[1].split() == ["1*2", "2*2", "3-5"]
    assert right.split("right[0]")[1].split() == ["1*2", "2*2", "7"]
    assert "2 waiting (30 prompt tokens)" in lines[0]
    assert "5 CoW copies" in lines[0]
    assert "7 active (2 shared)" in lines[1]
    assert "sharing saves 2 of 8 blocks, 25.0%" in lines[1]
    assert "waste 7.1%" in lines[1]


def test_the_progress_of_a_prefill_is_shown_until_only_the_newest_token_is_missing() -> None:
    long = RunningSequence("long", 0, 0, 100_000, 41_472, 100_000, (1,))
    decoding = RunningSequence("short", 0, 1, 12, 11, 3, (2,))
    recomputed = RunningSequence("again", 0, 2, 200, 150, 100, (3,))
    lines = drawn(block_map_view(block_map([ACTIVE] * 3, long, decoding, recomputed), RequestColours())).splitlines()
    shares = [next(line for line in lines if f"{name}[0]" in line).split() for name in ("long", "short", "again")]
    assert shares[0][:6] == ["0", "100000", "100000", "41472", "41%", "long[0]"]
    assert shares[1][:5] == ["1", "3", "12", "11", "short[0]"]
    assert shares[2][:6] == ["2", "100", "200", "150", "75%", "again[0]"], "a preempted sequence has output to compute"


def test_more_sequences_than_rows_are_counted() -> None:
    sequences = [sequence(f"r{slot}", slot, 4, 1) for slot in range(5)]
    text = drawn(block_map_view(block_map([ACTIVE], *sequences), RequestColours(), max_rows=3))
    assert "r2[0]" in text
    assert "r3[0]" not in text
    assert "and 2 more" in text


def test_request_ids_are_not_markup() -> None:
    text = drawn(block_map_view(block_map([ACTIVE], sequence("[red]x", 0, 4, 1)), RequestColours()))
    assert "[red]x[0]" in text


def test_an_ascii_terminal_gets_ascii_cells() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    pool = block_map([FREE, CACHED, ACTIVE, SHARED], sequence("a", 0, 8, 3, 4))
    Console(file=out, width=20).print(PoolGrid(pool, RequestColours()))
    out.seek(0)
    assert out.read().splitlines()[0] == ".o#%"
