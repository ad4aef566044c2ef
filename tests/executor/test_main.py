"""The executor process: exit codes, messages and a clean exit."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import grpc
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from executor.config import ExecutorConfig
from executor.main import EXIT_ADDRESS_IN_USE, EXIT_CONFIG, EXIT_DEVICE_LOST, EXIT_OK, run
from kernels.memory import zeros
from quire.addresses import with_port
from quire.executor.v1 import executor_pb2 as pb
from quire.executor.v1.executor_pb2_grpc import ExecutorStub
from tests.support.executor.checkpoints import make_checkpoint
from tests.support.executor.model_configs import BASE
from tests.support.executor.served import opening, plan

_PROGRAM = (
    "import json, sys\n"
    "from executor.config import ExecutorConfig\n"
    "from executor.main import run\n"
    "sys.exit(run(ExecutorConfig.from_dict(json.loads(sys.argv[1]))))\n"
)


def test_the_process_loads_serves_and_exits_on_sigterm(checkpoint, tmp_path) -> None:
    """Prints its progress and its address, serves, and exits with status 0 on SIGTERM even with an open stream."""
    directory = checkpoint("llama").directory
    settings = (
        f'{{"model": "{directory}", "listen_address": "unix:{tmp_path}/run/x.sock", "metrics_address": "",'
        ' "kernels": "reference", "device": "cpu", "num_threads": 1, "num_blocks": 50}'
    )
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, settings], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        lines = []
        while not lines or not lines[-1].startswith("ready "):
            lines.append(process.stdout.readline())
            assert lines[-1], process.stderr.read()
        assert lines[0].startswith("loading LlamaForCausalLM")
        assert any(line.startswith("KV pool: 50 blocks of 16 tokens") for line in lines)
        with grpc.insecure_channel(lines[-1].split()[1]) as channel:
            stub = ExecutorStub(channel)
            assert stub.Describe(pb.DescribeRequest(), timeout=10).num_blocks == 50
            assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
            assert (tmp_path / "run" / "x.sock").stat().st_mode & 0o777 == 0o600
            results = stub.Run(iter([opening(), plan(1, 1)]))
            assert next(results).lease.epoch == 1
            assert next(results).result.step_id == 1
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
    finally:
        process.kill()
    _, errors = process.communicate()
    assert errors == ""


def test_a_process_whose_device_hangs_logs_stacks_and_exits(checkpoint) -> None:
    """The process exits although its threads never return."""
    settings = (
        f'{{"model": "{checkpoint("llama").directory}", "listen_address": "127.0.0.1:0", "metrics_address": "",'
        ' "kernels": "reference", "device": "cpu", "num_threads": 1, "num_blocks": 50, "step_timeout_s": 0.2}'
    )
    hangs = (
        "import threading, executor.device.runner\n"
        "def hang(runner, plan, computing): threading.Event().wait()\n"
        "executor.device.runner.ModelRunner.execute = hang\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", hangs + _PROGRAM, settings], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        while not (line := process.stdout.readline()).startswith("ready "):
            assert line, process.stderr.read()
        with grpc.insecure_channel(line.split()[1]) as channel, pytest.raises(grpc.RpcError):
            list(ExecutorStub(channel).Run(iter([opening(), plan(1, 1)])))
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == EXIT_DEVICE_LOST
    assert "this executor hangs and exits" in errors
    assert "in hang" in errors


@pytest.mark.parametrize(("num_lines", "return_code"), [(0, EXIT_DEVICE_LOST), (5, EXIT_CONFIG)])
def test_loading_without_progress_logs_stacks_and_exits(num_lines, return_code) -> None:
    """Lines of progress, each within the time, keep a process that loads for longer than that."""
    loads = (
        "import time, executor.main\n"
        "def load(config, say):\n"
        f"    for _ in range({num_lines}): say('progress'); time.sleep(0.5)\n"
        f"    if {num_lines}: raise executor.main.CheckpointError('loaded')\n"
        "    while True: time.sleep(1)\n"
        "executor.main.load_model = load\n"
    )
    settings = '{"model": "m", "listen_address": "127.0.0.1:0", "metrics_address": "", "load_timeout_s": 2}'
    ended = subprocess.run(
        [sys.executable, "-c", loads + _PROGRAM, settings], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == return_code
    assert ("in load" in ended.stderr) == (return_code == EXIT_DEVICE_LOST)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "/no/such/model"}, "/no/such/model: no such directory"),
        ({"model": "{directory}", "device": "cuda:77"}, "device: "),
        ({"model": "{directory}", "max_model_len": 1_000_000}, "max_model_len: 1000000 is more than"),
        ({"model": "{directory}", "num_blocks": (1 << 31) - 1, "block_size": 1 << 16}, "KV pool of"),
        (
            {"model": "{directory}", "tensor_parallel_size": 5},
            "tensor_parallel_size: 5 ranks cannot share 4 attention heads",
        ),
    ],
)
def test_a_wrong_configuration_or_model_exits_with_its_code(settings, message, checkpoint, capfd) -> None:
    model = settings["model"].format(directory=checkpoint("llama").directory)
    config = ExecutorConfig.from_dict(
        {"device": "cpu", "listen_address": "127.0.0.1:0", "metrics_address": "", **settings, "model": model}
    )
    assert message in refusal(config, capfd)


def refusal(config: ExecutorConfig, capfd) -> str:
    """Runs an executor that ends with the code for a wrong configuration, and returns its only line of errors."""
    capfd.readouterr()
    assert run(config) == EXIT_CONFIG
    errors = capfd.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("quire executor: ")
    return errors[0]


@pytest.mark.parametrize(
    ("allocator", "allocate", "message"),
    [
        (
            "executor.models.program.zeros",
            lambda *_: zeros((1 << 60,), torch.uint8),
            "a step of 512 tokens and 64 sequences (lower --max-num-batched-tokens, ",
        ),
        ("executor.device.runner.Slots", lambda *_: np.zeros(1 << 50), "a step of 512 tokens and 64 sequences"),
        (
            "executor.checkpoints.rope._tables",
            lambda *_: torch.empty(1 << 50),
            "rotary embeddings of 128 positions (lower --max-model-len)",
        ),
    ],
)
def test_a_lack_of_memory_while_loading_exits_with_its_code(
    allocator, allocate, message, checkpoint, capfd, monkeypatch
) -> None:
    """Otherwise `quire serve` would start the executor again and again."""
    monkeypatch.setattr(allocator, allocate)
    config = ExecutorConfig(
        model=str(checkpoint("llama").directory), listen_address="127.0.0.1:0", metrics_address="", device="cpu"
    )
    assert message in refusal(config, capfd)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_position_embeddings": 1 << 31}, "max_position_embeddings: expected at most 2147483647"),
        ({"head_dim": 6}, "head_dim: must be a multiple of 4 on the CPU, is 6"),
        ({"model_type": ["llama"], "architectures": None}, "architecture ['llama'] is not supported"),
        ({"rope_theta": 10**400}, "rope_theta: expected a number from 0 to"),
        ({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2}}, "rope_theta: must not be 1"),
        ({"rope_theta": 1e-44}, "the rotary embedding has angles that are not finite"),
    ],
)
def test_a_config_json_that_cannot_be_computed_exits_with_its_code(fields, message, tmp_path, capfd) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | fields))
    config = ExecutorConfig(
        model=str(tmp_path), load_format="random", listen_address="127.0.0.1:0", metrics_address="", device="cpu"
    )
    assert message in refusal(config, capfd)


def test_missing_weights_exit_with_its_code(tmp_path, capfd) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    config = ExecutorConfig(model=str(tmp_path), listen_address="127.0.0.1:0", metrics_address="", device="cpu")
    assert f"{tmp_path}: no safetensors file" in refusal(config, capfd)


def test_sigterm_while_loading_exits_cleanly(monkeypatch) -> None:
    monkeypatch.setattr("executor.main.load_model", lambda config, say: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert run(ExecutorConfig(model="m", listen_address="127.0.0.1:0", metrics_address="")) == EXIT_OK
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("which", ["listen_address", "metrics_address"])
def test_a_port_in_use_is_found_before_loading(which, checkpoint, capfd) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        addresses = {"listen_address": "127.0.0.1:0", "metrics_address": "", which: address}
        assert run(ExecutorConfig(model="/no/such/model", **addresses)) == EXIT_ADDRESS_IN_USE
    output = capfd.readouterr()
    assert f"cannot listen on {address}: Address already in use" in output.err
    assert output.out == ""


def test_one_address_for_both_servers_is_found_before_loading(capfd) -> None:
    address = with_port("127.0.0.1:0")
    config = ExecutorConfig(model="/no/such/model", listen_address=address, metrics_address=address)
    assert f"metrics_address: two services cannot listen on {address}" in refusal(config, capfd)


def test_an_address_of_another_host_is_a_configuration_error(capfd) -> None:
    config = ExecutorConfig(
        model="/no/such/model",
        listen_address="192.0.2.1:1",
        metrics_address="",
        tls_certificate="x",
        tls_key="x",
        tls_client_ca="x",
        scheduler_name="x",
    )
    assert run(config) == EXIT_CONFIG
    assert "cannot listen on 192.0.2.1:1: " in capfd.readouterr().err


def test_a_weight_that_is_not_a_number_exits_as_a_wrong_model(tmp_path, capfd, monkeypatch) -> None:
    monkeypatch.setattr("executor.main.serve", lambda *arguments: pytest.fail("the model was served"))
    directory = make_checkpoint("llama", tmp_path / "model").directory
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"][7] = float("nan")
    save_file(tensors, directory / "model.safetensors")
    config = ExecutorConfig(model=str(directory), listen_address="127.0.0.1:0", metrics_address="", device="cpu")
    assert run(config) == EXIT_CONFIG
    assert "executor: model.norm.weight: 1 of 64 numbers are not finite" in capfd.readouterr().err


@pytest.mark.parametrize("how", ["full", "left", "no descriptors"])
def test_an_executor_serves_without_its_output_and_without_descriptors(how, checkpoint, tmp_path) -> None:
    """Standard output is full or has no reader, or connections take every file descriptor while a stream runs."""
    address = f"unix:{tmp_path}/run/x.sock"
    settings = (
        f'{{"model": "{checkpoint("llama").directory}", "listen_address": "{address}", "metrics_address": "",'
        ' "kernels": "reference", "device": "cpu", "num_threads": 1, "num_blocks": 50}'
    )
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n" if how == "no descriptors" else ""
    redirection = {"full": ">/dev/full 2>&1", "left": "2>&1 | true", "no descriptors": ">/dev/null 2>&1"}[how]
    process = subprocess.Popen(
        ["bash", "-c", f'set -o pipefail; "$0" -c "$1" "$2" {redirection}', sys.executable, limit + _PROGRAM, settings],
        start_new_session=True,
    )
    try:
        with grpc.insecure_channel(address) as channel:
            stub = ExecutorStub(channel)
            assert stub.Describe(pb.DescribeRequest(), timeout=60, wait_for_ready=True).num_blocks == 50
            results = stub.Run(iter([opening(), plan(1, 1)]))
            assert next(results).lease.epoch == 1
            taken = [socket.socket(socket.AF_UNIX) for _ in range(100 if limit else 0)]
            for each in taken:
                each.settimeout(1)
                with suppress(OSError):  # the queue of connections is full, because none is accepted
                    each.connect(address.removeprefix("unix:"))
            assert next(results).result.step_id == 1
            for each in taken:
                each.close()
            assert stub.Describe(pb.DescribeRequest(), timeout=30).num_blocks == 50
        with grpc.insecure_channel(address) as another:
            assert ExecutorStub(another).Describe(pb.DescribeRequest(), timeout=30, wait_for_ready=True)
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
