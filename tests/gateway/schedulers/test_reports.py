"""The gateway follows what schedulers report, and chooses by it. Reports may be lost, late, or never come."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from gateway.routing.choice import Prompt
from gateway.schedulers import scheduler as scheduler_module
from gateway.schedulers import watch as watch_module
from gateway.schedulers.affinity import affinity_key
from quire.v1 import generation_pb2 as pb
from quire.v1 import replica_pb2 as replica_pb
from tests.support.gateway.rig import Rig, content
from tests.support.waiting import until

if TYPE_CHECKING:
    from gateway.schedulers.schedulers import Schedulers
    from gateway.schedulers.stream import Caller
    from tests.support.gateway.fake_scheduler import FakeScheduler

BLOCK_SIZE = 16


class WordPrompts:
    """Takes each character of a text for a block: its digest is the number of the character and of those before it."""

    async def read(self, request: pb.GenerateRequest, caller: Caller, schedulers: Schedulers) -> Prompt:
        digests = blocks(request.text)
        return Prompt(affinity_key(request), BLOCK_SIZE * len(digests) + 1, digests, BLOCK_SIZE)


def blocks(text: str) -> list[int]:
    return [hash(text[: i + 1]) % 2**63 for i in range(len(text))]


def packed(digests: list[int]) -> bytes:
    return b"".join(digest.to_bytes(8) for digest in digests)


def load(**fields: Any) -> replica_pb.ReplicaLoad:
    values: dict[str, Any] = {"state": pb.SERVER_STATE_SERVING, "prefill_s_per_token": 1e-3} | fields
    return replica_pb.ReplicaLoad(**values)


def snapshot(text: str = "", number: int = 0, **fields: Any) -> replica_pb.WatchResponse:
    held = replica_pb.PrefixSnapshot(
        sequence_number=number, digests=packed(blocks(text)), scheme="words", block_size=BLOCK_SIZE
    )
    return replica_pb.WatchResponse(load=load(**fields), snapshot=held)


def events(first: int, published: str = "", forgotten: str = "", **fields: Any) -> replica_pb.WatchResponse:
    changes = replica_pb.PrefixEvents(
        first_sequence_number=first, published=packed(blocks(published)), forgotten=packed(blocks(forgotten))
    )
    return replica_pb.WatchResponse(load=load(**fields), events=changes)


class ReportRig(Rig):
    """A rig whose fake schedulers report to routers."""

    def __init__(self, num_fakes: int = 2, **config: Any) -> None:
        super().__init__(num_fakes, prompts=WordPrompts(), **config)
        for fake in self.fakes:
            fake.reports = asyncio.Queue()
            fake.reports.put_nowait(snapshot())

    async def watched(self) -> None:
        await until(lambda: all(each.watch.is_live for each in self.schedulers.all))

    def known(self, fake: FakeScheduler) -> int:
        (found,) = (each for each in self.schedulers.all if each.address == fake.address)
        return found.num_known_blocks

    def report(self, fake: FakeScheduler, message: replica_pb.WatchResponse) -> None:
        assert fake.reports is not None
        fake.reports.put_nowait(message)

    async def begun(self, num_words: int) -> tuple[asyncio.Task[list[Any]], FakeScheduler, list[FakeScheduler]]:
        """Begins a stream of so many words; returns it, the scheduler that has it, and the others."""
        for fake in self.fakes:
            fake.words_each, fake.step_s = num_words, 0.005
        streaming = asyncio.create_task(self.events("/v1/completions", {"prompt": "hi"}))
        await until(lambda: any(fake.opened for fake in self.fakes))
        first, *others = sorted(self.fakes, key=lambda fake: -len(fake.opened))
        return streaming, first, others

    async def chosen(self, text: str, times: int = 1) -> Counter[int]:
        """Sends the prompt; returns how often each fake has got it."""
        before = [len(fake.opened) for fake in self.fakes]
        for _ in range(times):
            assert (await self.complete(text))[0] == 200
        return +Counter({i: len(fake.opened) - before[i] for i, fake in enumerate(self.fakes)})


async def test_a_prompt_goes_where_its_beginning_is_cached() -> None:
    async with ReportRig(3) as rig:
        await rig.watched()
        for i, text in enumerate(("abcdefgh", "ABCDEFGH", "01234567")):
            rig.report(rig.fakes[i], events(1, text))
        await until(lambda: all(rig.known(fake) == 8 for fake in rig.fakes))
        for i, text in enumerate(("abcdefgh!", "ABCDEFGH!", "01234567!")):
            assert await rig.chosen(text, times=5) == {i: 5}
        assert sum(number for (_, reason), number in rig.schedulers.chosen.items() if reason == "cost") == 15


async def test_a_long_queue_outweighs_a_cached_beginning() -> None:
    async with ReportRig(2) as rig:
        await rig.watched()
        rig.report(rig.fakes[0], events(1, "abcdefgh", queued_tokens=100_000))
        await until(lambda: rig.known(rig.fakes[0]) == 8)
        assert await rig.chosen("abcdefgh!", times=5) == {1: 5}


async def test_what_is_forgotten_counts_no_more() -> None:
    async with ReportRig(2) as rig:
        await rig.watched()
        rig.report(rig.fakes[0], events(1, "abcd"))
        await until(lambda: rig.known(rig.fakes[0]) == 4)
        rig.report(rig.fakes[0], events(5, "", "abcd"))
        await until(lambda: rig.known(rig.fakes[0]) == 0)


async def test_a_scheduler_without_an_executor_does_not_say_how_digests_are_made() -> None:
    """Requests would otherwise be routed as if no scheduler reported its cached prompts."""
    rig = ReportRig(2)
    rig.fakes[0].reports = asyncio.Queue()
    rig.report(rig.fakes[0], replica_pb.WatchResponse(load=load(), snapshot=replica_pb.PrefixSnapshot()))
    async with rig:
        await rig.watched()
        scheme = rig.schedulers.digest_scheme
        assert scheme is not None
        assert scheme.name == "words"


async def test_a_gap_in_the_events_leads_to_a_new_snapshot() -> None:
    async with ReportRig(2) as rig:
        await rig.watched()
        fake = rig.fakes[0]
        rig.report(fake, events(1, "abcd"))
        rig.report(fake, events(99, "lost"))
        await until(lambda: len(fake.watches) == 2)
        rig.report(fake, snapshot("wxyz!", 120))
        await until(lambda: rig.known(fake) == 5)
        assert rig.schedulers.all[0].watch.num_resyncs == 1
        assert len(set(fake.watches)) == 1, "a router keeps its id"


async def test_a_scheduler_without_reports_gets_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its load is what it answers once a second, and the choice among all is still bounded."""
    monkeypatch.setattr(watch_module, "REFUSED_RETRY_S", 0.05)
    async with ReportRig(2) as rig:
        await until(lambda: rig.schedulers.all[0].watch.is_live)
        rig.fakes[1].reports = None
        await rig.fakes[1].stop()
        await rig.fakes[1].start()
        await until(lambda: not rig.schedulers.all[1].watch.is_live and rig.schedulers.all[1].is_ready)
        found = await rig.chosen("abc", times=20)
        assert sum(found.values()) == 20
        rig.fakes[1].reports = asyncio.Queue()
        rig.report(rig.fakes[1], snapshot("abc"))
        await until(lambda: rig.known(rig.fakes[1]) == 3)


async def test_own_choices_count_before_the_next_report() -> None:
    """Requests that come at once must not all go to the replica that was idle when it last reported."""
    async with ReportRig(4) as rig:
        await rig.watched()
        for fake in rig.fakes:
            fake.words_each, fake.step_s = 50, 0.01
        await asyncio.gather(*(rig.complete(f"prompt {i}" + "x" * 20) for i in range(20)))
        assert min(len(fake.opened) for fake in rig.fakes) >= 3


async def test_ties_do_not_go_to_the_first_one() -> None:
    """The complaint is sglang#32983: all requests to an idle fleet went to worker 0."""
    async with ReportRig(3) as rig:
        await rig.watched()
        found = Counter[int]()
        for i in range(60):
            found += await rig.chosen(f"{i} is new")
        assert min(found[i] for i in range(3)) >= 5


async def test_an_unhealthy_replica_gets_nothing_and_skews_nothing() -> None:
    """The complaint is vllm-project/router#254: an unhealthy worker's load skewed the balance."""
    async with ReportRig(3) as rig:
        await rig.watched()
        rig.report(rig.fakes[0], events(1, "abcdefgh"))
        await until(lambda: rig.known(rig.fakes[0]) == 8)
        await rig.fakes[0].stop()
        await until(lambda: not rig.schedulers.all[0].is_ready)
        found = Counter[int]()
        for i in range(40):
            found += await rig.chosen(f"{i} abcdefgh")
        assert found[0] == 0
        assert min(found[1], found[2]) >= 5
        assert rig.known(rig.fakes[0]) == 0, "its cache is not what it was when it comes back"


async def test_one_replica_does_not_get_everything() -> None:
    """The complaint is vllm-project/router#179: one engine of eight got all requests."""
    async with ReportRig(8) as rig:
        await rig.watched()
        rig.report(rig.fakes[3], events(1, "system prompt"))
        await until(lambda: rig.known(rig.fakes[3]) == 13)
        for fake in rig.fakes:
            fake.words_each, fake.step_s = 100, 0.01
        await asyncio.gather(*(rig.complete(f"system prompt{'?' * 200}{i}") for i in range(64)))
        assert max(len(fake.opened) for fake in rig.fakes) < 32


async def test_a_second_router_needs_nothing_of_the_first() -> None:
    """The complaint is gateway-api-inference-extension#2102: state in one router forbade a second one.

    The second begins while the first serves, learns the same from the replicas, and serves alone when the first ends.
    """
    async with ReportRig(2) as first:
        await first.watched()
        addresses = ",".join(fake.address for fake in first.fakes)
        for i, text in enumerate(("abcdefgh", "ABCDEFGH")):
            first.report(first.fakes[i], events(1, text))
        assert await _after(first, "abcdefgh!") == {0: 5}
        for fake in first.fakes:
            fake.reports = asyncio.Queue()
        async with Rig(scheduler=addresses, prompts=WordPrompts()) as second:
            for i, text in enumerate(("abcdefgh", "ABCDEFGH")):
                first.report(first.fakes[i], snapshot(text, 8))
            await until(lambda: all(each.num_known_blocks == 8 for each in second.schedulers.all))
            await first.server.stop()
            await first.schedulers.close()
            before = [len(fake.opened) for fake in first.fakes]
            for _ in range(5):
                assert (await second.complete("ABCDEFGH!"))[0] == 200
            assert [len(fake.opened) - n for fake, n in zip(first.fakes, before, strict=True)] == [0, 5]
            assert len({router for fake in first.fakes for router in fake.watches}) == 2


async def _after(rig: ReportRig, text: str) -> Counter[int]:
    await until(lambda: all(rig.known(fake) == 8 for fake in rig.fakes))
    return await rig.chosen(text, times=5)


async def test_a_lost_gateway_loses_no_token_of_a_client_that_goes_to_another() -> None:
    """The client continues its stream at a second gateway with what it has received (see tests/gateway/rpc)."""
    async with ReportRig(2) as first:
        await first.watched()
        async with Rig(scheduler=",".join(fake.address for fake in first.fakes)) as second:
            texts = [content(await each.events("/v1/completions", {"prompt": "hi"})) for each in (first, second)]
    assert texts[0] == texts[1] == "w0 w1 w2 "


async def test_streams_of_a_draining_replica_move_and_lose_no_token() -> None:
    async with ReportRig(2) as rig:
        await rig.watched()
        for fake in rig.fakes:
            fake.words_each, fake.step_s = 100, 0.005
        streaming = [asyncio.create_task(rig.events("/v1/completions", {"prompt": f"p{i}"})) for i in range(8)]
        await until(lambda: sum(len(fake.opened) for fake in rig.fakes) == 8)
        victim, other = sorted(rig.fakes, key=lambda fake: -len(fake.opened))
        num_moved = len(victim.opened)
        await asyncio.sleep(0.05)
        rig.report(victim, replica_pb.WatchResponse(load=load(state=pb.SERVER_STATE_DRAINING, moves_streams=True)))
        expected = "".join(f"w{i} " for i in range(100))
        assert [content(await stream) for stream in streaming] == [expected] * 8
        assert len(victim.cancelled) == num_moved
        assert len(other.opened) == 8
        assert rig.schedulers.chosen[other.address, "moved"] == num_moved


async def test_streams_do_not_move_without_another_replica() -> None:
    async with ReportRig(2) as rig:
        await rig.watched()
        await rig.fakes[1].stop()
        await until(lambda: not rig.schedulers.all[1].is_ready)
        rig.fakes[0].words_each, rig.fakes[0].step_s = 60, 0.005
        streaming = asyncio.create_task(rig.events("/v1/completions", {"prompt": "hi"}))
        await until(lambda: rig.fakes[0].opened)
        rig.report(
            rig.fakes[0], replica_pb.WatchResponse(load=load(state=pb.SERVER_STATE_DRAINING, moves_streams=True))
        )
        assert content(await streaming) == "".join(f"w{i} " for i in range(60))
        assert not rig.fakes[0].cancelled


async def test_streams_leave_a_replica_whose_executor_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "MOVE_AFTER_S", 0.05)
    async with ReportRig(2) as rig:
        await rig.watched()
        streaming, victim, (other,) = await rig.begun(400)
        waiting = load(state=pb.SERVER_STATE_WAITING_FOR_EXECUTOR)
        rig.report(victim, replica_pb.WatchResponse(load=waiting))
        assert content(await streaming) == "".join(f"w{i} " for i in range(400))
        assert len(other.opened) == 1


@pytest.mark.parametrize(
    "message",
    [
        replica_pb.WatchResponse(),
        replica_pb.WatchResponse(snapshot=replica_pb.PrefixSnapshot(digests=b"123")),
        replica_pb.WatchResponse(load=load(prefill_s_per_token=-1.0, decode_step_s=float("nan"))),
        replica_pb.WatchResponse(load=load(state=77, num_running=2**32 - 1, queued_tokens=2**64 - 1)),
        replica_pb.WatchResponse(load=load(num_received=2**64 - 1)),
    ],
)
async def test_a_strange_report_stops_nothing(message: replica_pb.WatchResponse) -> None:
    async with ReportRig(2) as rig:
        await rig.watched()
        rig.report(rig.fakes[0], message)
        rig.report(rig.fakes[0], snapshot("abcd", 50))
        await until(lambda: rig.known(rig.fakes[0]) == 4)
        assert (await rig.complete("abcd!"))[0] == 200


@pytest.mark.parametrize("policy", ["cost", "ring", "least-loaded", "round-robin"])
async def test_every_policy_serves_and_is_counted(policy: str) -> None:
    async with ReportRig(2, routing=policy) as rig:
        await rig.watched()
        found = await rig.chosen("abc", times=10)
        assert {reason for _, reason in rig.schedulers.chosen} == {policy}
        if policy == "round-robin":
            assert found == {0: 5, 1: 5}
        if policy == "ring":
            assert max(found.values()) == 10
        _, page = await rig.get("/metrics")
    assert f'reason="{policy}"' in page
    assert "quire_gateway_prefix_resyncs_total" in page
