"""Ranks that join over TCP, as those of another machine do, compute as those that rank 0 starts."""

from __future__ import annotations

import logging
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file, save_file

from executor.errors import CheckpointError, OutOfMemory, RankLost
from executor.parallel import member
from executor.parallel.channel import Channel, FrameKind
from executor.parallel.joining import join, read_key
from quire.addresses import with_port
from quire.cli.config_flags import arguments
from quire.command import quire_command
from tests.executor.parallel.test_group import run_steps
from tests.support.executor.plan_driver import PlanDriver, generate
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    import socket
    from pathlib import Path

    from executor.loading import LoadedModel

StartRanks = Callable[..., "subprocess.Popen[str]"]
_WAIT_S = 60.0


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "ranks.key"
    path.write_text(secrets.token_hex(32))
    return str(path)


@pytest.fixture
def listen() -> str:
    return with_port("127.0.0.1:0")


@pytest.fixture
def start_ranks(listen: str, secret: str) -> Iterator[StartRanks]:
    """Returns a function that runs `quire rank`."""
    started: list[subprocess.Popen[str]] = []

    def start(directory: Path, **flags: Any) -> subprocess.Popen[str]:
        values = {"join": listen, "ranks_key": secret, "model": str(directory), "num_threads": 1} | flags
        started.append(
            subprocess.Popen(
                [*quire_command(), "rank", *arguments(values)],
                stderr=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def settings(listen: str, secret: str, remote_ranks: int) -> dict[str, Any]:
    return {"remote_ranks": remote_ranks, "ranks_listen": listen, "ranks_key": secret}


@pytest.mark.parametrize(("size", "num_remote"), [(3, 1), pytest.param(4, 3, marks=pytest.mark.exhaustive)])
def test_remote_ranks_have_the_tokens_of_one_rank(
    size, num_remote, checkpoint, load_group, make_runner, start_ranks, listen, secret
) -> None:
    """So have local ranks: see test_group.py."""
    source = checkpoint("llama-biases")
    prompts = [source.prompt(length) for length in (1, 2, 17, 40)]
    start_ranks(source.directory, num_ranks=num_remote)
    remote = load_group(source.directory, size, **settings(listen, secret, num_remote)).runner
    one = make_runner(source.directory, kernels="reference")
    assert generate(remote, prompts, 8, max_chunk=7) == generate(one, prompts, 8, max_chunk=7)


def test_a_rank_joins_the_next_group_when_its_group_has_ended(
    checkpoint, load_group, make_runner, start_ranks, listen, secret
) -> None:
    source = checkpoint("llama")
    process = start_ranks(source.directory)
    prompts = [source.prompt(length) for length in (1, 17)]
    one = generate(make_runner(source.directory, kernels="reference"), prompts, 8, max_chunk=7)
    for _ in range(2):
        model = load_group(source.directory, 2, **settings(listen, secret, 1))
        assert generate(model.runner, prompts, 8, max_chunk=7) == one
        model.close()
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(_WAIT_S) == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_leaves_ends_the_group(number, checkpoint, load_group, start_ranks, listen, secret, caplog) -> None:
    source = checkpoint("llama")
    process = start_ranks(source.directory)
    model, lost = load_group(source.directory, 2, **settings(listen, secret, 1)), threading.Event()
    assert model.group is not None
    model.group.watch(lost.set)
    with caplog.at_level(logging.CRITICAL):
        process.send_signal(number)
        assert lost.wait(_WAIT_S)
    assert "rank 1 (at 127.0.0.1:" in caplog.text
    assert "has closed its connection: the group of 2 ranks ends" in caplog.text


def test_no_more_ranks_join_a_complete_group(checkpoint, load_group, start_ranks, listen, secret) -> None:
    source = checkpoint("llama")
    start_ranks(source.directory)
    model = load_group(source.directory, 2, **settings(listen, secret, 1))
    with pytest.raises(ConnectionRefusedError):
        join(listen, read_key(secret))
    model.close()


@pytest.mark.parametrize("sent", [None, FrameKind.FAILED, FrameKind.LOADED])
def test_a_local_rank_that_ends_is_noticed_while_remote_ones_are_missing(
    sent: FrameKind | None, checkpoint, load_group, listen, secret, monkeypatch
) -> None:
    start = member.start_worker

    def start_and_end(end: socket.socket, settings: dict[str, Any] | None = None) -> subprocess.Popen[bytes]:
        if sent is not None:
            Channel(end).send_values(sent, {"kind": "OutOfMemory", "text": "no memory is left"})
            return subprocess.Popen(["false"])
        process = start(end, settings)
        process.kill()
        return process

    monkeypatch.setattr(member, "start_worker", start_and_end)
    error, text = {
        None: (RankLost, "was killed by SIGKILL"),
        FrameKind.FAILED: (OutOfMemory, "no memory is left"),
        FrameKind.LOADED: (RankLost, "exited with status 1"),
    }[sent]
    with pytest.raises(error, match=text):
        load_group(checkpoint("llama").directory, 3, **settings(listen, secret, 1))


def test_an_executor_that_waits_says_so_before_it_is_given_up(checkpoint, load_group, listen, secret) -> None:
    said_s: list[float] = []

    def say(line: str) -> None:
        assert "waiting at" in line
        said_s.append(time.monotonic())
        if len(said_s) == 4:
            raise InterruptedError

    config = dict(settings(listen, secret, 1), load_timeout_s=0.2)
    with pytest.raises(InterruptedError):
        load_group(checkpoint("llama").directory, 2, say=say, **config)
    assert said_s[-1] - said_s[0] < 2.0, "three intervals of 0.1 s each"


def test_progress_of_local_ranks_is_said_while_remote_ones_are_missing(
    checkpoint, load_group, start_ranks, listen, secret
) -> None:
    """The other machine comes some seconds later, when the local rank has loaded its share."""
    source, lines = checkpoint("llama"), list[str]()

    def say(line: str) -> None:
        lines.append(line)
        num_later = len(lines) - next((i for i, each in enumerate(lines) if each.startswith("rank 1: ")), len(lines))
        if num_later == 4:
            start_ranks(source.directory)
        elif len(lines) == _WAIT_S:
            raise InterruptedError

    config = dict(settings(listen, secret, 1), load_timeout_s=2.0)
    model = load_group(source.directory, 3, say=say, **config)
    assert len(generate(model.runner, [[1, 2, 3]], 4)[0]) == 4


def test_a_step_without_a_remote_rank_fails_for_good(checkpoint, load_group, start_ranks, listen, secret) -> None:
    source = checkpoint("llama")
    process = start_ranks(source.directory)
    model: LoadedModel = load_group(source.directory, 2, **settings(listen, secret, 1))
    driver = PlanDriver(model.runner)
    driver.admit([1, 2, 3], 8)
    driver.step()
    process.kill()
    with pytest.raises(RankLost, match=r"rank 1 \(at 127"):
        run_steps(driver, 6)


def test_other_weights_are_refused(checkpoint, load_group, start_ranks, listen, secret, tmp_path) -> None:
    source = checkpoint("llama")
    other = tmp_path / "other"
    shutil.copytree(source.directory, other)
    weights = load_file(other / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] += 1e-3
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    start_ranks(other)
    with pytest.raises(CheckpointError, match=r"rank 1 \(at .* has other weights"):
        load_group(source.directory, 2, **settings(listen, secret, 1))


def test_what_a_remote_rank_cannot_load_is_told_by_its_name(
    checkpoint, load_group, start_ranks, listen, secret, tmp_path
) -> None:
    source, other = checkpoint("llama"), tmp_path / "other"
    shutil.copytree(source.directory, other)
    (other / "model.safetensors").write_bytes(b"no weights")
    process = start_ranks(other)
    with pytest.raises(CheckpointError, match="rank 1: "):
        load_group(source.directory, 2, **settings(listen, secret, 1))
    assert process.wait(_WAIT_S) == 2


def test_another_secret_keeps_a_rank_out(checkpoint, load_group, start_ranks, listen, secret, tmp_path) -> None:
    """It tries again and again, until it has the right one. Meanwhile another rank joins."""
    (tmp_path / "wrong.key").write_text("0" * 64)
    source = checkpoint("llama")
    wrong = start_ranks(source.directory, ranks_key=str(tmp_path / "wrong.key"))
    loaded: list[LoadedModel] = []
    thread = threading.Thread(
        target=lambda: loaded.append(load_group(source.directory, 2, **settings(listen, secret, 1)))
    )
    thread.start()
    assert wrong.stderr is not None
    assert any("cannot join" in line and "another secret" in line for line in wrong.stderr)
    start_ranks(source.directory)
    thread.join(_WAIT_S)
    assert len(generate(loaded[0].runner, [[1, 2, 3]], 4)[0]) == 4


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"join": ""}, "join: must be given"),
        ({"join": "nowhere"}, 'join: expected "host:port"'),
        ({"join": "a..b:9100"}, 'join: expected "host:port"'),
        ({"num_ranks": 0}, "num_ranks: must be at least 1"),
        ({"num_threads": 1025}, "num_threads: must be at most 1024"),
        ({"ranks_key": "/missing"}, "ranks_key: cannot read /missing"),
        ({"log_level": "loud"}, "log_level: must be one of"),
    ],
)
def test_wrong_flags_end_with_a_line(flags, said, checkpoint, start_ranks) -> None:
    process = start_ranks(checkpoint("llama").directory, **flags)
    _, errors = process.communicate(timeout=_WAIT_S)
    assert process.returncode == 2
    assert said in errors
    assert "Traceback" not in errors


def test_an_executor_cannot_listen_for_ranks_at_what_is_no_name(checkpoint, secret, tmp_path) -> None:
    values = settings("a..b:1", secret, 1) | {"tensor_parallel_size": 2, "device": "cpu"}
    values |= {"model": str(checkpoint("llama").directory), "listen_address": f"unix:{tmp_path}/executor.sock"}
    command = [*quire_command(), "executor", *arguments(values)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_S, check=False)
    assert process.returncode == 2
    assert "executor: cannot listen on a..b:1: this cannot be the name of a host" in process.stderr
    assert "Traceback" not in process.stderr


def test_a_rank_that_has_left_before_the_group_is_complete_is_forgotten(
    checkpoint, load_group, start_ranks, listen, secret
) -> None:
    source = checkpoint("llama")
    first = start_ranks(source.directory)
    loaded: list[LoadedModel] = []
    thread = threading.Thread(
        target=lambda: loaded.append(load_group(source.directory, 3, **settings(listen, secret, 2)))
    )
    thread.start()
    assert first.stderr is not None
    assert next(line for line in first.stderr if "joined" in line)
    first.kill()
    start_ranks(source.directory, num_ranks=2)
    thread.join(_WAIT_S)
    wait_until(lambda: bool(loaded))
    assert len(generate(loaded[0].runner, [[1, 2, 3]], 4)[0]) == 4
