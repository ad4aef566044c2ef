"""Blocks are shared where possible, copied where necessary, and never shared across cache salts."""

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from quire import AsyncClient, BlockMap, BlockState
from tests.support.e2e.stack import Stack
from tests.support.e2e.streams import Job, differences, outcomes
from tests.support.e2e.waiting import until

BLOCK_SIZE = 16
ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_tokens": 400}


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncClient]:
    """Yields a client of an idle server with an empty cache."""
    losses = stack.losses
    async with stack.client() as client:

        async def is_idle() -> bool:
            return not (await client.block_map()).num_blocks(BlockState.ACTIVE)

        await until(is_idle)
        await client.reset_prefix_cache()
        yield client
        await until(is_idle)
    assert stack.losses == losses


def prompt(num_tokens: int, first: int = 5) -> list[int]:
    return [first + number * 3 % 1000 for number in range(num_tokens)]


async def running_map(client: AsyncClient, num_sequences: int) -> BlockMap:
    """Waits for a block map with this many sequences, each of which has written to its own blocks."""
    found: list[BlockMap] = []

    async def is_running() -> bool:
        found[:] = [await client.block_map()]
        sequences = found[0].sequences
        return len(sequences) == num_sequences and all(s.num_tokens > s.num_prompt_tokens + 3 for s in sequences)

    await until(is_running)
    return found[0]


@pytest.mark.parametrize(("num_tokens", "num_copies"), [(2 * BLOCK_SIZE + 5, 3), (2 * BLOCK_SIZE, 0)])
async def test_samples_share_their_prompt(client: AsyncClient, num_tokens: int, num_copies: int) -> None:
    """All samples share the full blocks; the last one, if partly filled, is copied for all but one of them."""
    before = await client.block_map()
    async with client.generate(prompt(num_tokens), n=4, seed=1, **ENDLESS):
        found = await running_map(client, 4)
    tables = [sequence.block_table for sequence in found.sequences]
    assert sorted(sequence.index for sequence in found.sequences) == [0, 1, 2, 3]
    assert {table[:2] for table in tables} == {tables[0][:2]}
    assert found.num_cow_copies - before.num_cow_copies == num_copies
    own = Counter(block for table in tables for block in table[2:])
    assert set(own.values()) == {1}
    assert {found.blocks[block].ref_count for block in tables[0][:2]} == {4}
    assert {found.blocks[block].ref_count for block in own} == {1}
    assert found.num_blocks(BlockState.ACTIVE) == 2 + len(own)
    assert found.num_shared_blocks == 2


async def test_samples_equal_separate_requests(client: AsyncClient) -> None:
    """Sharing and copying do not change tokens: with temperature 0, all samples equal a separate request."""
    alone = Job("One day, a little fox", {"temperature": 0, "max_tokens": 60, "ignore_eos": True})
    several = Job(alone.prompt, alone.options | {"n": 4})
    expected = (await outcomes(client, [alone]))[0].outputs[0]
    # Several requests at once, so that one step copies many blocks.
    for outcome in await outcomes(client, [several] * 6):
        assert outcome.outputs == [expected] * 4


async def test_seeded_samples_do_not_depend_on_other_requests(client: AsyncClient) -> None:
    jobs = [
        Job(f"Number {number}. A fox", {"seed": number, "n": 1 + number % 4, "max_tokens": 40, "ignore_eos": True})
        for number in range(16)
    ]
    expected = [(await outcomes(client, [job]))[0] for job in jobs]
    assert len({tuple(output.token_ids) for outcome in expected for output in outcome.outputs}) > 30
    assert differences(await outcomes(client, jobs), expected) == []


async def test_a_prefix_is_found_again(client: AsyncClient) -> None:
    long_prompt = prompt(10 * BLOCK_SIZE + 3)
    first = await client.complete(long_prompt, max_tokens=4, temperature=0)
    second = await client.complete(long_prompt, max_tokens=4, temperature=0)
    assert (first.cached_tokens, second.cached_tokens) == (0, 10 * BLOCK_SIZE)
    assert second.token_ids == first.token_ids
    assert (second.usage.prompt_tokens, second.usage.cached_tokens) == (len(long_prompt), 10 * BLOCK_SIZE)
    found = await client.block_map()
    assert Counter(block.num_hits for block in found.blocks[1:])[1] == 10

    # Of a fully cached prompt the last block is computed again, because the logits of its last token are needed.
    whole = await client.complete(long_prompt[: 10 * BLOCK_SIZE], max_tokens=1, temperature=0)
    assert whole.cached_tokens == 9 * BLOCK_SIZE
    # A prompt with another end shares the blocks before it; a prompt with another beginning shares nothing.
    other_end = await client.complete([*long_prompt[: 5 * BLOCK_SIZE + 1], 7], max_tokens=1)
    assert other_end.cached_tokens == 5 * BLOCK_SIZE
    assert (await client.complete([7, *long_prompt], max_tokens=1)).cached_tokens == 0


async def test_running_requests_share_a_prefix(client: AsyncClient) -> None:
    long_prompt = prompt(4 * BLOCK_SIZE + 3)
    async with client.generate(long_prompt, seed=1, **ENDLESS):
        await running_map(client, 1)
        async with client.generate(long_prompt, seed=2, **ENDLESS):
            found = await running_map(client, 2)
    tables = [sequence.block_table for sequence in found.sequences]
    assert tables[0][:4] == tables[1][:4]
    assert not set(tables[0][4:]) & set(tables[1][4:])
    assert {found.blocks[block].ref_count for block in tables[0][:4]} == {2}


async def test_requests_with_different_cache_salts_share_nothing(client: AsyncClient) -> None:
    long_prompt = prompt(6 * BLOCK_SIZE + 3)

    async def cached_tokens(cache_salt: str | None) -> int:
        return (await client.complete(long_prompt, max_tokens=1, cache_salt=cache_salt)).cached_tokens

    assert await cached_tokens("one") == 0
    assert await cached_tokens("two") == 0
    assert await cached_tokens(None) == 0
    assert await cached_tokens("one") == 6 * BLOCK_SIZE
    assert await cached_tokens("two") == 6 * BLOCK_SIZE
    assert await cached_tokens(None) == 6 * BLOCK_SIZE


async def test_a_reset_drops_only_unused_prefixes(client: AsyncClient) -> None:
    idle, running = prompt(3 * BLOCK_SIZE + 1), prompt(5 * BLOCK_SIZE + 1, first=500)
    await client.complete(idle, max_tokens=1)
    async with client.generate(running, **ENDLESS):
        await running_map(client, 1)
        assert await client.reset_prefix_cache() == 3
        assert (await client.complete(idle, max_tokens=1)).cached_tokens == 0
        assert (await client.complete(running, max_tokens=1)).cached_tokens == 5 * BLOCK_SIZE
