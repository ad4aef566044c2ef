"""Ranks in processes of their own: the same bits as one process that sums by hand, and one end for all of them."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from executor.errors import CheckpointError, ConfigError, RankLost
from executor.parallel import group
from executor.parallel.member import Member, start_member, start_worker
from planning.config_file import read_model_shape
from quire.signals import end_signals
from tests.support.executor.checkpoints import make_checkpoint
from tests.support.executor.neighbours import logits_of
from tests.support.executor.plan_driver import PlanDriver, generate
from tests.support.executor.poison import Poison, run_batch
from tests.support.executor.virtual_ranks import virtual_runner
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from torch import Tensor

    from executor.loading import LoadedModel

TINY = ROOT / "models" / "tiny"
LENGTHS = (1, 2, 17, 40)
WIDE = {"kernels": "auto", "max_num_seqs": 70, "num_blocks": 1200, "max_num_batched_tokens": 512}
_WAIT_S = 60.0

# One family for each way in which shares differ: biases, tied embeddings, positions that depend on the length, windows
# of all layers and of some, and normalized heads. test_virtual_ranks.py divides all families, in one process.
_CASES = [
    ("llama-biases", 2),
    ("qwen3", 4),
    *(
        pytest.param(name, 2, marks=pytest.mark.exhaustive)
        for name in ("llama-tied", "llama-dynamic", "mistral-window", "qwen2-window")
    ),
]


def run_steps(driver: PlanDriver, num_steps: int) -> None:
    for _ in range(num_steps):
        driver.step()


class CollectiveMeter:
    """Counts the collectives of rank 0 and the bytes that it sends, and passes them on to gloo's group."""

    def __init__(self, model: LoadedModel) -> None:
        communicator = model.runner.model.own._decoder.communicator
        self._group, communicator._group = communicator._group, self
        self._num_others = communicator.share.size - 1
        self.num_collectives = self.num_bytes = 0

    def allgather(self, parts: list[list[Tensor]], own: list[Tensor]) -> Any:
        self.num_collectives += 1
        self.num_bytes += self._num_others * own[0].nbytes
        return self._group.allgather(parts, own)

    def gather(self, *arguments: Any) -> Any:
        self.num_collectives += 1
        return self._group.gather(*arguments)


@pytest.mark.parametrize(("name", "size"), _CASES)
def test_a_group_has_the_tokens_of_one_rank_and_the_bits_of_its_specification(
    name, size, checkpoint, load_group, make_runner
) -> None:
    """The logits of a sequence have the same bits alone, among 64 others, and in one process that sums by hand.

    So have the reports of every kind of sequence, and of a beam, whose branches copy blocks on all ranks.
    """
    source = checkpoint(name)
    group = load_group(source.directory, size, **WIDE).runner
    prompts = [source.prompt(length) for length in LENGTHS]
    one = generate(make_runner(source.directory, **WIDE), prompts, 8, max_chunk=7)
    assert generate(group, prompts, 8, max_chunk=7) == one
    virtual = virtual_runner(source.directory, size, **WIDE)
    own, other = (run_batch(runner, Poison(), is_poisoned=False) for runner in (group, virtual))
    assert own == other
    expected = logits_of(source, virtual, has_neighbours=False)
    for has_neighbours in (False, True):
        for own, other in zip(logits_of(source, group, has_neighbours=has_neighbours), expected, strict=True):
            assert np.array_equal(own.numpy(), other.numpy())


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_the_embedded_model_has_the_same_tokens_on_ranks(size, load_group, make_runner) -> None:
    """Its three heads of keys are shared unevenly by two ranks, and with copies by four."""
    prompts = [[5 + i, 6, 7, 8 + i] * (1 + 5 * i) for i in range(4)]
    settings = WIDE | {"block_size": 16}
    expected = generate(make_runner(TINY, **settings), prompts, 24, max_chunk=19)
    assert generate(load_group(TINY, size, **settings).runner, prompts, 24, max_chunk=19) == expected


def test_a_step_costs_two_sums_a_layer_and_one_gathering_and_ranks_end_with_their_group(load_group, checkpoint) -> None:
    """Two layers of 64 numbers, and 307 logits. Three ranks send their parts to two others; rank 0 sends no logits.

    The other ranks end when the group is closed.
    """
    model = load_group(checkpoint("llama").directory, 3, kernels="auto", block_size=16)
    meter = CollectiveMeter(model)
    driver = PlanDriver(model.runner)
    driver.admit([1, 2, 3, 4, 5], 4)
    for num_rows in (5, 1):
        before = meter.num_collectives, meter.num_bytes
        driver.step()
        assert meter.num_collectives - before[0] == 2 * 2 + 1
        # Behind the last attention, only the row whose logits are wanted is computed.
        num_summed_rows = 2 * num_rows + 2 * 1
        assert meter.num_bytes - before[1] == 2 * 4 * 64 * num_summed_rows
    driver = PlanDriver(model.runner)
    before = meter.num_collectives, meter.num_bytes
    driver.admit([1, 2, 3, 4, 5, 6], 2, max_chunk=4)
    driver.step()
    assert meter.num_collectives - before[0] == 2, "a chunk without logits ends behind the last attention"
    assert model.group is not None
    processes = [member.process for member in model.group.members]
    assert all(psutil.Process(process.pid).ppid() == os.getpid() for process in processes)
    model.close()
    assert [process.returncode for process in processes] == [0, 0]


@pytest.mark.parametrize("name", ["llama-biases", pytest.param("llama-tied", marks=pytest.mark.exhaustive)])
def test_the_ranks_load_the_planned_bytes_and_have_the_digest_of_the_whole_model(name, checkpoint, load_group) -> None:
    directory = checkpoint(name).directory
    model, shape = load_group(directory, 3), read_model_shape(directory)
    assert model.group is not None
    others = [member.memory_bytes for member in model.group.members]
    shares = shape.shares(3)
    kv_bytes = [2 * shape.num_layers * share.num_kv_heads * shape.head_dim * 4 * 4 for share in shares]
    weight_bytes = [4 * shape.num_share_parameters(share) for share in shares]
    assert [each["weights"] for each in others] == weight_bytes[1:]
    assert [model.runner.model.pool[:, :1].nbytes, *(each["kv_block"] for each in others)] == kv_bytes
    num_blocks = model.runner.limits.num_blocks
    assert model.memory_bytes == {"weights": sum(weight_bytes), "kv_pool": sum(kv_bytes) * num_blocks}, "of all ranks"
    assert max(weight_bytes) == 4 * shape.num_device_parameters(3)
    assert model.weights_digest == load_group(directory, 1).weights_digest


def test_all_ranks_have_as_many_blocks_as_fit_on_the_least(load_group, make_runner) -> None:
    """Rank 1 holds two of three heads of keys, so half as many blocks fit as on rank 0."""
    settings = {"num_blocks": None, "memory_fraction": 0.02, "kernels": "auto"}
    alone = make_runner(TINY, **settings).limits.num_blocks
    model = load_group(TINY, 2, **settings)
    # A block of rank 1 is two thirds of a whole one, and half of the memory is its own: three quarters of the blocks.
    assert 0.4 * alone < model.runner.limits.num_blocks < 1.1 * alone
    assert model.runner.model.pool.shape[1] == model.runner.limits.num_blocks
    assert len(generate(model.runner, [[1, 2, 3]], 4)[0]) == 4


def test_a_rank_that_is_killed_ends_the_group_while_nothing_computes(load_group, checkpoint, caplog) -> None:
    model, lost = load_group(checkpoint("llama").directory, 3), threading.Event()
    assert model.group is not None
    model.group.watch(lost.set)
    victim = model.group.members[1]
    with caplog.at_level(logging.CRITICAL):
        victim.process.kill()
        assert lost.wait(_WAIT_S)
    assert f"rank 2 (process {victim.process.pid}) was killed by SIGKILL: the group of 3 ranks ends" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_step_without_all_ranks_fails_for_good(number, load_group, checkpoint) -> None:
    """A process that is stopped keeps its connections, so only the time tells."""
    model = load_group(checkpoint("llama").directory, 3, step_timeout_s=2)
    assert model.group is not None
    victim = model.group.members[0]
    driver = PlanDriver(model.runner)
    driver.admit([1, 2, 3], 8)
    driver.step()
    victim.process.send_signal(number)
    state = "was killed by SIGKILL" if number is signal.SIGKILL else "is stopped"
    with pytest.raises(RankLost, match=rf"rank 1 \(process {victim.process.pid}\) {state}"):
        run_steps(driver, 3)


def test_a_rank_that_is_stopped_while_it_loads_is_named(load_group, checkpoint, monkeypatch) -> None:
    """Its connection stays open, and after load_timeout_s the executor would end with the stacks of rank 0 alone."""
    pids = []

    def start_stopped(rank: int, setup: dict[str, Any]) -> Member:
        member = start_member(rank, setup)
        if rank == 2:
            pids.append(member.process.pid)
            os.kill(member.process.pid, signal.SIGSTOP)
        return member

    monkeypatch.setattr(group, "start_member", start_stopped)
    with pytest.raises(RankLost) as lost:
        load_group(checkpoint("llama").directory, 3, load_timeout_s=4)
    assert str(lost.value) == f"rank 2 (process {pids[0]}) is stopped"


def test_a_rank_that_says_nothing_while_it_loads_is_named(load_group, checkpoint, monkeypatch, caplog) -> None:
    """It may be on another machine, where rank 0 cannot see that it is stopped. It is no error: it may go on."""

    def start_stopped(rank: int, setup: dict[str, Any]) -> Member:
        member = start_member(rank, setup)
        os.kill(member.process.pid, signal.SIGSTOP)
        threading.Timer(5.0, member.process.send_signal, (signal.SIGCONT,)).start()
        return member

    monkeypatch.setattr(group, "start_member", start_stopped)
    monkeypatch.setattr(Member, "is_stopped", False)
    pid = load_group(checkpoint("llama").directory, 2, load_timeout_s=4).group.members[0].process.pid
    assert caplog.messages.count(f"waiting for rank 1 (process {pid}), without a line for 2 s") == 1


def test_an_error_of_rank_0_in_a_step_ends_the_group(load_group, checkpoint, monkeypatch) -> None:
    """The other ranks wait in the middle of the step, so the next one would never begin."""
    model = load_group(checkpoint("llama").directory, 2)

    def fail(launch: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(model.runner.model.own, "forward", fail)
    driver = PlanDriver(model.runner)
    driver.admit([1, 2, 3], 8)
    with pytest.raises(RankLost, match="rank 0 failed in the middle of a step: ValueError: a bug"):
        driver.step()


def test_a_rank_leaves_the_signals_of_the_terminal_to_rank_0_from_its_first_moment() -> None:
    """Python takes seconds to load a rank; a Ctrl-C meanwhile must neither end it nor print a traceback."""
    own, other = socket.socketpair()
    with own, other:
        process = start_worker(other)
    for number in end_signals():
        process.send_signal(number)
    assert process.wait(_WAIT_S) == 0, "it ends because its channel is closed"


def test_a_model_that_cannot_be_divided_is_refused_before_a_rank_starts(load_group, checkpoint) -> None:
    before = psutil.Process().children()
    with pytest.raises(ConfigError, match="tensor_parallel_size: 5 ranks cannot share 4 attention heads"):
        load_group(checkpoint("llama").directory, 5)
    assert psutil.Process().children() == before


def test_what_another_rank_cannot_load_is_told_by_its_name(tmp_path, load_group) -> None:
    """The number that is not finite is in the last column of the MLP, which rank 0 does not read."""
    make_checkpoint("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, -1] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"rank 1: model\.layers\.1\.mlp\.down_proj\.weight: 1 of .* not finite"):
        load_group(tmp_path, 2)
