"""Requests that cannot be served are refused with the right status and disturb no other request."""

import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire import (
    AsyncClient,
    CapacityExceededError,
    ChatMessage,
    InvalidRequestError,
    LimitExceededError,
    QueueFullError,
    UnavailableError,
)
from quire.addresses import with_port
from quire.events import Prompt
from quire.v1 import generation_pb2
from quire.v1.generation_pb2_grpc import GenerationStub
from tests.support.e2e.stack import TINY, Stack
from tests.support.e2e.streams import OPENINGS, Job, StreamGroup, differences, outcomes
from tests.support.e2e.waiting import until

NUM_SLOTS = 4
MAX_WAITING = 3
MAX_WAITING_TOKENS = 100
# The null block, and 60 blocks for the KV of all tokens of a sequence except the last.
NUM_BLOCKS = 61
MOST_TOKENS = 60 * 16 + 1
NEIGHBOURS = [
    Job(OPENINGS[0], {"temperature": 0, "max_tokens": 250, "ignore_eos": True}),
    Job(OPENINGS[1], {"temperature": 1, "max_tokens": 250, "ignore_eos": True, "seed": 1}),
    Job(OPENINGS[2], {"temperature": 0.8, "max_tokens": 250, "ignore_eos": True, "seed": 2, "top_p": 0.9}),
]
ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_tokens": 250}


@pytest.fixture(scope="module")
def small_server() -> Iterator[Stack]:
    with Stack(
        num_blocks=NUM_BLOCKS,
        max_num_seqs=NUM_SLOTS,
        max_waiting_requests=MAX_WAITING,
        max_waiting_prompt_tokens=MAX_WAITING_TOKENS,
    ) as stack:
        yield stack


@pytest.fixture
async def client(small_server: Stack) -> AsyncIterator[AsyncClient]:
    small_server.show_log()
    async with small_server.client() as client:
        yield client
    assert small_server.losses == []


@asynccontextmanager
async def neighbours(client: AsyncClient) -> AsyncIterator[None]:
    """Runs other streams during the context; their output must equal that of an undisturbed run."""
    expected = await outcomes(client, NEIGHBOURS)
    streams = StreamGroup(client, NEIGHBOURS).start()
    await streams.until(lambda streams: streams.all_have(3))
    assert streams.most_run
    yield
    assert differences(await streams.ended(), expected) == []


async def test_requests_that_can_never_fit_are_out_of_range(client: AsyncClient) -> None:
    # More tokens than the pool holds, than the model supports, and a huge number.
    too_long: list[tuple[Prompt, dict[str, Any]]] = [
        ([7] * MOST_TOKENS, {}),
        ([7] * (MOST_TOKENS - 10), {"max_tokens": 11}),
        ([7] * 100_000, {"max_tokens": 1}),
        ("A fox", {"max_tokens": 1_000_000}),
        ("A fox", {"min_tokens": 1_000_000}),
        ("A fox and a hen. " * 10_000, {}),
    ]
    async with neighbours(client):
        for prompt, options in too_long:
            with pytest.raises(CapacityExceededError, match=f"> ({MOST_TOKENS}|{MOST_TOKENS - 1} maximum)$"):
                await client.complete(prompt, **options)
    longest = await client.complete([7] * (MOST_TOKENS - 2), max_tokens=2, ignore_eos=True)
    assert len(longest.token_ids) == 2


VOCAB_SIZE: int = json.loads((Path(TINY) / "config.json").read_text())["vocab_size"]
VIOLATIONS: dict[str, tuple[Prompt, dict[str, Any]]] = {
    "token_ids.ids[1]": ([5, VOCAB_SIZE, 6], {}),
    "token_ids.ids[0]": ([2**32 - 1], {}),
    "token_ids.ids": ([], {}),
    "text": ("x" * (3 * 2**20), {}),
    "chat.messages[0].role": ([ChatMessage("", "hello")], {}),
    "request_id": ("A fox", {"request_id": "x" * 257}),
    "cache_salt": ("A fox", {"cache_salt": "x" * 257}),
    "sampling.temperature": ("A fox", {"temperature": -1.0}),
    "sampling.top_p": ("A fox", {"top_p": 1.5}),
    "sampling.min_p": ("A fox", {"min_p": float("nan")}),
    "sampling.n": ("A fox", {"n": NUM_SLOTS + 1}),
    "sampling.beam_width": ("A fox", {"beam_width": NUM_SLOTS + 1}),
    "sampling.length_penalty": ("A fox", {"length_penalty": 1.0}),
    "sampling.early_stopping": ("A fox", {"early_stopping": False}),
    "sampling.repetition_penalty": ("A fox", {"repetition_penalty": 0.0}),
    "sampling.frequency_penalty": ("A fox", {"frequency_penalty": 2.5}),
    "sampling.presence_penalty": ("A fox", {"presence_penalty": -2.5}),
    f"sampling.logit_bias[{VOCAB_SIZE}]": ("A fox", {"logit_bias": {7: 1.0, VOCAB_SIZE: 1.0}}),
    "sampling.logit_bias[7]": ("A fox", {"logit_bias": {7: float("inf")}}),
    "sampling.allowed_token_ids[1]": ("A fox", {"allowed_token_ids": [7, VOCAB_SIZE]}),
    "sampling.seed": ("A fox", {"beam_width": 2, "seed": 1}),
    "stopping.max_tokens": ("A fox", {"max_tokens": 0}),
    "stopping.min_tokens": ("A fox", {"max_tokens": 5, "min_tokens": 6}),
    "stopping.stop": ("A fox", {"stop": ["x"] * 17}),
    "stopping.stop[1]": ("A fox", {"stop": ["x", ""]}),
    "stopping.stop_token_ids[0]": ("A fox", {"stop_token_ids": [VOCAB_SIZE]}),
    "output.logprobs": ("A fox", {"logprobs": 21}),
    "output.prompt_logprobs": ("A fox", {"prompt_logprobs": 21}),
}


async def test_an_invalid_request_names_the_field(client: AsyncClient) -> None:
    async with neighbours(client):
        for field, (prompt, options) in VIOLATIONS.items():
            with pytest.raises(InvalidRequestError) as refusal:
                await client.complete(prompt, **options)
            assert list(refusal.value.violations) == [field], refusal.value
            assert field in str(refusal.value)


async def test_all_violations_are_reported_at_once(client: AsyncClient) -> None:
    async with neighbours(client):
        with pytest.raises(InvalidRequestError) as refusal:
            await client.complete([1, 2, 5000], temperature=-1, top_p=0, beam_width=99, stop=[""], logprobs=99)
    assert set(refusal.value.violations) == {
        "token_ids.ids[2]",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.beam_width",
        "stopping.stop[0]",
        "output.logprobs",
    }


async def test_a_request_without_a_prompt_is_refused(small_server: Stack, client: AsyncClient) -> None:
    async with grpc.aio.insecure_channel(small_server.grpc) as channel:
        call = GenerationStub(channel).Generate(generation_pb2.GenerateRequest())
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call.read()
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "prompt" in (refusal.value.details() or "")


async def test_a_message_that_is_too_large_is_refused(client: AsyncClient) -> None:
    """The message is refused by gRPC before the server's code sees it."""
    async with neighbours(client):
        with pytest.raises(LimitExceededError, match="larger than max"):
            await client.complete("x" * (5 * 2**20))


async def test_a_full_queue_says_when_to_try_again(small_server: Stack, client: AsyncClient) -> None:
    async with neighbours(client), AsyncExitStack() as streams:

        async def start(prompt: Prompt, num_running: int, num_waiting: int) -> None:
            """Sends a long request, and waits until these numbers of requests run and wait."""
            await streams.enter_async_context(client.generate(prompt, **ENDLESS))

            async def has_arrived() -> bool:
                found = await client.block_map()
                return (len(found.sequences), found.num_waiting) == (num_running, num_waiting)

            await until(has_arrived, f"{num_running} run, {num_waiting} wait")

        await start("A fox", NUM_SLOTS, 0)
        async with small_server.frozen():  # so that no request leaves the queue
            for number in range(MAX_WAITING):
                await start([7, 8, 9], NUM_SLOTS, number + 1)
            with pytest.raises(QueueFullError, match=f"{MAX_WAITING} requests are waiting") as refusal:
                await client.complete("A fox")
            assert refusal.value.retry_after_s > 0
        await streams.aclose()

        await start("A fox", NUM_SLOTS, 0)
        async with small_server.frozen():
            await start([7] * (MAX_WAITING_TOKENS - 1), NUM_SLOTS, 1)
            with pytest.raises(QueueFullError, match=f"{MAX_WAITING_TOKENS - 1} prompt tokens") as refusal:
                await client.complete([7, 8])
            assert refusal.value.retry_after_s > 0


async def test_requests_are_refused_before_the_first_executor() -> None:
    """The scheduler does not know yet what it can serve; it is alive but not ready."""
    addresses: dict[str, Any] = {name: with_port("127.0.0.1:0") for name in ("listen", "http_listen", "executor")}
    stack = Stack(apart=True, **addresses)
    stack.show_log()
    scheduler = stack.launch_scheduler()
    try:
        async with AsyncClient(addresses["listen"], wait_for_ready=True, resume_timeout_s=0) as client:
            with pytest.raises(UnavailableError, match="no executor"):
                await client.complete("Once upon a time")
            with pytest.raises(UnavailableError, match="no executor"):
                await client.server_info()
        stack.grpc, stack.http = addresses["listen"], addresses["http_listen"]
        assert await stack.health() == "NOT_SERVING"
        assert (await stack.readyz(), (await stack.get("/healthz"))[0]) == (503, 200)
        assert await stack.ended(scheduler, signal.SIGTERM) == 0
    finally:
        stack.kill()
