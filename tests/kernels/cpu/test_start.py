"""Selection of kernels, their compilation and its cache, and the choice of threads."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from llvmlite import binding  # type: ignore[import-untyped]

from kernels import AttentionShape, cpu, reference, select
from kernels.cpu import team
from kernels.cpu.amx import HAS_AMX
from kernels.cpu.native import HAS_BFLOAT16_DOTS
from tests.support.kernels.paged import paged, poisoned

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = AttentionShape(torch.float32, num_heads=4, num_kv_heads=2, head_dim=64, block_size=16)

SECOND_START = """
import numpy as np
import torch
from numba.core import event
from kernels import AttentionShape, select
kernels = select(torch.device("cpu"))
for dtype in (torch.float32, torch.bfloat16):
    with event.install_recorder("numba:run_pass") as passes:
        kernels.warm_up(AttentionShape(dtype, 4, 2, 64, 16))
        kernels.rms_norm(torch.ones(1, 64, dtype=dtype), torch.ones(64, dtype=dtype), 1e-5)
        kernels.silu_multiply(torch.ones(1, 64, dtype=dtype))
        half = np.full(1, 0.5, np.float32)
        for logits in (torch.ones(1, 50, dtype=dtype), torch.ones(1, 50)):  # as the model made them, and changed
            kernels.sample(logits, np.zeros(1, np.int64), half, np.ones(1, np.int32), half, half, half)
            kernels.rank(logits, np.zeros(1, np.int32), 3)
    print(len(passes.buffer))
"""


ON_ANOTHER_PROCESSOR = """
import sys
from llvmlite import binding
name, without, *dtypes = sys.argv[1:]
features = binding.get_host_cpu_features()
features.update({feature: False for feature in features if feature.startswith(("amx", without))})
binding.get_host_cpu_features, binding.get_host_cpu_name = lambda: features, lambda: name
import torch
from kernels import cpu, reference
from kernels.cpu.amx import HAS_AMX
from kernels.cpu.native import HAS_BFLOAT16_DOTS
assert not HAS_AMX
assert HAS_BFLOAT16_DOTS == (features.get("avx512bf16", False) and name == "znver4")
from tests.support.kernels.paged import paged, poisoned
for dtype in (getattr(torch, each) for each in dtypes):
    pool = paged([600, 40], num_kv_heads=2, block_size=16, head_dim=64, dtype=dtype)
    query, starts = torch.randn(60, 4, 64).to(dtype), torch.tensor([0, 59, 60], dtype=torch.int32)
    outs = [poisoned(60, 4, 64, dtype=dtype) for _ in range(2)]
    for kernels, out in zip((cpu, reference), outs):
        kernels.attention_prefill(query, pool.kv, pool.block_tables, starts, pool.context_lens, out, 0.125)
    tolerance = {"rtol": 2e-5, "atol": 2e-5} if dtype is torch.float32 else {"rtol": 2**-7, "atol": 2**-9}
    torch.testing.assert_close(*outs, **tolerance)
    weight, x = torch.randn(100, 1100).to(dtype), torch.randn(97, 1100).to(dtype)
    layer = cpu.pack_linear([weight])
    torch.testing.assert_close(layer(x).double(), x.double() @ weight.double().T, rtol=2**-7, atol=1e-3)
    assert torch.equal(layer(x[50:51]), layer(x)[50:51])
"""


def test_the_device_selects_the_kernels() -> None:
    assert select(torch.device("cpu")) is cpu
    assert select(torch.device("meta")) is reference


def test_warm_up_reports_its_progress() -> None:
    calls: list[tuple[str, int, int]] = []
    cpu.warm_up(SHAPE, lambda name, done, total: calls.append((name, done, total)))
    assert [done for _, done, _ in calls] == list(range(calls[0][2]))
    assert len({name for name, _, _ in calls}) == len(calls)


def test_warm_up_refuses_unsupported_shapes() -> None:
    with pytest.raises(TypeError, match="float64"):
        cpu.warm_up(AttentionShape(torch.float64, 4, 2, 64, 16))
    with pytest.raises(ValueError, match="multiple of 4"):
        cpu.warm_up(AttentionShape(torch.float32, 4, 2, 62, 16))


def test_a_second_start_compiles_nothing() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        cpu.warm_up(replace(SHAPE, dtype=dtype))
    result = subprocess.run([sys.executable, "-c", SECOND_START], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["0", "0"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX is of x86-64")
@pytest.mark.parametrize(
    ("name", "without", "dtypes"),
    [
        ("haswell", "avx512", "float32 bfloat16 float16"),
        ("emeraldrapids", "none", "bfloat16"),  # the others have the same code as on this processor
        ("znver4", "none", "bfloat16"),
    ],
)
def test_kernels_are_right_on_other_processors(name: str, without: str, dtypes: str, tmp_path: Path) -> None:
    if not binding.get_host_cpu_features().get("avx512f"):
        pytest.skip("this processor has no AVX-512, so the other tests run what haswell would run")
    if name.startswith("znver") and HAS_BFLOAT16_DOTS:
        pytest.skip("this is a processor of AMD, so the other tests run what it runs")
    if name == binding.get_host_cpu_name() and not HAS_AMX:
        pytest.skip("this is that processor, so the other tests run what it runs")
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    if without == "avx512":
        environment |= {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c"}
    command = [sys.executable, "-c", ON_ANOTHER_PROCESSOR, name, without, *dtypes.split()]
    subprocess.run(command, env=environment, check=True)


def test_torchs_openmp_runtime_is_found() -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux builds of torch use GNU OpenMP")
    assert team._launch is not None


def test_python_threads_run_kernels_without_that_runtime(monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    pool = paged([1500, 40, 300], num_kv_heads=2, block_size=16, head_dim=64)
    query = torch.randn(3, 4, 64)
    results = []
    for launch in (team._launch, None):
        monkeypatch.setattr(team, "_launch", launch)
        out = poisoned(3, 4, 64)
        cpu.attention_decode(query, pool.kv, pool.block_tables, pool.context_lens, out, 0.125)
        results.append(out)
    assert results[0].isfinite().all()
    assert torch.equal(results[0], results[1])
