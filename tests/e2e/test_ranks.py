"""`quire serve` over ranks: the outputs of one rank, and streams that survive the loss of any rank."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from quire import AsyncClient, Completion
from quire.addresses import with_port
from quire.command import quire_command
from tests.support.e2e.process import is_running
from tests.support.e2e.stack import Stack
from tests.support.e2e.streams import StreamGroup, Undisturbed, differences, mixed_jobs, outcomes
from tests.support.e2e.waiting import until

NUM_STREAMS = int(os.environ.get("NUM_STREAMS", "8"))
"""Streams that run when a rank is lost."""

JOBS = mixed_jobs(NUM_STREAMS, num_tokens=70)
STORY = "There was a little fox. Once upon a time it lived in a forest by the sea. One windy day the fox"
_ANSWER = r"(yes|no), [0-9]{2} (foxes|mice)"
_SEQS = max(16, sum(job.num_sequences for job in JOBS))


def stack_of(size: int, **flags: object) -> Stack:
    return Stack(**{"max_num_seqs": _SEQS, "step_timeout_s": 5, "tensor_parallel_size": size, **flags}).start()


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Stack]:
    stack = stack_of(1)
    yield stack
    stack.kill()


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.exhaustive)])
def divided(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """Yields a server of several ranks, with short chunks and a pool so small that sequences are preempted."""
    stack = stack_of(request.param, num_blocks=48, max_num_batched_tokens=48)
    yield stack
    stack.kill()


async def test_greedy_outputs_are_those_of_one_rank(one_rank: Stack, divided: Stack) -> None:
    """With chunked prefill, forks (n = 2), stop strings, and a pool that is too small for all at once."""
    jobs = [replace(job, options=job.options | {"temperature": 0}) for job in mixed_jobs(16, num_tokens=70)]
    async with one_rank.client() as one, divided.client() as many:
        assert differences(await outcomes(many, jobs), await outcomes(one, jobs)) == []
        assert (await many.block_map()).num_preemptions > 0, "the pool must be too small"


async def test_beams_are_those_of_one_rank(one_rank: Stack, divided: Stack) -> None:
    async with one_rank.client() as one, divided.client() as many:
        found = [await each.complete(STORY, beam_width=3, n=3, max_tokens=16) for each in (one, many)]
    own, other = ([sequence.token_ids for sequence in completion.sequences] for completion in found)
    assert len(own) == 3
    assert own == other


async def test_log_probabilities_are_those_of_one_rank(one_rank: Stack, divided: Stack) -> None:
    """All rows of a prompt make logits that rank 0 gathers."""
    async with one_rank.client() as one, divided.client() as many:
        options = {"max_tokens": 6, "temperature": 0, "logprobs": 1, "prompt_logprobs": 1}
        found = [await each.complete(STORY, **options) for each in (one, many)]
    (tokens, values), others = map(reported, found)
    assert len(values) == found[0].prompt_tokens - 1 + 6
    assert others == (tokens, pytest.approx(values, abs=1e-3))


async def test_a_prefix_is_shared_and_grammars_are_followed(divided: Stack) -> None:
    async with divided.client() as client:
        first = await client.complete(STORY, max_tokens=12, temperature=0)
        again = await client.complete(STORY, max_tokens=12, temperature=0)
        assert again.text == first.text
        assert again.cached_tokens >= 16
        answer = await client.complete(STORY, max_tokens=60, temperature=0.8, seed=3, regex=_ANSWER)
    assert re.fullmatch(_ANSWER, answer.text)


@pytest.fixture(scope="module")
def undisturbed(divided: Stack) -> Undisturbed:
    """The outcomes of this server: rounding may differ between groups of different sizes."""
    return Undisturbed()


@pytest.mark.parametrize("rank", [0, -1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_streams_survive_the_loss_of_a_rank(
    divided: Stack, undisturbed: Undisturbed, number: signal.Signals, rank: int
) -> None:
    """The whole group ends, whichever rank is lost; a new one computes the streams again."""
    async with divided.client() as client:
        expected = await undisturbed.outcomes(client, JOBS)
        streams = await started(client)
        ranks = ranks_of(divided)
        assert len(ranks) == divided.flags["tensor_parallel_size"]
        num_losses = divided.num_losses
        ranks[rank].send_signal(number)
        assert streams.num_running > 0
        assert differences(await streams.ended(), expected) == []
        assert divided.num_losses > num_losses
        await until(lambda: all_ended(ranks), "every rank of the old group has ended")
        assert {each.pid for each in ranks_of(divided)}.isdisjoint(each.pid for each in ranks)


@pytest.fixture
def joining(tmp_path: Path) -> Iterator[tuple[psutil.Process, dict[str, object]]]:
    """Yields a process that keeps a rank, as on another machine, and the flags of an executor that it can join."""
    key, listen = tmp_path / "ranks.key", with_port("127.0.0.1:0")
    key.write_text("0123456789abcdef" * 2)
    command = [*quire_command(), "rank", "--join", listen, "--ranks-key", str(key), "--num-threads", "1"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        yield psutil.Process(process.pid), {"remote_ranks": 1, "ranks_listen": listen, "ranks_key": str(key)}
        process.kill()


async def test_no_rank_outlives_a_server_that_is_killed(divided: Stack) -> None:
    """It is the last one of these tests, because it ends their server."""
    ranks = ranks_of(divided)
    assert len(ranks) == divided.flags["tensor_parallel_size"]
    divided.serve.send(signal.SIGKILL)
    await until(lambda: all_ended(ranks), "every rank has ended")


@pytest.mark.exhaustive
async def test_streams_survive_the_loss_of_a_rank_that_has_joined(
    one_rank: Stack, joining: tuple[psutil.Process, dict[str, object]]
) -> None:
    """The next group has a rank of the other machine as well, in a new process."""
    host, flags = joining
    stack = stack_of(2, **flags)
    try:
        async with one_rank.client() as one, stack.client() as client:
            expected = await outcomes(one, JOBS)
            for number in (signal.SIGKILL, signal.SIGSTOP):
                streams = await started(client)
                (rank,) = host.children()
                rank.send_signal(number)
                assert streams.num_running > 0
                assert differences(await streams.ended(), expected) == []
                await until(lambda rank=rank: all_ended([rank]), "the rank of the old group has ended")
    finally:
        stack.kill()


async def started(client: AsyncClient) -> StreamGroup:
    streams = StreamGroup(client, JOBS).start()
    await streams.until(lambda streams: streams.num_tokens >= 3 * len(JOBS))
    return streams


def reported(completion: Completion) -> tuple[list[int], list[float]]:
    """Returns the tokens of the prompt and the output that have log-probabilities, and these."""
    chosen = [each.chosen for each in (*completion.prompt_logprobs, *completion.sequences[0].logprobs)]
    return [token.token_id for token in chosen], [token.logprob for token in chosen]


async def all_ended(processes: list[psutil.Process]) -> bool:
    return not any(is_running(process.pid) for process in processes)


def ranks_of(stack: Stack) -> list[psutil.Process]:
    """Returns the processes of the executor, by rank."""
    leader = psutil.Process(stack.pid("executor"))
    return [leader, *sorted(leader.children(), key=lambda process: process.pid)]
