"""The limits of a tenant, over gRPC and over HTTP: it is refused with a time to come again, and no other tenant is."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import grpc.aio
import pytest
from google.rpc.error_details_pb2 import BadRequest, RetryInfo

from quire.v1 import generation_pb2 as pb
from quire.v1.generation_pb2_grpc import GenerationStub
from scheduler.core import QueueFull, TenantTerms
from scheduler.identity.identity import Identity, Role
from scheduler.identity.key_file import add_key
from scheduler.identity.verifier import Verifier
from scheduler.servers.access import Access
from scheduler.servers.admin_server import AdminServer
from scheduler.servers.generation_server import GenerationServer
from scheduler.servers.grpc_server import GrpcServer
from scheduler.servers.tokenization_server import TokenizationServer
from scheduler.tenants.settings import Tenants, TenantSettings
from tests.support.live.serving import serve_page
from tests.support.scheduler.generation_calls import collect, details
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from scheduler.text.checkpoint import Checkpoint
    from tests.support.live.served import Served

TEXT = "once upon a time"
OK = (True, 0.0)


@dataclass
class Entries:
    """Both servers in front of one engine. Each of the tenants "busy" and "quiet" has a key."""

    served: Served
    keys: dict[str, str]
    stub: GenerationStub
    session: aiohttp.ClientSession

    async def ask(self, entry: str, tenant: str, *, n: int = 1, max_tokens: int = 4) -> tuple[bool, float]:
        """Returns whether a request was served, and the seconds after which a refused one may come again."""
        key = {"authorization": f"Bearer {self.keys[tenant]}"}
        if entry == "grpc":
            return await self.ask_grpc(tenant, n=n, max_tokens=max_tokens)
        body = {"text": TEXT, "sampling": {"n": n}, "stopping": {"max_tokens": max_tokens, "ignore_eos": True}}
        async with self.session.post(f"{self.served.url}/live/completions", json=body, headers=key) as response:
            text = await response.text()
            assert response.status in (200, 429), text
            assert ("finished" in text) == (response.status == 200)
            return response.status == 200, float(response.headers.get("Retry-After", 0))

    async def ask_grpc(
        self, tenant: str, *, n: int = 1, max_tokens: int = 4, timeout_s: float | None = None
    ) -> tuple[bool, float]:
        request = pb.GenerateRequest(
            text=TEXT,
            sampling=pb.SamplingParams(n=n),
            stopping=pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
        )
        metadata = (("authorization", f"Bearer {self.keys[tenant]}"),)
        call: Any = self.stub.Generate(request, metadata=metadata, timeout=timeout_s)
        try:
            await collect(call)
        except grpc.aio.AioRpcError as error:
            return False, retry_after_s(error)
        return OK

    @asynccontextmanager
    async def in_the_queue(self, entry: str, tenant: str, count: int) -> AsyncIterator[None]:
        """Keeps `count` requests of a tenant open, in an executor that answers nothing until the block ends."""
        core = self.served.engine.core
        assert core is not None
        self.served.client.is_hanging = True
        asking = []
        for _ in range(count):
            asking.append(asyncio.create_task(self.ask(entry, tenant)))
            await until(lambda: core.num_unfinished_requests == len(asking) and core.state.batch.running)
        yield
        self.served.client.is_hanging = False
        self.served.client.lose()
        assert await asyncio.gather(*asking) == [OK] * count, "those that were accepted are served"


@asynccontextmanager
async def serving(checkpoint: Checkpoint, folder: Path, busy: TenantSettings) -> AsyncIterator[Entries]:
    """Serves over gRPC and HTTP, with these settings for the tenant "busy" and the defaults for "quiet"."""
    path = str(folder / "keys.json")
    keys = {name: add_key(path, Identity(name, name, frozenset({Role.GENERATE}))) for name in ("busy", "quiet")}
    access = Access(Verifier(path))
    tenants = Tenants(by_name={"busy": busy})
    async with serve_page(checkpoint, access, tenants) as served, aiohttp.ClientSession() as http:
        generation = GenerationServer(served.engine, served.intake, "fcfs")
        admin = AdminServer(served.engine, served.intake)
        tokenization = TokenizationServer(served.intake)
        listen = ("127.0.0.1:0", f"unix:{folder}/admin")
        server = GrpcServer(served.engine, generation, tokenization, admin, *listen, access)
        await server.start()
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield Entries(served, keys, GenerationStub(channel), http)
        await server.stop(0)


def retry_after_s(error: grpc.aio.AioRpcError) -> float:
    retry = RetryInfo()
    assert (error.code(), details(error).details[0].Unpack(retry)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
    return float(retry.retry_delay.ToTimedelta().total_seconds())


both = pytest.mark.parametrize("entry", ["grpc", "http"])


async def is_refused(entries: Entries, entry: str, **fields: int) -> bool:
    served, retry_s = await entries.ask(entry, "busy", **fields)
    return not served and retry_s > 0


@both
async def test_requests_a_minute(entry: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    async with serving(checkpoint, tmp_path, TenantSettings(requests_per_minute=2)) as entries:
        assert [await entries.ask(entry, "busy") for _ in range(2)] == [OK] * 2
        assert await is_refused(entries, entry)
        assert [await entries.ask(entry, "quiet") for _ in range(4)] == [OK] * 4


@both
async def test_tokens_a_minute_count_prompts_and_outputs(entry: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    async with serving(checkpoint, tmp_path, TenantSettings(tokens_per_minute=100)) as entries:
        assert await entries.ask(entry, "busy", max_tokens=200) == OK, "the length of an output is known at its end"
        assert await is_refused(entries, entry)
        assert [await entries.ask(entry, "quiet", max_tokens=200) for _ in range(2)] == [OK] * 2


@both
@pytest.mark.parametrize("settings", [TenantSettings(tokens_per_minute=100), TenantSettings(requests_per_minute=2)])
async def test_a_request_that_the_queue_refuses_costs_nothing(
    entry: str, settings: TenantSettings, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(checkpoint, tmp_path, settings) as entries:

        def refuse(*_: object) -> None:
            raise QueueFull("the queue is full", 0.5)

        with monkeypatch.context() as patch:
            patch.setattr(entries.served.engine, "submit", refuse)
            for _ in range(100):
                assert await is_refused(entries, entry)
        assert await entries.ask(entry, "busy", max_tokens=2) == OK


@both
async def test_sequences_that_run_at_once(entry: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    async with serving(checkpoint, tmp_path, TenantSettings(TenantTerms(max_num_seqs=1))) as entries:
        core = entries.served.engine.core
        assert core is not None
        entries.served.client.step_s = 0.005
        asking = [asyncio.create_task(entries.ask(entry, "busy", max_tokens=40)) for _ in range(3)]
        asking.append(asyncio.create_task(entries.ask(entry, "quiet", n=4, max_tokens=40)))
        most: Counter[str] = Counter()
        while not all(task.done() for task in asking):
            most |= Counter(sequence.account.name for sequence in core.state.batch.running)
            await asyncio.sleep(0.001)
        assert most == {"busy": 1, "quiet": 4}, "although eleven slots are free"
        assert await asyncio.gather(*asking) == [OK] * 4


@pytest.mark.parametrize("field", ["n", "beam_width"])
async def test_more_sequences_than_may_ever_run_are_a_bad_field(
    field: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """A prompt that is too long has another code: clients shorten theirs then, and would send the request again."""
    async with serving(checkpoint, tmp_path, TenantSettings(TenantTerms(max_num_seqs=2))) as entries:
        request = pb.GenerateRequest(text=TEXT, sampling=pb.SamplingParams(**{field: 3}))
        calls: list[Any] = [
            entries.stub.Generate(request, metadata=(("authorization", f"Bearer {entries.keys[tenant]}"),))
            for tenant in ("busy", "quiet")
        ]
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await collect(calls[0])
        bad = BadRequest()
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details(raised.value).details[0].Unpack(bad)
        assert [each.field for each in bad.field_violations] == [f"sampling.{field}"]
        await collect(calls[1])


@both
@pytest.mark.parametrize(
    "terms",
    [
        TenantTerms(max_num_seqs=1, max_waiting_prompt_tokens=8),
        TenantTerms(max_num_seqs=1, max_waiting_requests=1),
    ],
)
async def test_waiting_requests_and_their_tokens(
    entry: str, terms: TenantTerms, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """One request runs and one waits; the third would exceed the bound."""
    async with serving(checkpoint, tmp_path, TenantSettings(terms)) as entries:
        core = entries.served.engine.core
        assert core is not None
        async with entries.in_the_queue(entry, "busy", 2):
            assert await is_refused(entries, entry)
            quiet = [asyncio.create_task(entries.ask(entry, "quiet")) for _ in range(3)]
            await until(lambda: core.num_unfinished_requests == 5)
        assert await asyncio.gather(*quiet) == [OK] * 3


async def test_a_request_that_would_miss_its_deadline(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """HTTP requests have no deadline, so none is refused. The prediction is tested in tests/scheduler/engine."""
    terms = TenantTerms(max_num_seqs=1)
    async with serving(checkpoint, tmp_path, TenantSettings(terms)) as entries:
        served = entries.served
        core = served.engine.core
        assert core is not None
        served.engine._waits.predicted_s = (  # type: ignore[method-assign]
            lambda core, tenant, max_tokens, priority: 600.0 if tenant == "busy" else 0.0
        )
        async with entries.in_the_queue("grpc", "busy", 2):
            was_served, retry_s = await entries.ask_grpc("busy", timeout_s=60)
            assert not was_served
            assert 700 < retry_s < 800, "1.4 times the predicted time, without the time that it has"
            others = [("busy", None), ("busy", 6000.0), ("quiet", 60.0)]
            asking = [asyncio.create_task(entries.ask_grpc(each, timeout_s=time_s)) for each, time_s in others]
            asking.append(asyncio.create_task(entries.ask("http", "busy")))
            await until(lambda: core.num_unfinished_requests == 6)
        assert await asyncio.gather(*asking) == [OK] * 4
