"""Properties of block maps, and waiting for a block map with a property."""

import asyncio
from collections.abc import Callable, Iterable

from quire import AsyncClient, BlockMap, BlockState, RunningSequence
from tests.support.e2e.waiting import until


def is_idle(found: BlockMap) -> bool:
    """Returns true if no request runs or waits and no block is active."""
    return not found.sequences and not found.num_waiting and not found.num_blocks(BlockState.ACTIVE)


def blocks_of(sequences: Iterable[RunningSequence]) -> set[int]:
    """Returns the blocks in the tables of these sequences."""
    return {block for sequence in sequences for block in sequence.block_table}


def orphans(found: BlockMap) -> set[int]:
    """Returns the active blocks that are in no running sequence's block table."""
    active = {number for number, block in enumerate(found.blocks) if block.state is BlockState.ACTIVE}
    return active - blocks_of(found.sequences) - {0}


async def until_map(client: AsyncClient, condition: Callable[[BlockMap], bool]) -> BlockMap:
    """Returns the first block map for which the condition holds."""
    found: list[BlockMap] = []

    async def holds() -> bool:
        found[:] = [await client.block_map()]
        return condition(found[0])

    await until(holds, getattr(condition, "__name__", ""))
    return found[0]


async def settled_map(client: AsyncClient) -> BlockMap:
    """Returns the block map after the results have arrived that the executor sent before it was frozen."""
    found, num_equal = await client.block_map(), 0
    while num_equal < 5:
        await asyncio.sleep(0.01)
        last, found = found, await client.block_map()
        num_equal = num_equal + 1 if found == last else 0
    return found
