"""The size of the KV pool and the memory that is free for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from executor.checkpoints.model_config import parse_model_config
from executor.config import ExecutorConfig
from executor.device import free_memory as memory
from executor.device import kv_pool
from executor.errors import OutOfMemory
from tests.support.executor.model_configs import BASE

MODEL = parse_model_config(BASE)
CPU = torch.device("cpu")
# 4 layers, keys and values, 4 heads of 16, 2 bytes; 16 tokens.
BLOCK_BYTES = 4 * 2 * 4 * 16 * 2 * 16


def num_blocks(free_bytes: int, device: torch.device = CPU, **settings: object) -> int:
    config = ExecutorConfig(model="m", **settings)
    return kv_pool.fitting_blocks(config, MODEL, torch.bfloat16, device, free_bytes, {"weights": 1234, "graphs": 56})


def test_kv_bytes_per_token_equal_the_sum_by_hand() -> None:
    assert kv_pool.kv_bytes_per_token(MODEL, torch.bfloat16) * 16 == BLOCK_BYTES


def test_the_number_of_blocks_fits_the_memory_share() -> None:
    assert num_blocks(1000 * BLOCK_BYTES) == 400
    assert num_blocks(1000 * BLOCK_BYTES, torch.device("cuda:0")) == 900
    assert num_blocks(1000 * BLOCK_BYTES, memory_fraction=0.75) == 750


def test_the_default_pool_is_capped_on_a_large_host() -> None:
    assert num_blocks(1 << 40) * BLOCK_BYTES == 2 << 30
    assert num_blocks(1 << 40, memory_fraction=0.5) * BLOCK_BYTES == 1 << 39


def test_too_little_memory_is_reported_with_what_takes_it() -> None:
    with pytest.raises(
        OutOfMemory, match=f"two blocks take {2 * BLOCK_BYTES:,}. Bytes taken: weights 1,234, graphs 56."
    ):
        num_blocks(3 * BLOCK_BYTES)


def test_a_failed_allocation_is_reported() -> None:
    with pytest.raises(OutOfMemory, match="KV pool of"):
        kv_pool.allocate_pool(MODEL, 1 << 45, 16, torch.float32, CPU)


def test_the_pool_is_zero_and_has_the_documented_layout() -> None:
    pool = kv_pool.allocate_pool(MODEL, 3, 8, torch.bfloat16, CPU)
    assert pool.shape == (4, 3, 2, 4, 8, 16)
    assert pool.dtype == torch.bfloat16
    assert pool.is_contiguous()
    assert not pool.any()


@pytest.mark.parametrize("version", [1, 2])
def test_free_memory_under_a_container_limit(version, tmp_path) -> None:
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}[version]
    prefix = {1: "total_", 2: ""}[version]
    stat = f"anon 5\n{prefix}inactive_file 30\n{prefix}active_file 20\n"  # weights that were read twice are active
    for name, content in zip((*names, "memory.stat"), ("1000\n", "700\n", stat), strict=True):
        (tmp_path / name).write_text(content)
    nowhere = tmp_path / "nowhere"
    paths = (tmp_path, nowhere) if version == 2 else (nowhere, tmp_path)
    assert memory.cgroup_free_bytes(*paths) == 350


def test_free_memory_without_a_limit(tmp_path) -> None:
    for name, content in (("memory.max", "max"), ("memory.current", "7"), ("memory.stat", "")):
        (tmp_path / name).write_text(content)
    assert memory.cgroup_free_bytes(tmp_path, tmp_path / "nowhere") is None
    assert memory.cgroup_free_bytes(tmp_path / "nowhere", tmp_path / "nowhere") is None


def test_free_memory_is_the_smaller_of_host_and_container(monkeypatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=100))
    for left, expected in ((None, 100), (40, 40), (400, 100)):
        monkeypatch.setattr(memory, "cgroup_free_bytes", lambda v2, v1, left=left: left)
        assert memory.free_memory_bytes(CPU) == expected
