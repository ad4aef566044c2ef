"""A request that is cancelled, in any state, releases its blocks within one step and leaves nothing behind."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from quire import AsyncClient, BlockMap, DeadlineExceededError, QueueFullError, QuireError, RunningSequence
from tests.support.e2e.block_maps import blocks_of, is_idle, orphans, settled_map, until_map
from tests.support.e2e.process import Process
from tests.support.e2e.proxy import Proxy
from tests.support.e2e.stack import QUIRE, Stack
from tests.support.e2e.streams import OPENINGS, Job, differences, outcomes

NUM_SLOTS = 8
MAX_IN_FLIGHT = 2
NEIGHBOUR = "neighbour"
# Generates more tokens than any test here runs steps.
ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_tokens": 1900, "temperature": 0}
# Long enough that the prompt is still being computed when the test reads the block map.
LONG_PROMPT = [5 + number * 7 % 1500 for number in range(1800)]
KNOWN = Job("Once upon a time", {"temperature": 0, "max_tokens": 60})


@pytest.fixture(scope="module")
def small_steps() -> Iterator[Stack]:
    with Stack(num_blocks=400, max_num_seqs=NUM_SLOTS, max_num_batched_tokens=16, max_in_flight=MAX_IN_FLIGHT) as stack:
        yield stack


@pytest.fixture
def stack(small_steps: Stack) -> Stack:
    """Returns an idle server with few slots and small steps."""
    small_steps.show_log()
    return small_steps


@pytest.fixture
async def observer(stack: Stack) -> AsyncIterator[AsyncClient]:
    """Yields a client that stays connected; checks afterwards that the test has left nothing behind."""
    async with stack.client() as client:
        yield client
        await until_map(client, is_idle)
        assert "violates an invariant" not in stack.log()
        assert stack.losses == []


# --- properties of a block map ------------------------------------------------------------------------------------


def other_sequences(found: BlockMap) -> list[RunningSequence]:
    """Returns all running sequences except the neighbour's."""
    return [sequence for sequence in found.sequences if sequence.request_id != NEIGHBOUR]


def is_prefilling(found: BlockMap) -> bool:
    return any(0 < s.num_computed_tokens < s.num_prompt_tokens for s in other_sequences(found))


def is_decoding(found: BlockMap, num_sequences: int = 1) -> bool:
    outputs = [s.num_tokens - s.num_prompt_tokens for s in other_sequences(found)]
    return len(outputs) == num_sequences and min(outputs) > 20


# --- waiting for a state --------------------------------------------------------------------------------------------


@asynccontextmanager
async def frozen_when(
    stack: Stack, client: AsyncClient, condition: Callable[[BlockMap], bool]
) -> AsyncIterator[BlockMap]:
    """Freezes the executor while the condition holds; yields the block map of that moment."""
    for _ in range(20):
        await until_map(client, condition)
        async with stack.frozen():
            found = await settled_map(client)
            if condition(found):
                yield found
                return
    pytest.fail("the condition never held for long enough")


@asynccontextmanager
async def streaming(client: AsyncClient, request_id: str, **options: Any) -> AsyncIterator[None]:
    """Runs and reads a request during the context; it is sent again when a sequence reaches its maximum length."""

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
        assert not task.done(), "the request must run during the whole context"
    finally:
        task.cancel()
        await asyncio.wait({task})


async def check_blocks_are_released(
    stack: Stack,
    observer: AsyncClient,
    condition: Callable[[BlockMap], bool],
    cancel: Callable[[], Awaitable[None]],
) -> None:
    """Cancels a request while the condition holds, and checks that its blocks are free after the newest step.

    The neighbour continues, so steps never end.
    """
    async with frozen_when(stack, observer, condition) as before:
        held = blocks_of(other_sequences(before))
        assert held
        await cancel()
        gone = await until_map(observer, lambda found: not other_sequences(found))
        assert gone.step_id == before.step_id
        assert orphans(gone) == held, "plans in flight still write to these blocks"
    # A plan this many steps later cannot be sent before the result of that step has arrived.
    later = await until_map(observer, lambda found: found.step_id >= gone.step_id + MAX_IN_FLIGHT)
    assert orphans(later) == set()
    assert later.sequences, "the neighbour continues"


# --- one client -----------------------------------------------------------------------------------------------------


async def test_cancelling_a_waiting_request_empties_the_queue(stack: Stack, observer: AsyncClient) -> None:
    async with streaming(observer, NEIGHBOUR, n=NUM_SLOTS), stack.client() as client:
        events = client.generate(LONG_PROMPT, max_tokens=100)
        async with frozen_when(stack, observer, lambda found: found.num_waiting == 1) as before:
            assert before.num_waiting_prompt_tokens == len(LONG_PROMPT)
            events.close()
            gone = await until_map(observer, lambda found: not found.num_waiting)
            assert gone.step_id == before.step_id
            assert gone.num_waiting_prompt_tokens == 0


async def test_cancelling_a_prefill_releases_its_blocks(stack: Stack, observer: AsyncClient) -> None:
    async with streaming(observer, NEIGHBOUR), stack.client() as client:
        events = client.generate(LONG_PROMPT, max_tokens=100)

        async def close() -> None:
            events.close()

        await check_blocks_are_released(stack, observer, is_prefilling, close)


async def test_killing_a_client_releases_the_blocks_of_its_decode(stack: Stack, observer: AsyncClient) -> None:
    flags = ["--address", stack.grpc, "--ignore-eos", "--temperature", "0", "--max-tokens", "1900"]
    client = Process("generate", [*QUIRE, "generate", "A fox", *flags])
    try:
        async with streaming(observer, NEIGHBOUR):

            async def kill() -> None:
                await asyncio.to_thread(client.kill)

            def client_decodes(found: BlockMap) -> bool:
                assert client.return_code is None, f"the client ended before its request decoded\n{client.log()}"
                return is_decoding(found)

            await check_blocks_are_released(stack, observer, client_decodes, kill)
    finally:
        client.kill()


async def test_cancelling_three_samples_releases_their_blocks(stack: Stack, observer: AsyncClient) -> None:
    async with streaming(observer, NEIGHBOUR), stack.client() as client:
        options = ENDLESS | {"n": 3, "temperature": 1, "seed": 1}
        reader = asyncio.create_task(client.complete("A fox and a hen", **options))

        async def stop_reading() -> None:
            reader.cancel()
            await asyncio.wait({reader})

        await check_blocks_are_released(stack, observer, lambda found: is_decoding(found, 3), stop_reading)


async def test_cancelling_an_unread_stream_releases_its_blocks(stack: Stack, observer: AsyncClient) -> None:
    async with streaming(observer, NEIGHBOUR), stack.client() as client:
        events = client.generate("A fox and a hen", **ENDLESS)
        await check_blocks_are_released(stack, observer, is_decoding, client.close)
        events.close()


# --- many clients ---------------------------------------------------------------------------------------------------


async def test_a_thousand_cancelled_requests_leave_nothing_behind(stack: Stack, observer: AsyncClient) -> None:
    expected = await outcomes(observer, [KNOWN])
    await until_map(observer, is_idle)
    await observer.reset_prefix_cache()
    before = await observer.block_map()

    rng = random.Random(7)
    at_once = asyncio.Semaphore(64)
    endings = await asyncio.gather(*(run_and_cancel(observer, at_once, rng) for _ in range(1000)))
    assert endings.count("cancelled") > 900

    after = await until_map(observer, is_idle)
    assert {block.ref_count for block in after.blocks[1:]} == {0}
    assert after.step_id > before.step_id
    await observer.reset_prefix_cache()
    assert (await observer.block_map()).blocks == before.blocks
    assert differences(await outcomes(observer, [KNOWN]), expected) == []


async def run_and_cancel(client: AsyncClient, at_once: asyncio.Semaphore, rng: random.Random) -> str:
    """Sends a request and cancels it after a random number of events or a random time, whichever comes first."""
    prompt = [rng.randrange(5, 1500) for _ in range(rng.choice((3, 20, 150)))]
    num_samples, max_tokens, seed = rng.choice((1, 1, 1, 3)), rng.randrange(20, 400), rng.getrandbits(60)
    num_events, limit_s = rng.choice((0, 1, 2, 5, 20)), rng.choice((0.001, 0.01, 0.1, 60.0))
    async with at_once:
        async with client.generate(prompt, n=num_samples, max_tokens=max_tokens, seed=seed) as events:
            try:
                async with asyncio.timeout(limit_s):
                    for _ in range(num_events):
                        await anext(events)
            except TimeoutError:
                pass
            except StopAsyncIteration:
                return "complete"
    return "cancelled"


# --- deadlines ------------------------------------------------------------------------------------------------------


async def test_a_passed_deadline_removes_a_request_from_the_queue(stack: Stack, observer: AsyncClient) -> None:
    async with streaming(observer, NEIGHBOUR, n=NUM_SLOTS):
        # The server ends it earlier if it sees that it can no longer end in time.
        with pytest.raises((DeadlineExceededError, QueueFullError)):
            await observer.complete("A fox", timeout_s=0.2)
        found = await until_map(observer, lambda found: not found.num_waiting)
        assert [sequence.request_id for sequence in found.sequences] == [NEIGHBOUR] * NUM_SLOTS


async def test_a_passed_deadline_releases_the_blocks_of_a_running_request(stack: Stack, observer: AsyncClient) -> None:
    async with streaming(observer, NEIGHBOUR):
        for timeout_s in (0.5, 2.0, 8.0):
            with pytest.raises((DeadlineExceededError, QueueFullError)) as failure:
                await observer.complete("A fox", timeout_s=timeout_s, **(ENDLESS | {"n": 3}))
            if failure.type is DeadlineExceededError:
                break  # before, the server saw on a busy machine that the request would begin too late
        assert failure.type is DeadlineExceededError
        gone = await until_map(observer, lambda found: not other_sequences(found))
        later = await until_map(observer, lambda found: found.step_id >= gone.step_id + MAX_IN_FLIGHT)
        assert orphans(later) == set()


async def test_the_server_enforces_deadlines_itself(stack: Stack, observer: AsyncClient) -> None:
    """The client's own timer also cancels the call, but the stalled network does not deliver that."""
    network = Proxy(stack.grpc)
    network.start()
    try:
        async with streaming(observer, NEIGHBOUR), AsyncClient(network.address) as client:
            events = client.generate("A fox", timeout_s=1.0, **ENDLESS)
            await until_map(observer, lambda found: bool(other_sequences(found)))
            network.stall()
            gone = await until_map(observer, lambda found: not other_sequences(found))
            later = await until_map(observer, lambda found: found.step_id >= gone.step_id + MAX_IN_FLIGHT)
            assert orphans(later) == set()
            network.resume()
            with pytest.raises(QuireError) as failure:
                async for _ in events:
                    pass
            assert failure.type is DeadlineExceededError
    finally:
        network.close()
