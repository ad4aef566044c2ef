"""A scheduler that dies costs its clients a pause: their streams continue with the next one, token for token."""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bench.overhead.survival_jobs import comparable, differences, jobs
from quire import AsyncClient, Completion, UnavailableError
from tests.support.e2e.process import is_running
from tests.support.e2e.stack import Stack
from tests.support.e2e.streams import StreamGroup, mixed_jobs, outcomes
from tests.support.e2e.streams import differences as different_outputs
from tests.support.e2e.waiting import until

NUM_STREAMS = 16
JOBS = mixed_jobs(NUM_STREAMS)
LONG_JOBS = mixed_jobs(8, num_tokens=600)  # most still run when a busy machine gets to the signal
KINDS = jobs(14, num_tokens=150, seed=1)


@pytest.fixture(scope="module")
def served_stack() -> Iterator[Stack]:
    with Stack(max_num_seqs=64) as stack:
        yield stack


@pytest.fixture
def served(served_stack: Stack) -> Stack:
    served_stack.show_log()
    return served_stack


async def kill(stack: Stack) -> None:
    """Kills the scheduler and waits for its successor. The executor stops meanwhile, so that no stream can end."""
    stack.send("executor", signal.SIGSTOP)
    try:
        await replaced(stack, signal.SIGKILL)
    finally:
        stack.send("executor", signal.SIGCONT)


async def replaced(stack: Stack, number: signal.Signals) -> None:
    """Sends a signal to the scheduler and waits for its successor."""
    ended = stack.send("scheduler", number)

    async def has_successor() -> bool:
        return stack.pid("scheduler") not in (None, ended)

    await until(has_successor, "another scheduler runs")


async def test_streams_survive_a_killed_scheduler(served: Stack) -> None:
    async with served.client() as client:
        expected = await outcomes(client, JOBS)
        executor = served.pid("executor")
        for _ in range(2):
            streams = StreamGroup(client, JOBS).start()
            await streams.until(lambda streams: streams.all_have(5))
            before = client.num_resumptions
            assert streams.most_run
            await kill(served)
            assert different_outputs(await streams.ended(), expected) == []
            assert client.num_resumptions - before >= NUM_STREAMS / 2
        assert served.pid("executor") == executor


async def test_every_kind_of_request_survives_a_killed_scheduler(served: Stack) -> None:
    """Text, reasons, usage, log-probabilities and scores are compared as well."""
    async with served.client() as client:
        expected = await completions(client)
        tasks = asyncio.create_task(completions(client))
        for _ in range(3):
            await asyncio.sleep(0.15)
            await kill(served)
            await served.until_health("SERVING")
        actual = await tasks
        assert client.num_resumptions > 0
    wrong = {job.kind: list(differences(*pair)) for job, *pair in zip(KINDS, actual, expected, strict=True)}
    assert {kind: lines for kind, lines in wrong.items() if lines} == {}


async def completions(client: AsyncClient) -> Sequence[Completion]:
    calls = [client.complete(job.prompt, **job.options) for job in KINDS]
    return [comparable(each) for each in await asyncio.gather(*calls)]


async def test_a_synchronous_client_resumes(served: Stack) -> None:
    job = KINDS[2]
    await served.until_health("SERVING")
    async with served.client() as observer:

        async def runs() -> bool:
            return (await observer.pool_summary()).num_running > 0

        with served.sync_client() as client:
            expected = await asyncio.to_thread(client.complete, job.prompt, **job.options)
            task = asyncio.create_task(asyncio.to_thread(client.complete, job.prompt, **job.options))
            await until(runs, "the request runs")
            await kill(served)
            assert list(differences(comparable(await task), comparable(expected))) == []
            assert client.num_resumptions == 1


async def test_requests_wait_for_a_scheduler_that_comes_back(served: Stack) -> None:
    await served.until_health("SERVING")
    async with served.client() as client:
        expected = await outcomes(client, JOBS[:1])
        killed = served.send("scheduler", signal.SIGKILL)
        await until(lambda: not_running(killed), "the scheduler has ended")
        assert different_outputs(await outcomes(client, JOBS[:1]), expected) == []
        assert client.num_resumptions == 1


async def generated(stack: Stack, *, is_disturbed: bool = False) -> tuple[bytes, str]:
    """Returns what `quire generate` prints, and its notes. A disturbed run loses its scheduler after some text."""
    words = [sys.executable, "-m", "quire", "generate", "--address", stack.grpc, "--n", "2", "--seed", "5"]
    words += ["--max-tokens", "1000", "--ignore-eos", "--logprobs", "1", "--stats", "Once upon a time"]
    process = await asyncio.create_subprocess_exec(*words, stdout=PIPE, stderr=PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    text = await process.stdout.readexactly(60)
    if is_disturbed:
        stack.send("scheduler", signal.SIGKILL)
    rest, notes = await asyncio.gather(process.stdout.read(), process.stderr.read())
    assert await process.wait() == 0
    return text + rest, notes.decode()


async def test_generate_prints_the_same_text_when_the_scheduler_is_killed(served: Stack) -> None:
    await served.until_health("SERVING")
    text, notes = await generated(served)
    assert "broke off" not in notes
    assert len(text) > 3000  # the scheduler is killed long before its last tokens
    same_text, other_notes = await generated(served, is_disturbed=True)
    assert same_text == text
    lines = other_notes.splitlines()
    assert [line for line in lines if not line.startswith("quire: ")] == notes.splitlines()
    assert "the stream broke off" in other_notes
    assert lines.count("quire: the stream continues") == 1


async def test_a_request_fails_at_once_where_no_server_ever_was(tmp_path: Path) -> None:
    """Only a client that knows the server expects it back."""
    async with AsyncClient(f"unix:{tmp_path}/nothing.sock") as stranger:
        with pytest.raises(UnavailableError) as caught:
            await stranger.complete("Once upon a time", max_tokens=1)
        assert stranger.num_resumptions == 0
    assert "tried again" not in str(caught.value)


async def not_running(pid: int) -> bool:
    return not is_running(pid)


@pytest.mark.exhaustive
async def test_streams_survive_a_scheduler_that_is_stopped() -> None:
    with Stack(step_timeout_s=4) as stack:
        async with stack.client() as client:
            expected = await outcomes(client, LONG_JOBS)
            streams = StreamGroup(client, LONG_JOBS).start()
            await streams.until(lambda streams: streams.all_have(5))
            assert streams.most_run
            await replaced(stack, signal.SIGSTOP)
            assert different_outputs(await streams.ended(), expected) == []
            assert client.num_resumptions > 0


@pytest.mark.exhaustive
async def test_streams_survive_a_new_scheduler_for_an_old_one() -> None:
    """SIGTERM ends the streams that are not over within the drain timeout."""
    with Stack(apart=True, drain_timeout_s=0.2) as stack:
        async with stack.client() as client:
            expected = await outcomes(client, LONG_JOBS)
            streams = StreamGroup(client, LONG_JOBS).start()
            await streams.until(lambda streams: streams.all_have(5))
            assert streams.most_run
            await stack.ended(stack.scheduler, signal.SIGTERM)
            assert streams.num_running > 0
            stack.launch_scheduler()
            assert different_outputs(await streams.ended(), expected) == []
            assert client.num_resumptions > 0
