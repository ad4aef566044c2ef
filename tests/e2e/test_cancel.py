"""Whoever goes away, in whatever state, frees its blocks within one step, and leaves nothing behind."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from quire import AsyncClient, BlockMap, BlockState, DeadlineExceededError, QuireError, RunningSequence
from tests.support.e2e.process import Process
from tests.support.e2e.proxy import Proxy
from tests.support.e2e.stack import QUIRE, Stack
from tests.support.e2e.streams import OPENINGS, Job, differences, outcomes
from tests.support.e2e.waiting import until

NUM_SLOTS = 8
MAX_IN_FLIGHT = 2
NEIGHBOUR = "neighbour"
# More tokens than there are steps in any test here.
ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_tokens": 1900, "temperature": 0}
# More tokens than steps of this server can compute while somebody looks.
LONG_PROMPT = [5 + number * 7 % 1500 for number in range(1800)]
KNOWN = Job("Once upon a time", {"temperature": 0, "max_tokens": 60})


@pytest.fixture(scope="module")
def small_steps() -> Iterator[Stack]:
    with Stack(num_blocks=400, max_num_seqs=NUM_SLOTS, max_num_batched_tokens=16, max_in_flight=MAX_IN_FLIGHT) as stack:
        yield stack


@pytest.fixture
def stack(small_steps: Stack) -> Stack:
    """An idle server with few slots and small steps."""
    small_steps.show_log()
    return small_steps


@pytest.fixture
async def observer(stack: Stack) -> AsyncIterator[AsyncClient]:
    """A client that stays. Whatever a test did, nothing of it is left afterwards."""
    async with stack.client() as client:
        yield client
        await until_map(client, is_idle)
        assert "violates an invariant" not in stack.log()
        assert stack.losses == []


# --- what a block map says ----------------------------------------------------------------------------------------


def is_idle(found: BlockMap) -> bool:
    return not found.sequences and not found.num_waiting and not found.num_blocks(BlockState.ACTIVE)


def strangers(found: BlockMap) -> list[RunningSequence]:
    """All running sequences but the neighbour's."""
    return [sequence for sequence in found.sequences if sequence.request_id != NEIGHBOUR]


def blocks_of(sequences: list[RunningSequence]) -> set[int]:
    return {block for sequence in sequences for block in sequence.block_table}


def orphans(found: BlockMap) -> set[int]:
    """Blocks that are taken, though no running sequence names them."""
    active = {number for number, block in enumerate(found.blocks) if block.state is BlockState.ACTIVE}
    return active - blocks_of(list(found.sequences)) - {0}


def is_prefilling(found: BlockMap) -> bool:
    return any(0 < s.num_computed_tokens < s.num_prompt_tokens for s in strangers(found))


def is_decoding(found: BlockMap, num_sequences: int = 1) -> bool:
    outputs = [s.num_tokens - s.num_prompt_tokens for s in strangers(found)]
    return len(outputs) == num_sequences and min(outputs) > 20


# --- how the moment is caught ---------------------------------------------------------------------------------------


async def until_map(client: AsyncClient, is_so: Callable[[BlockMap], bool]) -> BlockMap:
    """The first block map of which it is so."""
    found: list[BlockMap] = []

    async def look() -> bool:
        found[:] = [await client.block_map()]
        return is_so(found[0])

    await until(look, getattr(is_so, "__name__", ""))
    return found[0]


async def at_rest(client: AsyncClient) -> BlockMap:
    """The block map once what a frozen executor sent before has arrived."""
    found, num_equal = await client.block_map(), 0
    while num_equal < 5:
        await asyncio.sleep(0.01)
        last, found = found, await client.block_map()
        num_equal = num_equal + 1 if found == last else 0
    return found


@asynccontextmanager
async def frozen_when(stack: Stack, client: AsyncClient, is_so: Callable[[BlockMap], bool]) -> AsyncIterator[BlockMap]:
    """Freezes the executor at a moment in which it is so; gives the block map of that moment."""
    for _ in range(20):
        await until_map(client, is_so)
        async with stack.frozen():
            found = await at_rest(client)
            if is_so(found):
                yield found
                return
    pytest.fail("it was never so for long enough")


@asynccontextmanager
async def streaming(client: AsyncClient, request_id: str, **options: Any) -> AsyncIterator[None]:
    """A request that runs, and is read, until this is left; it comes again when a sequence can get no longer."""

    async def read() -> None:
        while True:
            async for _ in client.generate(OPENINGS[0], request_id=request_id, **(ENDLESS | options)):
                pass

    def runs(found: BlockMap) -> bool:
        names = [sequence.request_id for sequence in found.sequences]
        return names.count(request_id) == int(options.get("n", 1))

    task = asyncio.create_task(read())
    try:
        await until_map(client, runs)
        yield
        assert not task.done(), "it was meant to run all the time"
    finally:
        task.cancel()
        await asyncio.wait({task})


async def check_blocks_come_back(
    stack: Stack,
    observer: AsyncClient,
    is_so: Callable[[BlockMap], bool],
    go_away: Callable[[], Awaitable[None]],
) -> None:
    """The blocks of a client that goes away when it is so are free once the step is done that was the newest then.
    The neighbour goes on, so steps never end.
    """
    async with frozen_when(stack, observer, is_so) as before:
        held = blocks_of(strangers(before))
        assert held
        await go_away()
        gone = await until_map(observer, lambda found: not strangers(found))
        assert gone.step_id == before.step_id
        assert orphans(gone) == held, "plans in flight still write to them"
    # A plan that many steps later cannot be out before the result of that step is in.
    later = await until_map(observer, lambda found: found.step_id >= gone.step_id + MAX_IN_FLIGHT)
    assert orphans(later) == set()
    assert later.sequences, "the neighbour goes on"


# --- one client -----------------------------------------------------------------------------------------------------


async def test_gone_while_waiting(stack: Stack, observer: AsyncClient) -> None:
    async with streaming(observer, NEIGHBOUR, n=NUM_SLOTS), stack.client() as client:
        events = client.generate(LONG_PROMPT, max_tokens=100)
        async with frozen_when(stack, observer, lambda found: found.num_waiting == 1) as before:
            assert before.num_waiting_prompt_tokens == len(LONG_PROMPT)
            events.close()
            gone = await until_map(observer, lambda found: not found.num_waiting)
            assert gone.step_id == before.step_id
            assert gone.num_waiting_prompt_tokens == 0


async def test_gone_while_prefilling(stack: Stack, observer: AsyncClient) -> None:
    async with streaming(observer, NEIGHBOUR), stack.client() as client:
        events = client.generate(LONG_PROMPT, max_tokens=100)

        async def close() -> None:
            events.close()

        await check_blocks_come_back(stack, observer, is_prefilling, close)


async def test_gone_while_decoding_by_the_death_of_its_process(stack: Stack, observer: AsyncClient) -> None:
    flags = ["--address", stack.grpc, "--ignore-eos", "--temperature", "0", "--max-tokens", "1900"]
    client = Process("generate", [*QUIRE, "generate", "A fox", *flags])
    try:
        async with streaming(observer, NEIGHBOUR):

            async def die() -> None:
                await asyncio.to_thread(client.kill)

            def is_so(found: BlockMap) -> bool:
                assert client.return_code is None, f"it ended before it was seen to decode\n{client.log()}"
                return is_decoding(found)

            await check_blocks_come_back(stack, observer, is_so, die)
    finally:
        client.kill()


async def test_gone_with_three_samples(stack: Stack, observer: AsyncClient) -> None:
    async with streaming(observer, NEIGHBOUR), stack.client() as client:
        options = ENDLESS | {"n": 3, "temperature": 1, "seed": 1}
        reader = asyncio.create_task(client.complete("A fox and a hen", **options))

        async def stop_reading() -> None:
            reader.cancel()
            await asyncio.wait({reader})

        await check_blocks_come_back(stack, observer, lambda found: is_decoding(found, 3), stop_reading)


async def test_gone_with_its_stream_unread(stack: Stack, observer: AsyncClient) -> None:
    async with streaming(observer, NEIGHBOUR), stack.client() as client:
        events = client.generate("A fox and a hen", **ENDLESS)
        await check_blocks_come_back(stack, observer, is_decoding, client.close)
        events.close()


# --- many clients ---------------------------------------------------------------------------------------------------


async def test_a_thousand_cancelled_requests_leave_nothing_behind(stack: Stack, observer: AsyncClient) -> None:
    expected = await outcomes(observer, [KNOWN])
    await until_map(observer, is_idle)
    await observer.reset_prefix_cache()
    before = await observer.block_map()

    rng = random.Random(7)
    at_once = asyncio.Semaphore(64)
    how_they_ended = await asyncio.gather(*(cancelled(observer, at_once, rng) for _ in range(1000)))
    assert how_they_ended.count("cancelled") > 900

    after = await until_map(observer, is_idle)
    assert {block.ref_count for block in after.blocks[1:]} == {0}
    assert after.step_id > before.step_id
    await observer.reset_prefix_cache()
    assert (await observer.block_map()).blocks == before.blocks
    assert differences(await outcomes(observer, [KNOWN]), expected) == []


async def cancelled(client: AsyncClient, at_once: asyncio.Semaphore, rng: random.Random) -> str:
    """A request that is cancelled after so many events, or after a while, whatever it has come to by then."""
    prompt = [rng.randrange(5, 1500) for _ in range(rng.choice((3, 20, 150)))]
    num_samples, max_tokens, seed = rng.choice((1, 1, 1, 3)), rng.randrange(20, 400), rng.getrandbits(60)
    num_events, patience_s = rng.choice((0, 1, 2, 5, 20)), rng.choice((0.001, 0.01, 0.1, 60.0))
    async with at_once:
        async with client.generate(prompt, n=num_samples, max_tokens=max_tokens, seed=seed) as events:
            try:
                async with asyncio.timeout(patience_s):
                    for _ in range(num_events):
                        await anext(events)
            except TimeoutError:
                pass
            except StopAsyncIteration:
                return "complete"
    return "cancelled"


# --- deadlines ------------------------------------------------------------------------------------------------------


async def test_a_deadline_passes_in_the_queue(stack: Stack, observer: AsyncClient) -> None:
    async with streaming(observer, NEIGHBOUR, n=NUM_SLOTS):
        with pytest.raises(DeadlineExceededError):
            await observer.complete("A fox", timeout_s=0.2)
        found = await until_map(observer, lambda found: not found.num_waiting)
        assert [sequence.request_id for sequence in found.sequences] == [NEIGHBOUR] * NUM_SLOTS


async def test_a_deadline_passes_while_running(stack: Stack, observer: AsyncClient) -> None:
    async with streaming(observer, NEIGHBOUR):
        with pytest.raises(DeadlineExceededError):
            await observer.complete("A fox", timeout_s=0.5, **(ENDLESS | {"n": 3}))
        gone = await until_map(observer, lambda found: not strangers(found))
        later = await until_map(observer, lambda found: found.step_id >= gone.step_id + MAX_IN_FLIGHT)
        assert orphans(later) == set()


async def test_the_server_keeps_deadlines_itself(stack: Stack, observer: AsyncClient) -> None:
    """The client's own timer would cancel the call. Here nothing of that gets through."""
    network = Proxy(stack.grpc)
    network.start()
    try:
        async with streaming(observer, NEIGHBOUR), AsyncClient(network.address) as client:
            events = client.generate("A fox", timeout_s=1.0, **ENDLESS)
            await until_map(observer, lambda found: bool(strangers(found)))
            network.stall()
            gone = await until_map(observer, lambda found: not strangers(found))
            later = await until_map(observer, lambda found: found.step_id >= gone.step_id + MAX_IN_FLIGHT)
            assert orphans(later) == set()
            network.resume()
            with pytest.raises(QuireError) as failure:
                async for _ in events:
                    pass
            assert failure.type is DeadlineExceededError
    finally:
        network.close()
