"""Errors in the configuration name the wrong setting."""

from __future__ import annotations

import pytest
import torch

from executor.config import ExecutorConfig
from executor.device.device import resolve_device, resolve_num_threads
from executor.errors import ConfigError
from tests.support.executor.checkpoints import make_checkpoint


def test_a_dict_becomes_a_configuration() -> None:
    config = ExecutorConfig.from_dict({"model": "m", "num_blocks": 10, "memory_fraction": 1, "step_timeout_s": 3})
    assert config == ExecutorConfig(model="m", num_blocks=10, memory_fraction=1.0, step_timeout_s=3.0)


RANKS = {"tensor_parallel_size": 2, "remote_ranks": 1, "ranks_listen": "10.0.0.1:9", "ranks_key": "k"}
TLS = {"tls_certificate": "c", "tls_key": "k", "tls_client_ca": "a", "scheduler_name": "n"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "model: must name"),
        ({"model": ""}, "model: must name"),
        ({"model": None}, "model: expected str"),
        ({"model": "m", "numblocks": 3, "blocks": 1}, "unknown keys: blocks, numblocks; known: model,"),
        ({"model": "m", "num_blocks": "3"}, "num_blocks: expected int | None, found '3'"),
        ({"model": "m", "num_blocks": True}, "num_blocks: expected int | None, found True"),
        ({"model": "m", "num_blocks": 2.0}, "num_blocks: expected int | None, found 2.0"),
        ({"model": "m", "num_blocks": 1}, "num_blocks: must be at least 2, is 1"),
        ({"model": "m", "block_size": 0}, "block_size: must be at least 1, is 0"),
        ({"model": "m", "max_num_seqs": 0}, "max_num_seqs: must be at least 1"),
        ({"model": "m", "max_num_batched_tokens": -1}, "max_num_batched_tokens: must be at least 1"),
        ({"model": "m", "max_model_len": 1}, "max_model_len: must be at least 2"),
        ({"model": "m", "num_threads": 0}, "num_threads: must be at least 1"),
        ({"model": "m", "num_threads": 1_000_000}, "num_threads: must be at most 1024, is 1000000"),
        ({"model": "m", "num_blocks": 1 << 31}, "num_blocks: must be at most 2147483647, is 2147483648"),
        ({"model": "m", "max_num_batched_tokens": 10**18}, "max_num_batched_tokens: must be at most 2147483647"),
        ({"model": "m", "memory_fraction": 0.0}, "memory_fraction: must be in (0, 1]"),
        ({"model": "m", "memory_fraction": float("nan")}, "memory_fraction: must be in (0, 1]"),
        ({"model": "m", "step_timeout_s": 0}, "step_timeout_s: must be above 0"),
        ({"model": "m", "dtype": "int8"}, "dtype: must be one of auto, float32"),
        ({"model": "m", "kernels": "fast"}, "kernels: must be one of auto, reference"),
        ({"model": "m", "listen_address": "50052"}, 'listen_address: expected "host:port"'),
        ({"model": "m", "listen_address": "unix:"}, "listen_address: expected"),
        ({"model": "m", "metrics_address": "unix:/tmp/x"}, "metrics_address: expected"),
        ({"model": "m", "listen_address": "localhost:99999"}, "listen_address: expected"),
        ({"model": "m", "listen_address": "0.0.0.0:1"}, "every host that reaches 0.0.0.0:1 could use this executor"),
        ({"model": "m", "listen_address": "[::]:1"}, "could use this executor"),
        ({"model": "m", "listen_address": "example.org:1"}, "listen on unix:/path, or give --tls-certificate"),
        ({"model": "m", "tls_key": "k"}, "tls_certificate: must be given together with tls_key"),
        ({"model": "m", "listen_address": "unix:/x", **TLS}, "a socket file needs no TLS"),
        ({"model": "m", **RANKS, "remote_ranks": 2}, "remote_ranks: must be at most 1, one less than all ranks, is 2"),
        ({"model": "m", "remote_ranks": 1}, "remote_ranks: must be at most 0"),
        (
            {"model": "m", **RANKS, "remote_ranks": 0},
            "ranks_listen: remote_ranks, ranks_listen and ranks_key have to be",
        ),
        (
            {"model": "m", **RANKS, "ranks_key": None},
            "remote_ranks: remote_ranks, ranks_listen and ranks_key have to be",
        ),
        ({"model": "m", **RANKS, "ranks_listen": "9100"}, 'ranks_listen: expected "host:port"'),
        ({"model": "m", "metrics_address": "localhost:"}, "metrics_address: expected"),
        ({"model": "m", "metrics_address": "unix:/tmp/x"}, 'metrics_address: expected "host:port", found'),
    ],
)
def test_mistakes_are_named(values, message) -> None:
    with pytest.raises(ConfigError) as error:
        ExecutorConfig.from_dict(values)
    assert message in str(error.value)


def test_the_default_is_a_socket_file_and_other_hosts_need_tls() -> None:
    assert ExecutorConfig(model="m").listen_address.startswith("unix:")
    assert ExecutorConfig(model="m", listen_address="[::1]:1", metrics_address="")
    assert ExecutorConfig(model="m", listen_address="0.0.0.0:1", **TLS).scheduler_name == "n"


def test_unix_sockets_and_no_metrics_are_accepted() -> None:
    ExecutorConfig(model="m", metrics_address="", listen_address="unix:/tmp/x")


@pytest.mark.parametrize("name", ["gpu", "meta", "cuda:99"])
def test_unknown_devices_are_rejected(name) -> None:
    with pytest.raises(ConfigError, match="device: "):
        resolve_device(name)


def test_known_devices_are_resolved() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type in ("cpu", "cuda")


@pytest.mark.parametrize(("num_cores", "num_threads"), [(1, 1), (2, 2), (3, 2), (4, 3), (64, 63)])
def test_one_core_is_spared_on_machines_with_three_or_more(num_cores, num_threads, monkeypatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(num_cores)))
    assert resolve_num_threads(None) == num_threads
    assert resolve_num_threads(7) == 7


def test_max_model_len_beyond_the_checkpoint_is_rejected(tmp_path, make_runner) -> None:
    directory = make_checkpoint("llama", tmp_path).directory
    assert make_runner(directory).limits.max_model_len == 128
    assert make_runner(directory, max_model_len=50).limits.max_blocks_per_seq == 13
    with pytest.raises(ConfigError, match="max_model_len: 129 is more than the 128 tokens"):
        make_runner(directory, max_model_len=129)


def test_defaults_depend_on_the_device(tmp_path, make_runner) -> None:
    directory = make_checkpoint("llama", tmp_path).directory
    limits = make_runner(directory, max_num_seqs=None).limits
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (64, 512)
    assert make_runner(directory, max_num_seqs=600).limits.max_num_batched_tokens == 600
    with pytest.raises(ConfigError, match="max_num_batched_tokens: 7 is less than max_num_seqs 8"):
        make_runner(directory, max_num_batched_tokens=7)
