"""Requests that broke other servers get the right status, do not affect other requests, and leave nothing behind."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire import AsyncClient, BlockState
from quire.v1 import generation_pb2 as pb
from quire.v1.generation_pb2_grpc import GenerationStub
from tests.support.e2e.attacks import (
    ATTACKS,
    FLOAT_FIELDS,
    HARMLESS,
    HARMLESS_JSON,
    HUGE,
    JSON_ATTACKS,
    V,
    as_json,
    can_be_json,
    sampling,
)
from tests.support.e2e.stack import Stack
from tests.support.e2e.streams import OPENINGS, Job, StreamGroup, differences, outcomes
from tests.support.e2e.waiting import until

REFUSED = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)
NEIGHBOURS = [
    Job(OPENINGS[0], {"temperature": 0, "max_tokens": 200, "ignore_eos": True}),
    Job(OPENINGS[1], {"seed": 1, "max_tokens": 200, "ignore_eos": True, "n": 2}),
    Job(OPENINGS[2], {"seed": 2, "max_tokens": 200, "ignore_eos": True, "logprobs": 2, "repetition_penalty": 1.1}),
]


@pytest.fixture(scope="module")
def small_server() -> Iterator[Stack]:
    with Stack(num_blocks=129, max_num_seqs=8, max_waiting_requests=64) as stack:
        yield stack


@pytest.fixture
async def client(small_server: Stack) -> AsyncIterator[AsyncClient]:
    """Yields a client; afterwards the pool must be empty, and the executor must not have been lost."""
    small_server.show_log()
    async with small_server.client() as client:
        yield client
        await until_empty(client)
    assert small_server.losses == []


async def until_empty(client: AsyncClient) -> None:
    async def is_empty() -> bool:
        block_map = await client.block_map()
        return not block_map.sequences and not block_map.num_blocks(BlockState.ACTIVE) and not block_map.num_waiting

    await until(is_empty, "the pool is empty")


@asynccontextmanager
async def neighbours(client: AsyncClient) -> AsyncIterator[None]:
    """Runs other streams during the context; their output must equal that of an undisturbed run."""
    expected = await outcomes(client, NEIGHBOURS)
    streams = StreamGroup(client, NEIGHBOURS).start()
    await streams.until(lambda streams: streams.all_have(2))
    yield
    assert differences(await streams.ended(), expected) == []


async def status_of(stub: GenerationStub, request: pb.GenerateRequest) -> tuple[grpc.StatusCode, str]:
    call: Any = stub.Generate(request, timeout=60)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


async def status_of_json(session: aiohttp.ClientSession, body: dict[str, Any]) -> tuple[grpc.StatusCode, str]:
    """Sends a request to the JSON endpoint of the live page; returns its status and the error."""
    async with session.post("/live/completions", json=body) as response:
        *_, last = (await response.text()).splitlines()
    error = json.loads(last).get("error")
    return (grpc.StatusCode.OK, "") if error is None else (grpc.StatusCode[error["code"]], last)


async def check_all(
    status: Callable[[Any], Awaitable[tuple[grpc.StatusCode, str]]], attacks: Iterable[Any], harmless: Iterable[Any]
) -> None:
    """Checks that attacks are refused with a short message and that harmless requests are served."""
    for attack in attacks:
        code, words = await status(attack)
        assert code in REFUSED, (str(attack)[:200], code)
        assert len(words) < 10_000
    for request in harmless:
        assert await status(request) == (grpc.StatusCode.OK, ""), str(request)[:200]


async def test_every_attack_is_refused(small_server: Stack, client: AsyncClient) -> None:
    async with neighbours(client), grpc.aio.insecure_channel(small_server.grpc) as channel:
        await check_all(partial(status_of, GenerationStub(channel)), ATTACKS, HARMLESS)


async def test_the_json_endpoint_refuses_every_attack(small_server: Stack, client: AsyncClient) -> None:
    attacks = [as_json(attack) for attack in ATTACKS if can_be_json(attack)]
    attacks += [{"text": "A fox"} | attack for attack in JSON_ATTACKS]
    harmless = [as_json(request) for request in HARMLESS if can_be_json(request)]
    harmless += [{"text": "A fox", "stopping": {"max_tokens": 3}} | request for request in HARMLESS_JSON]
    timeout = aiohttp.ClientTimeout(60)
    async with neighbours(client), aiohttp.ClientSession(f"http://{small_server.http}", timeout=timeout) as session:
        await check_all(partial(status_of_json, session), attacks, harmless)


def test_negative_ids_cannot_be_sent() -> None:
    for make in (
        lambda: pb.TokenIds(ids=[-1]),
        lambda: pb.StoppingParams(stop_token_ids=[-1]),
        lambda: pb.SamplingParams(allowed_token_ids=[-1]),
        lambda: pb.SamplingParams(logit_bias={-1: 1.0}),
        lambda: pb.SamplingParams(n=-1),
    ):
        with pytest.raises(ValueError, match="range"):
            make()


async def test_two_clients_can_use_the_same_request_id(small_server: Stack, client: AsyncClient) -> None:
    """The server does not use the client's id as a key."""
    jobs = [Job(OPENINGS[i], {"seed": i, "max_tokens": 40, "request_id": "mine"}) for i in range(4)]
    expected = [(await outcomes(client, [job]))[0] for job in jobs]
    async with small_server.client() as other:
        both = await asyncio.gather(outcomes(client, jobs), outcomes(other, jobs))
    for found in both:
        assert differences(found, expected) == []


async def test_many_disconnects_disturb_no_other_request(small_server: Stack, client: AsyncClient) -> None:
    async with neighbours(client), grpc.aio.insecure_channel(small_server.grpc) as channel:
        stub = GenerationStub(channel)

        async def connect_and_cancel(number: int) -> None:
            request = sampling(n=1 + number % 3) if number % 2 else sampling(beam_width=2 + number % 5)
            call: Any = stub.Generate(request)
            await asyncio.sleep(number % 7 / 200)
            call.cancel()

        await asyncio.gather(*(connect_and_cancel(number) for number in range(200)))


async def test_a_slow_reader_delays_no_other_request(small_server: Stack, client: AsyncClient) -> None:
    """The reader gets its complete output when it starts to read."""
    async with neighbours(client), grpc.aio.insecure_channel(small_server.grpc) as channel:
        request = pb.GenerateRequest(
            text="A fox",
            stopping=pb.StoppingParams(max_tokens=300, ignore_eos=True),
            output=pb.OutputParams(logprobs=20),
        )
        call: Any = GenerationStub(channel).Generate(request)
        await asyncio.sleep(1)
        received = [message async for message in call]
    deltas = [message.delta for message in received if message.HasField("delta")]
    assert sum(len(delta.token_ids) for delta in deltas) == 300
    assert all(len(delta.token_ids) == len(delta.logprobs) for delta in deltas)


# --- random requests ----------------------------------------------------------------------------------------------

IDS = st.integers(0, V - 1) | st.sampled_from([0, 1, 2, V - 1, V, V + 1, HUGE])
UINT32 = st.integers(0, 30) | st.sampled_from([2**31, HUGE])
FLOAT32 = st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0]) | st.floats(width=32)
TEXT = st.text(max_size=30)


def message(kind: Any, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Returns a strategy for messages with any subset of these fields."""
    return st.fixed_dictionaries({}, optional=fields).map(lambda values: kind(**values))


SAMPLING = message(
    pb.SamplingParams,
    **dict.fromkeys(FLOAT_FIELDS, FLOAT32),
    top_k=UINT32,
    seed=st.integers(0, 2**64 - 1),
    n=UINT32,
    beam_width=UINT32,
    logit_bias=st.dictionaries(IDS, FLOAT32, max_size=3),
    allowed_token_ids=st.lists(IDS, max_size=5),
    early_stopping=st.booleans(),
)
STOPPING = message(
    pb.StoppingParams,
    max_tokens=UINT32,
    min_tokens=UINT32,
    stop=st.lists(st.text(max_size=3), max_size=3),
    stop_token_ids=st.lists(IDS, max_size=3),
    ignore_eos=st.booleans(),
    include_stop=st.booleans(),
)
PROMPTS = st.one_of(
    TEXT.map(lambda text: {"text": text}),
    st.lists(IDS, max_size=40).map(lambda ids: {"token_ids": pb.TokenIds(ids=ids)}),
    st.lists(message(pb.ChatMessage, role=TEXT, content=TEXT), max_size=3).map(
        lambda messages: {"chat": pb.ChatPrompt(messages=messages)}
    ),
    st.just({}),
)
REQUESTS = st.builds(
    lambda prompt, rest: pb.GenerateRequest(**prompt, **rest),
    PROMPTS,
    st.fixed_dictionaries(
        {},
        optional={
            "sampling": SAMPLING,
            "stopping": STOPPING,
            "output": message(pb.OutputParams, logprobs=UINT32, prompt_logprobs=UINT32),
            "request_id": TEXT,
            "priority": st.integers(-(2**31), 2**31 - 1),
            "cache_salt": TEXT,
        },
    ),
)


async def test_a_stop_token_ends_requests_with_logprobs_while_the_next_plan_is_in_flight(client: AsyncClient) -> None:
    """The executor ends the request although the scheduler has planned another step with log-probabilities."""
    prompt, settings = "Once upon a time", {"max_tokens": 30, "temperature": 0.0}
    whole = await client.complete(prompt, ignore_eos=True, **settings)
    tokens = list(whole.sequences[0].token_ids)
    for at in (5, 6, 7):
        alone = await client.complete(prompt, stop_token_ids=[tokens[at]], logprobs=2, **settings)
        assert list(alone.sequences[0].token_ids) == tokens[: tokens.index(tokens[at]) + 1]
    await asyncio.gather(
        *(client.complete(prompt, stop_token_ids=[tokens[8 + i]], logprobs=i, **settings) for i in range(4))
    )


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(batch=st.lists(REQUESTS, min_size=1, max_size=6))
def test_random_requests_are_served_or_refused(small_server: Stack, batch: list[pb.GenerateRequest]) -> None:
    """No request fails with INTERNAL, crashes a service, or leaves blocks in the pool.

    Requests without max_tokens get a small value.
    """

    async def send() -> list[tuple[grpc.StatusCode, str]]:
        async with grpc.aio.insecure_channel(small_server.grpc) as channel:
            stub = GenerationStub(channel)
            for request in batch:
                if not request.stopping.HasField("max_tokens"):
                    request.stopping.max_tokens = max(20, min(request.stopping.min_tokens, HUGE))
            found = await asyncio.gather(*(status_of(stub, request) for request in batch))
        async with small_server.client() as client:
            await until_empty(client)
        return list(found)

    losses = small_server.losses
    for request, (code, words) in zip(batch, asyncio.run(send()), strict=True):
        assert code in (grpc.StatusCode.OK, *REFUSED), (request, code, words)
    assert small_server.losses == losses
