"""A scheduler that is restarted, or that loses its connection, finds the KV that its executor has retained."""

import asyncio
import signal
from collections.abc import Iterator

import pytest

from quire import AsyncClient, Completion, Delta
from tests.support.e2e.stack import Stack
from tests.support.e2e.waiting import until

BLOCK_SIZE = 16
PROMPT = [5 + number * 3 % 1000 for number in range(300)]
NUM_FULL = (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.fixture(scope="module")
def apart_stack() -> Iterator[Stack]:
    with Stack(apart=True, block_size=BLOCK_SIZE, enable_prefix_caching=True) as stack:
        yield stack


@pytest.fixture
async def stack(apart_stack: Stack) -> Stack:
    """Returns a scheduler and an executor with an empty prefix cache."""
    apart_stack.show_log()
    async with apart_stack.client() as client:
        await client.reset_prefix_cache()
    return apart_stack


async def complete(stack: Stack, prompt: list[int] = PROMPT, seed: int = 1, max_tokens: int = 20) -> Completion:
    async with stack.client() as client:
        return await client.complete(prompt, seed=seed, max_tokens=max_tokens, ignore_eos=True)


async def kill_scheduler(stack: Stack) -> None:
    """Kills the scheduler and starts another one at its address."""
    if stack.pid("scheduler") is not None:
        stack.send("scheduler", signal.SIGKILL)
    await stack.ended(stack.scheduler)
    await asyncio.to_thread(stack._await_ready_line, stack.launch_scheduler())


async def hits(stack: Stack) -> int:
    _, page = await stack.get("/metrics")
    (line,) = [line for line in page.splitlines() if line.startswith("quire_prefix_cache_hits_tokens_total")]
    return int(float(line.rsplit(" ", 1)[1]))


@pytest.mark.parametrize("is_killed", [True, False])
async def test_a_restarted_scheduler_computes_only_the_last_block_of_a_known_prompt(
    stack: Stack, is_killed: bool
) -> None:
    expected = await complete(stack)
    assert expected.cached_tokens == 0
    await (kill_scheduler(stack) if is_killed else stack.restart_scheduler())
    again = await complete(stack)
    assert again.cached_tokens == NUM_FULL
    assert again.token_ids == expected.token_ids
    assert await hits(stack) == NUM_FULL


async def test_streams_that_ended_with_the_scheduler_go_on_without_prefill(stack: Stack) -> None:
    """The prompts are continued with all tokens that clients have received, as a client does that resumes a stream."""
    expected = await asyncio.gather(*[complete(stack, PROMPT[seed:], seed, 200) for seed in range(8)])
    async with stack.client() as client:
        await client.reset_prefix_cache()
        received = [list[int]() for _ in range(8)]

        async def receive(client: AsyncClient, seed: int) -> None:
            async for event in client.generate(PROMPT[seed:], seed=seed, max_tokens=200, ignore_eos=True):
                if isinstance(event, Delta):
                    received[seed] += event.token_ids

        streams = [asyncio.create_task(receive(client, seed)) for seed in range(8)]

        async def have_begun() -> bool:
            return all(len(token_ids) > 20 for token_ids in received)

        await until(have_begun)
        stack.send("scheduler", signal.SIGKILL)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    await kill_scheduler(stack)
    for seed, token_ids in enumerate(received):
        assert 20 < len(token_ids) < 200
        prompt = PROMPT[seed:] + token_ids
        found = await complete(stack, prompt, seed, 200 - len(token_ids))
        # The executor learns a step later which blocks are full, perhaps after the death.
        assert found.cached_tokens >= len(prompt) - 2 - BLOCK_SIZE
        assert tuple(token_ids) + found.token_ids == expected[seed].token_ids


async def test_a_cut_connection_costs_no_prefill(stack: Stack) -> None:
    expected = await complete(stack)
    assert stack.proxy is not None
    stack.proxy.cut()

    async def is_served_again() -> bool:
        return stack.log().count("executor attached") > attached and await stack.health() == "SERVING"

    attached = stack.log().count("executor attached")
    await until(is_served_again)
    again = await complete(stack)
    assert again.cached_tokens == NUM_FULL
    assert again.token_ids == expected.token_ids


async def test_a_reset_prefix_cache_stays_empty_after_a_restart(stack: Stack) -> None:
    await complete(stack)
    async with stack.client() as client:
        assert await client.reset_prefix_cache() > NUM_FULL // BLOCK_SIZE
    await stack.restart_scheduler()
    assert (await complete(stack)).cached_tokens == 0


async def test_a_scheduler_without_a_prefix_cache_leaves_nothing_behind(stack: Stack) -> None:
    await complete(stack)
    await stack.restart_scheduler(enable_prefix_caching=False)
    assert (await complete(stack)).cached_tokens == 0
    await stack.restart_scheduler(enable_prefix_caching=True)
    assert (await complete(stack)).cached_tokens == 0


async def test_a_restarted_executor_starts_empty(stack: Stack) -> None:
    expected = await complete(stack)
    await stack.ended(stack.executor, signal.SIGKILL)
    await stack.until_health("NOT_SERVING")
    await asyncio.to_thread(stack._await_executor, stack._launch_executor())
    await stack.until_health("SERVING")
    again = await complete(stack)
    assert again.cached_tokens == 0
    assert again.token_ids == expected.token_ids
