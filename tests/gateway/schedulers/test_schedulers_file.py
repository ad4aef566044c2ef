"""The schedulers in a file, which changes while streams are open."""

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.schedulers import schedulers as schedulers_module
from gateway.schedulers.schedulers_file import MAX_BYTES, SchedulersFile, read_addresses
from quire.channel import Connection
from quire.v1 import generation_pb2 as pb
from tests.support.certificates import Authority
from tests.support.gateway.fake_scheduler import Answer, Failure, FakeScheduler
from tests.support.gateway.rig import CHAT, Rig, content
from tests.support.waiting import until

WORDS = "".join(f"w{i} " for i in range(60))


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedulers_module, "FOLLOW_INTERVAL_S", 0.01)
    monkeypatch.setattr(schedulers_module, "LEAVE_INTERVAL_S", 0.01)


@contextmanager
def followed(rig: Rig, path: Path, *, strangers: bool = True) -> Iterator[None]:
    """Lets the gateway follow the file."""
    file = SchedulersFile(str(path))
    follow = rig.schedulers.follow(
        lambda: rig.config.connections("own", file.addresses), must_refuse_strangers=not strangers
    )
    task = asyncio.create_task(follow)
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()


@asynccontextmanager
async def another(key: str | None = None) -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler(key)
    await fake.start()
    try:
        yield fake
    finally:
        await fake.stop()


def write(path: Path, *addresses: str) -> None:
    new = path.with_suffix(".new")
    new.write_text("".join(f"{each}\n" for each in addresses))
    new.replace(path)


def addresses(rig: Rig) -> set[str]:
    return {scheduler.address for scheduler in rig.schedulers.all}


async def test_schedulers_join_and_leave(tmp_path: Path) -> None:
    path = tmp_path / "schedulers"
    async with Rig(can_change=True) as rig, another() as second:
        write(path, rig.fake.address)
        with followed(rig, path):
            write(path, rig.fake.address, second.address)
            await until(lambda: addresses(rig) == {rig.fake.address, second.address})
            await until(lambda: all(scheduler.is_ready for scheduler in rig.schedulers.all))
            write(path, second.address)
            await until(lambda: addresses(rig) == {second.address})
            status, _ = await rig.chat()
        assert status == 200
        assert (len(rig.fake.opened), len(second.opened)) == (0, 1)


@asynccontextmanager
async def stream_left_behind(path: Path) -> AsyncIterator[tuple[Rig, FakeScheduler, asyncio.Task[Any]]]:
    """Yields a gateway with a stream at a scheduler that has left, the only other scheduler, and the stream's task."""
    async with Rig(can_change=True) as rig, another() as second:
        for fake in (rig.fake, second):
            fake.words_each, fake.step_s = 60, 0.01
        write(path, rig.fake.address)
        with followed(rig, path):
            answering = asyncio.create_task(rig.events("/v1/chat/completions", CHAT))
            await until(lambda: rig.fake.opened)
            write(path, second.address)
            await until(lambda: addresses(rig) == {second.address})
            yield rig, second, answering


async def test_the_choices_of_a_scheduler_that_has_left_are_no_series_any_more(tmp_path: Path) -> None:
    async with Rig(2, can_change=True, routing="round-robin") as rig, another() as new:
        write(tmp_path / "schedulers", *(fake.address for fake in rig.fakes))
        with followed(rig, tmp_path / "schedulers"):
            refused = Failure(grpc.StatusCode.UNAVAILABLE, "the server is draining")

            async def refuse(request: pb.GenerateRequest) -> Answer:
                raise refused
                yield

            rig.fakes[0].answer = refuse
            for _ in range(2):
                assert (await rig.chat())[0] == 200
            num_second_tries = rig.schedulers.num_second_tries
            assert num_second_tries > 0
            write(tmp_path / "schedulers", rig.fakes[0].address, new.address)
            await until(lambda: rig.fakes[1].address not in {address for address, _ in rig.schedulers.chosen})
            _, page = await rig.get("/metrics")
            assert f'scheduler="{rig.fakes[1].address}"' not in page
            assert f'quire_gateway_choices_total{{reason="round-robin",scheduler="{rig.fakes[0].address}"}}' in page
            assert rig.schedulers.num_second_tries == num_second_tries, "a counter never decreases"


async def test_streams_of_a_scheduler_that_has_left_continue(tmp_path: Path) -> None:
    async with stream_left_behind(tmp_path / "schedulers") as (rig, second, answering):
        assert content(await answering) == WORDS
        assert not second.opened
        assert rig.schedulers.num_resumptions == 0
        await until(lambda: not rig.schedulers._leaving, what="its channel is closed after its last stream")


async def test_a_stream_that_breaks_off_after_its_scheduler_has_left_goes_on_at_another(tmp_path: Path) -> None:
    async with stream_left_behind(tmp_path / "schedulers") as (rig, second, answering):
        await rig.fake.stop()
        assert content(await answering) == WORDS
        assert len(second.opened) == 1


async def test_a_scheduler_that_comes_back_before_its_last_stream_has_ended_is_used_again(tmp_path: Path) -> None:
    path = tmp_path / "schedulers"
    async with stream_left_behind(path) as (rig, second, answering):
        assert set(rig.schedulers._leaving) == {rig.fake.address}
        write(path, rig.fake.address)
        await until(lambda: addresses(rig) == {rig.fake.address})
        await until(lambda: rig.schedulers.is_ready)
        status, _ = await rig.chat()
        assert (status, len(rig.fake.opened), len(second.opened)) == (200, 2, 0)
        assert content(await answering) == WORDS
        assert rig.schedulers.num_resumptions == 0


@pytest.mark.parametrize("wrong", ["", "nowhere\n", "a:1\na:1\n", "\0\n", "a:1\nb:99999\n"])
async def test_a_file_that_cannot_be_used_changes_nothing(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "schedulers"
    async with Rig(can_change=True) as rig, another() as second:
        write(path, rig.fake.address)
        with followed(rig, path):
            path.write_text(wrong)
            await asyncio.sleep(0.1)
            assert addresses(rig) == {rig.fake.address}
            path.unlink()
            await asyncio.sleep(0.1)
            assert addresses(rig) == {rig.fake.address}
            write(path, second.address)
            await until(lambda: addresses(rig) == {second.address})


async def test_a_new_scheduler_that_accepts_strangers_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "schedulers"
    async with (
        Rig(can_change=True, key="key", own_key="own") as rig,
        another() as open_to_all,
        another("key") as closed,
    ):
        write(path, rig.fake.address)
        with followed(rig, path, strangers=False):
            write(path, rig.fake.address, open_to_all.address, closed.address)
            await until(lambda: closed.address in addresses(rig))
            await asyncio.sleep(0.05)
            assert open_to_all.address not in addresses(rig)


async def test_a_scheduler_that_does_not_answer_at_the_start_joins_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that starts while one of several replicas is lost serves with the others."""
    monkeypatch.setattr(schedulers_module, "LATE_S", 0.2)
    async with another("key") as up, another("key") as late:
        await late.stop()
        async with Rig(scheduler=f"{late.address},{up.address}", own_key="key") as rig:
            assert await rig.schedulers.refuse_strangers()
            assert addresses(rig) == {up.address}
            assert (await rig.post("/v1/chat/completions", CHAT, Authorization="Bearer key"))[0] == 200
            await late.start()
            await until(lambda: addresses(rig) == {up.address, late.address})
            await until(lambda: all(scheduler.is_ready for scheduler in rig.schedulers.all))


async def test_one_scheduler_that_accepts_strangers_is_enough_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedulers_module, "LATE_S", 0.2)
    async with another("key") as closed, another() as open_to_all:
        async with Rig(scheduler=f"{closed.address},{open_to_all.address}", own_key="own") as rig:
            assert not await rig.schedulers.refuse_strangers()


async def test_a_scheduler_that_does_not_answer_holds_up_no_other(tmp_path: Path) -> None:
    path = tmp_path / "schedulers"
    async with Rig(can_change=True, key="key", own_key="own") as rig, another("key") as second:
        write(path, rig.fake.address)
        with followed(rig, path, strangers=False):
            write(path, "127.0.0.1:1", second.address)
            await until(lambda: addresses(rig) == {second.address})


def test_addresses_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "schedulers"
    path.write_text("# replicas\n10.0.0.1:50051\n\n  unix:/run/quire.sock  # here\n[::1]:7\n")
    assert read_addresses(str(path)) == ("10.0.0.1:50051", "unix:/run/quire.sock", "[::1]:7")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "names no scheduler"),
        (b"# nothing\n\n", "names no scheduler"),
        (b"a:1\nb\n", "line 2.*'b'"),
        (b"a:1\n b:1\na:1\n", "line 3.*twice"),
        (b"unix:\n", "line 1"),
        (b"\xff\xfe", "UTF-8"),
        (b"a:1\n" * MAX_BYTES, "larger"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_line(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "schedulers"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=problem) as error:
        read_addresses(str(path))
    assert str(path) in str(error.value)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ValueError, match=str(path)):
            read_addresses(str(path))
    if os.getuid():
        secret = tmp_path / "secret"
        secret.write_text("a:1")
        secret.chmod(stat.S_IWUSR)
        with pytest.raises(ValueError, match="secret"):
            read_addresses(str(secret))


def replaced(path: Path, text: str) -> str:
    """Returns what the file held before."""
    before = path.read_text()
    path.write_text(text)
    return before


async def test_a_scheduler_joins_though_the_file_of_authorities_was_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedulers_module, "JOIN_RETRY_S", 0.01)
    ca = Path(Authority.create(tmp_path).ca)
    known = ["127.0.0.1:1"]

    def connections() -> list[Connection]:
        return [Connection(address, None, False, str(ca), None) for address in known]

    schedulers = schedulers_module.Schedulers(connections(), 5.0, can_change=True)
    await schedulers.start()
    following = asyncio.create_task(schedulers.follow(connections))
    text = replaced(ca, "-----BEGIN CERTIFICATE-----")
    known.append("127.0.0.1:2")
    await until(lambda: "127.0.0.1:2" in schedulers._joining)
    await asyncio.sleep(0.1)
    replaced(ca, text)
    await until(lambda: [each.address for each in schedulers.all] == known)
    following.cancel()
    await schedulers.close()
