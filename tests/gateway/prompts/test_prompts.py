"""The gateway finds the same blocks of a prompt as the scheduler that will compute it."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from gateway.prompts.prompts import Prompts
from gateway.routing.fair_line import Tenant
from gateway.schedulers.stream import Caller
from gateway.schedulers.watch import DigestScheme
from quire.v1 import generation_pb2 as pb
from quire.v1.generation_pb2_grpc import GenerationStub
from scheduler.core.prefix_index import PrefixIndex

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gateway.schedulers.schedulers import Schedulers
    from scheduler.text.checkpoint import Checkpoint
    from tests.support.scheduler.servers import Served, Servers

SCHEME = DigestScheme(PrefixIndex.SCHEME, "tiny", 4)
LONG = "hello fox, and hello again " * 20
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


def known(scheme: DigestScheme | None = SCHEME, tenant: str | None = "default") -> Schedulers:
    """Returns schedulers that make digests in this way, and know all clients as of this tenant."""

    async def tenant_of(authorization: str) -> Tenant | None:
        return None if tenant is None else Tenant(tenant)

    info = SimpleNamespace(max_model_len=100_000)
    return cast("Schedulers", SimpleNamespace(digest_scheme=scheme, info=info, tenant_of=tenant_of))


@pytest.fixture
async def prompts(checkpoint: Checkpoint) -> AsyncIterator[Prompts]:
    path = checkpoint.directory / "tokenizer_config.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    found = Prompts.load(str(checkpoint.directory), None, frozenset())
    yield found
    await found.close()


def chat(*contents: str) -> pb.GenerateRequest:
    request = pb.GenerateRequest()
    for content in contents:
        request.chat.messages.add(role="user", content=content)
    return request


async def digests_of(served: Served, request: pb.GenerateRequest) -> tuple[int, list[int]]:
    """Returns the number of tokens and the digests of the request, as the core gets it."""
    call = GenerationStub(served.channel).Generate(request)
    reading = asyncio.create_task(call.read())
    submitted = await served.engine.next_request()
    core = submitted.request
    call.cancel()
    reading.cancel()
    num_full = (len(core.prompt_token_ids) - 1) // SCHEME.block_size
    index = PrefixIndex(SCHEME.block_size, SCHEME.namespace)
    chain = index.extend_chain([], core.prompt_token_ids, num_full, core.cache_salt)
    return len(core.prompt_token_ids), [int.from_bytes(digest[:8]) for digest in chain]


@pytest.mark.parametrize(
    "request_",
    [
        pb.GenerateRequest(text=LONG),
        pb.GenerateRequest(text=LONG, cache_salt="pepper"),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(50, 99))),
        pb.GenerateRequest(text="a"),
        chat(LONG, "and now?"),
    ],
    ids=["text", "salt", "ids", "short", "chat"],
)
async def test_digests_are_those_of_the_core(request_: pb.GenerateRequest, prompts: Prompts, servers: Servers) -> None:
    served = await servers.start()
    prompt = await prompts.read(request_, Caller(), known())
    num_tokens, digests = await digests_of(served, request_)
    assert (prompt.num_tokens, list(prompt.digests)) == (num_tokens, digests)
    assert prompt.block_size == SCHEME.block_size


async def test_another_tenant_or_salt_shares_no_digest(prompts: Prompts) -> None:
    plain = await prompts.read(pb.GenerateRequest(text=LONG), Caller(), known())
    salted = await prompts.read(pb.GenerateRequest(text=LONG, cache_salt="x"), Caller(), known())
    other = await prompts.read(pb.GenerateRequest(text=LONG), Caller("Bearer k"), known(tenant="other"))
    assert len(plain.digests) > 20
    assert set(plain.digests).isdisjoint(salted.digests)
    assert set(plain.digests).isdisjoint(other.digests)


async def test_a_stream_that_is_continued_is_found_with_its_output(prompts: Prompts) -> None:
    request = pb.GenerateRequest(text="whatever", resumable=True)
    request.resume.continuation.prompt.ids.extend(range(20))
    request.resume.sequences.add(index=0, token_ids=range(20, 31))
    whole = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(31)))
    assert await digests(prompts, request) == await digests(prompts, whole)


async def digests(prompts: Prompts, request: pb.GenerateRequest) -> list[int]:
    return list((await prompts.read(request, Caller(), known())).digests)


async def test_a_request_that_reads_no_cache_has_a_length_and_no_digests(prompts: Prompts) -> None:
    prompt = await prompts.read(
        pb.GenerateRequest(text=LONG, output=pb.OutputParams(prompt_logprobs=1)), Caller(), known()
    )
    assert prompt.num_tokens
    assert not prompt.digests


@pytest.mark.parametrize(
    ("request_", "schedulers"),
    [
        (pb.GenerateRequest(text=LONG), known(scheme=None)),
        (pb.GenerateRequest(text=LONG), known(scheme=DigestScheme("of a later version", "tiny", 4))),
        (pb.GenerateRequest(text=LONG), known(scheme=DigestScheme(PrefixIndex.SCHEME, "", 0))),
        (pb.GenerateRequest(text=LONG), known(tenant=None)),
        (pb.GenerateRequest(), known()),
        (chat(), known()),
        (pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(content="has no role")])), known()),
        (pb.GenerateRequest(text="x" * 500_000), known()),
    ],
)
async def test_what_cannot_be_read_is_left_to_its_scheduler(
    request_: pb.GenerateRequest, schedulers: Schedulers, prompts: Prompts
) -> None:
    prompt = await prompts.read(request_, Caller(), schedulers)
    assert (prompt.num_tokens, prompt.digests) == (None, ())
    assert prompt.affinity_key
