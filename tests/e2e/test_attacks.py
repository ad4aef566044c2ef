"""Requests that broke other servers: each gets the right status, neighbours notice nothing, nothing is left."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire import AsyncClient, BlockState
from quire.v1 import generation_pb2 as wire
from quire.v1.generation_pb2_grpc import GenerationStub
from tests.support.e2e.stack import Stack
from tests.support.e2e.streams import OPENINGS, Crowd, Job, differences, outcomes
from tests.support.e2e.waiting import until

V = 1664  # of the embedded checkpoint
NAN, INF = float("nan"), float("inf")
HUGE = 2**32 - 1
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
    """At the end the pool is empty, and the executor has lived through it."""
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
    """Streams that run meanwhile; their output has to be what it is without the disturbance."""
    expected = await outcomes(client, NEIGHBOURS)
    crowd = Crowd(client, NEIGHBOURS).start()
    await crowd.until(lambda crowd: crowd.all_have(2))
    yield
    assert differences(await crowd.ended(), expected) == []


async def status_of(stub: GenerationStub, request: wire.GenerateRequest) -> tuple[grpc.StatusCode, str]:
    call: Any = stub.Generate(request, timeout=60)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


async def status_of_json(session: aiohttp.ClientSession, body: dict[str, Any]) -> tuple[grpc.StatusCode, str]:
    """The same, of the door that reads JSON."""
    async with session.post("/live/completions", json=body) as response:
        *_, last = (await response.text()).splitlines()
    error = json.loads(last).get("error")
    return (grpc.StatusCode.OK, "") if error is None else (grpc.StatusCode[error["code"]], last)


def as_json(message: Any) -> dict[str, Any]:
    """NaN and the infinities as Python writes them, and reads."""
    return {field.name: _json_value(value) for field, value in message.ListFields()}


def _json_value(value: Any) -> Any:
    if isinstance(value, Message):
        return as_json(value)
    return value if isinstance(value, str | int | float) else [_json_value(item) for item in value]


def can_be_json(request: wire.GenerateRequest) -> bool:
    fields = {field.name for field, _ in request.ListFields()}
    return fields <= {"text", "chat", "request_id", "sampling", "stopping"} and not request.sampling.logit_bias


def sampling(**fields: Any) -> wire.GenerateRequest:
    return wire.GenerateRequest(text="A fox", sampling=wire.SamplingParams(**fields))


def stopping(**fields: Any) -> wire.GenerateRequest:
    return wire.GenerateRequest(text="A fox", stopping=wire.StoppingParams(**fields))


def output(**fields: Any) -> wire.GenerateRequest:
    return wire.GenerateRequest(text="A fox", output=wire.OutputParams(**fields))


BAD_IDS = (V, V + 1, HUGE)
FLOATS = (NAN, INF, -INF, 3.4e38, -3.4e38)
FLOAT_FIELDS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "length_penalty",
)  # fmt: skip
ATTACKS: list[wire.GenerateRequest] = [
    *(wire.GenerateRequest(token_ids=wire.TokenIds(ids=[5, bad])) for bad in BAD_IDS),
    *(stopping(stop_token_ids=[bad]) for bad in BAD_IDS),
    *(sampling(logit_bias={bad: 1.0}) for bad in BAD_IDS),
    *(sampling(allowed_token_ids=[5, bad]) for bad in BAD_IDS),
    *(sampling(logit_bias={5: value}) for value in FLOATS),
    *(sampling(**{name: value}) for name in FLOAT_FIELDS for value in FLOATS),
    *(sampling(beam_width=2, length_penalty=value) for value in FLOATS),
    sampling(repetition_penalty=0),
    sampling(repetition_penalty=1e-45),
    sampling(n=0),
    *(sampling(n=number) for number in (9, HUGE)),
    *(sampling(beam_width=number) for number in (9, 65, HUGE)),
    sampling(beam_width=2, n=3),
    sampling(beam_width=2, seed=1),
    sampling(logit_bias=dict.fromkeys(range(1025), 1.0)),
    sampling(allowed_token_ids=[5] * 65537),
    *(output(logprobs=number) for number in (21, HUGE)),
    *(output(prompt_logprobs=number) for number in (21, HUGE)),
    stopping(min_tokens=HUGE),
    stopping(max_tokens=HUGE),
    stopping(min_tokens=3, max_tokens=2),
    stopping(max_tokens=0),
    stopping(stop=["x"] * 17),
    stopping(stop_token_ids=[5] * 65),
    wire.GenerateRequest(text="a" * 10_000_000),
    wire.GenerateRequest(text="\u0301" * 5_000_000),
    wire.GenerateRequest(text="A fox", cache_salt="s" * 2**20),
    wire.GenerateRequest(text="A fox", request_id="a\x00b"),
    wire.GenerateRequest(text="A fox", request_id="r" * 2**20),
    wire.GenerateRequest(chat=wire.ChatPrompt(messages=[wire.ChatMessage(role="user", content="x")] * 2000)),
    wire.GenerateRequest(),
]
# Strange, and served all the same.
HARMLESS: list[wire.GenerateRequest] = [
    wire.GenerateRequest(text="\x00\x01", stopping=wire.StoppingParams(max_tokens=2)),
    wire.GenerateRequest(text="A fox", cache_salt="\x00" * 256, stopping=wire.StoppingParams(max_tokens=2)),
    wire.GenerateRequest(text="{{ 7 * 7 }}{% for x in y %}", stopping=wire.StoppingParams(max_tokens=2)),
    wire.GenerateRequest(token_ids=wire.TokenIds(ids=[V - 1]), stopping=wire.StoppingParams(max_tokens=2)),
    wire.GenerateRequest(
        text="A fox",
        sampling=wire.SamplingParams(
            logit_bias=dict.fromkeys(range(1000), -100), repetition_penalty=10, top_p=1e-30, top_k=HUGE
        ),
        stopping=wire.StoppingParams(max_tokens=3),
    ),
]  # fmt: skip

# What a message of protobuf cannot say: numbers that are no float32, values of any type, keys that are no fields.
JSON_ATTACKS: list[dict[str, Any]] = [
    *({"sampling": {"top_p": value}} for value in (1e-50, 7e-46, 1e300, -1e-50, "0.5", True, [0.5], {})),
    *({"sampling": {"temperature": value}} for value in (1e300, 10**400, "hot", [[[0.5]]])),
    *({"sampling": {"seed": value}} for value in (2**64, -1, 1.5)),
    {"sampling": {"n": 1.0}},
    {"sampling": {"allowed_token_ids": [-1]}},
    {"stopping": {"stop_token_ids": [2**64]}},
    {"stopping": {"stop": [{}]}},
    {"request_id": [0] * 1_000_000},
    {"sampling": {"seed": [{}] * 1_000_000}},
    {"sampling": {f"{number}": number for number in range(100_000)}},
    {"text": None, "chat": {"messages": [{}] * 1_000_000}},
    {"text": None, "chat": {"messages": [{f"{number}": 1 for number in range(100)}] * 1000}},
]
HARMLESS_JSON: list[dict[str, Any]] = [
    {"sampling": {"temperature": 1e-50, "min_p": 1e-50, "repetition_penalty": 1.1, "frequency_penalty": -1e-50}},
    {"sampling": {"top_p": 1e-45, "presence_penalty": 0.1}},
    {"sampling": {"beam_width": 2, "length_penalty": 0.1}},
]


async def check_all(
    status: Callable[[Any], Awaitable[tuple[grpc.StatusCode, str]]], attacks: Iterable[Any], harmless: Iterable[Any]
) -> None:
    """Attacks are refused in few words; what is harmless is served."""
    for attack in attacks:
        code, words = await status(attack)
        assert code in REFUSED, (str(attack)[:200], code)
        assert len(words) < 10_000
    for request in harmless:
        assert await status(request) == (grpc.StatusCode.OK, ""), str(request)[:200]


async def test_every_attack_is_refused(small_server: Stack, client: AsyncClient) -> None:
    async with neighbours(client), grpc.aio.insecure_channel(small_server.grpc) as channel:
        await check_all(partial(status_of, GenerationStub(channel)), ATTACKS, HARMLESS)


async def test_every_attack_is_refused_by_the_door_of_the_page(small_server: Stack, client: AsyncClient) -> None:
    attacks = [as_json(attack) for attack in ATTACKS if can_be_json(attack)]
    attacks += [{"text": "A fox"} | attack for attack in JSON_ATTACKS]
    harmless = [as_json(request) for request in HARMLESS if can_be_json(request)]
    harmless += [{"text": "A fox", "stopping": {"max_tokens": 3}} | request for request in HARMLESS_JSON]
    timeout = aiohttp.ClientTimeout(60)
    async with neighbours(client), aiohttp.ClientSession(f"http://{small_server.http}", timeout=timeout) as session:
        await check_all(partial(status_of_json, session), attacks, harmless)


def test_negative_ids_cannot_be_sent() -> None:
    for make in (
        lambda: wire.TokenIds(ids=[-1]),
        lambda: wire.StoppingParams(stop_token_ids=[-1]),
        lambda: wire.SamplingParams(allowed_token_ids=[-1]),
        lambda: wire.SamplingParams(logit_bias={-1: 1.0}),
        lambda: wire.SamplingParams(n=-1),
    ):
        with pytest.raises(ValueError, match="range"):
            make()


async def test_two_clients_with_one_request_id(small_server: Stack, client: AsyncClient) -> None:
    """The id is the client's own affair: nothing here is keyed by it."""
    jobs = [Job(OPENINGS[i], {"seed": i, "max_tokens": 40, "request_id": "mine"}) for i in range(4)]
    expected = [(await outcomes(client, [job]))[0] for job in jobs]
    async with small_server.client() as other:
        both = await asyncio.gather(outcomes(client, jobs), outcomes(other, jobs))
    for found in both:
        assert differences(found, expected) == []


async def test_a_storm_of_disconnects(small_server: Stack, client: AsyncClient) -> None:
    async with neighbours(client), grpc.aio.insecure_channel(small_server.grpc) as channel:
        stub = GenerationStub(channel)

        async def come_and_go(number: int) -> None:
            request = sampling(n=1 + number % 3) if number % 2 else sampling(beam_width=2 + number % 5)
            call: Any = stub.Generate(request)
            await asyncio.sleep(number % 7 / 200)
            call.cancel()

        await asyncio.gather(*(come_and_go(number) for number in range(200)))


async def test_a_reader_that_takes_nothing(small_server: Stack, client: AsyncClient) -> None:
    """It gets everything once it reads, and holds nobody up meanwhile."""
    async with neighbours(client), grpc.aio.insecure_channel(small_server.grpc) as channel:
        request = wire.GenerateRequest(
            text="A fox",
            stopping=wire.StoppingParams(max_tokens=300, ignore_eos=True),
            output=wire.OutputParams(logprobs=20),
        )
        call: Any = GenerationStub(channel).Generate(request)
        await asyncio.sleep(1)
        received = [message async for message in call]
    deltas = [message.delta for message in received if message.HasField("delta")]
    assert sum(len(delta.token_ids) for delta in deltas) == 300
    assert all(len(delta.token_ids) == len(delta.logprobs) for delta in deltas)


# --- anything -----------------------------------------------------------------------------------------------------

IDS = st.integers(0, V - 1) | st.sampled_from([0, 1, 2, V - 1, V, V + 1, HUGE])
UINT32 = st.integers(0, 30) | st.sampled_from([2**31, HUGE])
FLOAT32 = st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0]) | st.floats(width=32)
TEXT = st.text(max_size=30)


def message(kind: Any, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """With any of the fields, or none."""
    return st.fixed_dictionaries({}, optional=fields).map(lambda values: kind(**values))


SAMPLING = message(
    wire.SamplingParams,
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
    wire.StoppingParams,
    max_tokens=UINT32,
    min_tokens=UINT32,
    stop=st.lists(st.text(max_size=3), max_size=3),
    stop_token_ids=st.lists(IDS, max_size=3),
    ignore_eos=st.booleans(),
    include_stop=st.booleans(),
)
PROMPTS = st.one_of(
    TEXT.map(lambda text: {"text": text}),
    st.lists(IDS, max_size=40).map(lambda ids: {"token_ids": wire.TokenIds(ids=ids)}),
    st.lists(message(wire.ChatMessage, role=TEXT, content=TEXT), max_size=3).map(
        lambda messages: {"chat": wire.ChatPrompt(messages=messages)}
    ),
    st.just({}),
)
REQUESTS = st.builds(
    lambda prompt, rest: wire.GenerateRequest(**prompt, **rest),
    PROMPTS,
    st.fixed_dictionaries(
        {},
        optional={
            "sampling": SAMPLING,
            "stopping": STOPPING,
            "output": message(wire.OutputParams, logprobs=UINT32, prompt_logprobs=UINT32),
            "request_id": TEXT,
            "priority": st.integers(-(2**31), 2**31 - 1),
            "cache_salt": TEXT,
        },
    ),
)


async def test_requests_with_logprobs_end_by_a_token_while_the_next_plan_is_out(client: AsyncClient) -> None:
    """The executor ends them; the scheduler had planned one step more, and counts on its log-probabilities."""
    prompt, settings = "Once upon a time", {"max_tokens": 30, "temperature": 0.0}
    whole = await client.complete(prompt, ignore_eos=True, **settings)
    tokens = list(whole.sequences[0].token_ids)
    for at in (5, 6, 7):
        alone = await client.complete(prompt, stop_token_ids=[tokens[at]], logprobs=2, **settings)
        assert list(alone.sequences[0].token_ids) == tokens[: tokens.index(tokens[at]) + 1]
    await asyncio.gather(
        *(client.complete(prompt, stop_token_ids=[tokens[8 + i]], logprobs=i, **settings) for i in range(4))
    )


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(batch=st.lists(REQUESTS, min_size=1, max_size=6))
def test_anything_is_served_or_refused(small_server: Stack, batch: list[wire.GenerateRequest]) -> None:
    """No INTERNAL, no crash, nothing left in the pool. A request without a bound of its output gets a small one."""

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
