"""Executors that die or hang while they load, drain or compute a prompt, and requests that kill them."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from quire import AsyncClient, BlockMap, InternalError, QuireError
from tests.soak.clients import Clients
from tests.soak.jobs import jobs
from tests.support.e2e.block_maps import settled_map, until_map
from tests.support.e2e.stack import Stack
from tests.support.e2e.streams import Job, StreamGroup, differences, mixed_jobs, outcomes
from tests.support.e2e.waiting import until
from tests.support.paths import ROOT

JOBS = mixed_jobs(8)

NUM_KILLS = int(os.environ.get("NUM_KILLS", "8"))
"""Kills of executors in the longest test; with 30 it takes about four minutes."""

POISON = [5, 1663]
_POISONED = f"""
import sys
if "executor" in sys.orig_argv:
    sys.path.insert(0, {str(ROOT)!r})
    import os, signal
    from executor.device.runner import ModelRunner
    execute = ModelRunner.execute

    def poisoned(runner, plan, *rest):
        if any(list(admission.token_ids[:2]) == {POISON} for admission in plan.admissions):
            os.kill(os.getpid(), signal.SIGKILL)
        return execute(runner, plan, *rest)

    ModelRunner.execute = poisoned
"""
_POISONED_DECODES = f"""
import sys
if "executor" in sys.orig_argv:
    sys.path.insert(0, {str(ROOT)!r})
    import os, signal, time
    from executor.device.runner import ModelRunner
    execute, slots = ModelRunner.execute, set()

    def poisoned(runner, plan, *rest):
        slots.difference_update(plan.retired_slots.tolist())
        if slots:
            rest[0]()  # lets the results of the step before leave
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        slots.update(admission.slot for admission in plan.admissions if list(admission.token_ids[:2]) == {POISON})
        return execute(runner, plan, *rest)

    ModelRunner.execute = poisoned
"""
"""Kills the executor in the first step after the poison's known tokens, when the token of these has been sent."""


@pytest.fixture(scope="module")
def served_stack() -> Iterator[Stack]:
    with Stack(max_num_seqs=16, max_num_batched_tokens=16) as stack:
        yield stack


@pytest.fixture
def served(served_stack: Stack) -> Stack:
    """Returns a running `quire serve`, whose steps compute 16 tokens at most."""
    served_stack.show_log()
    return served_stack


async def started_streams(client: AsyncClient) -> StreamGroup:
    streams = StreamGroup(client, JOBS).start()
    await streams.until(lambda streams: streams.all_have(3))
    return streams


async def signalled(stack: Stack, number: signal.Signals, *before: int) -> int:
    """Sends a signal to the executor as soon as there is a process other than those before; returns its id."""
    while (pid := stack.pid("executor")) is None or pid in before:  # noqa: ASYNC110 - no event announces it
        await asyncio.sleep(0.001)
    os.kill(pid, number)  # not found a second time: a process that has just started has no command line during its exec
    return pid


async def killed(stack: Stack, *before: int) -> int:
    return await signalled(stack, signal.SIGKILL, *before)


async def test_an_executor_killed_while_it_loads_is_restarted(served: Stack) -> None:
    async with served.client() as client:
        expected = await outcomes(client, JOBS)
        streams = await started_streams(client)
        first = await killed(served)
        await killed(served, first)
        assert differences(await streams.ended(), expected) == []


def long_prompts(salt: str) -> list[Job]:
    """Returns jobs that take a hundred steps each before their first token. Those of another salt share no KV."""
    options = {"temperature": 0, "max_tokens": 5, "cache_salt": salt}
    return [Job([number + i % 1000 for i in range(1600)], options) for number in range(10, 14)]


def is_in_prefill(found: BlockMap) -> bool:
    return any(0 < sequence.num_computed_tokens < sequence.num_prompt_tokens for sequence in found.sequences)


async def test_an_executor_killed_in_mid_prefill_is_restarted(served: Stack) -> None:
    async with served.client() as client:
        expected = await outcomes(client, long_prompts("undisturbed"))
        streams = StreamGroup(client, long_prompts("disturbed")).start()
        await until_map(client, is_in_prefill)
        served.send("executor", signal.SIGSTOP)
        assert is_in_prefill(await settled_map(client))
        served.send("executor", signal.SIGKILL)
        assert differences(await streams.ended(), expected) == []


@pytest.mark.exhaustive
async def test_an_executor_stopped_while_it_loads_is_replaced() -> None:
    with Stack(load_timeout_s=15) as stack:
        async with stack.client() as client:
            expected = await outcomes(client, JOBS)
            streams = await started_streams(client)
            first = await killed(stack)
            stopped = await signalled(stack, signal.SIGSTOP, first)
            await until(lambda: stack.pid("executor") not in (None, first, stopped))
            assert differences(await streams.ended(), expected) == []
        assert "executor has not printed a line for 15 s: killed" in stack.log()


@pytest.mark.exhaustive
@pytest.mark.parametrize("are_all_stopped", [False, True])
async def test_no_service_is_replaced_because_the_supervisor_or_the_machine_was_suspended(
    are_all_stopped: bool,
) -> None:
    with Stack(step_timeout_s=2) as stack:
        before = [stack.pid("scheduler"), stack.pid("executor")]
        stopped = [stack.serve.pid, *(pid for pid in before if are_all_stopped and pid)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(3 * 2)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        await stack.until_health("SERVING")
        await asyncio.sleep(2 * 2)  # in which a service that fails its checks is killed
        assert [stack.pid("scheduler"), stack.pid("executor")] == before


async def test_an_executor_killed_while_the_scheduler_drains_is_restarted(served_stack: Stack) -> None:
    """It runs last, because it ends the services."""
    stack = served_stack
    async with stack.client() as client:
        expected = await outcomes(client, JOBS)
        stack.send("executor", signal.SIGSTOP)  # so that no stream ends before the scheduler drains
        streams = StreamGroup(client, JOBS).start()
        await until_map(client, lambda found: len(found.sequences) + found.num_waiting >= len(JOBS))
        stack.serve.send(signal.SIGTERM)
        await stack.until_health("NOT_SERVING")
        stack.send("executor", signal.SIGKILL)
        assert differences(await streams.ended(), expected) == []
        assert await stack.ended(stack.serve) == 0


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
async def test_kills_and_a_poison_request_lose_no_other_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(_POISONED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    random, innocent, ended = Random(1), jobs(30, 1), asyncio.Event()
    with Stack() as stack:
        async with stack.client() as client:
            clients = Clients(innocent, await outcomes(client, innocent), seed=1)
            others = asyncio.create_task(clients.run(stack.grpc, 8, ended, 1200.0))
            poison = asyncio.create_task(client.complete(POISON, max_tokens=5, timeout_s=1200.0))
            pids: list[int] = []
            for _ in range(NUM_KILLS):
                pids.append(await killed(stack, *pids))
                await asyncio.sleep(random.uniform(0.0, 5.0))
            with pytest.raises(QuireError, match="executors in a row were lost while it ran"):
                await poison
            ended.set()
            await others
        assert clients.failures == []
        assert stack.serve.return_code is None
        assert len(set(pids)) == NUM_KILLS


@pytest.mark.exhaustive
async def test_a_request_whose_decodes_kill_executors_fails_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each executor yields a token of it, and one of each stream beside it."""
    (tmp_path / "sitecustomize.py").write_text(_POISONED_DECODES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Stack() as stack:
        async with stack.client() as client:
            expected = await outcomes(client, JOBS)
            streams = await started_streams(client)
            poison = StreamGroup(client, [Job(POISON, {"temperature": 0, "max_tokens": 12, "ignore_eos": True})])
            (failure,) = await poison.start().failures()
            assert isinstance(failure, InternalError), failure
            assert "executors in a row were lost while it ran" in str(failure)
            assert poison.num_tokens == 6, "one from each executor"
            assert differences(await streams.ended(), expected) == []
        await until(lambda: stack.num_losses == 6)
        assert stack.serve.return_code is None
