"""Kernels on processors with fewer instructions than this one, in processes that are told so."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.exhaustive

WIDENS_FLOAT16 = """
import os
from llvmlite import binding

class Features(dict):
    def flatten(self, sort=True):
        return ",".join(("+" if has else "-") + name for name, has in sorted(self.items()))

newer = ("avx", "amx", "fma", "f16c", "vaes", "vpcl")
features = Features({name: has and not name.startswith(newer) for name, has in binding.get_host_cpu_features().items()})
binding.get_host_cpu_features = lambda: features
os.environ["NUMBA_CPU_NAME"], os.environ["NUMBA_CPU_FEATURES"] = "nehalem", features.flatten()

import torch
from kernels.cpu.linear import pack_linear

weight, x = torch.randn(40, 24).half(), torch.randn(3, 24).half()
found = pack_linear([weight])(x)
torch.testing.assert_close(found, torch.nn.functional.linear(x.float(), weight.float()).half(), rtol=1e-2, atol=1e-2)
print("equal")
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instructions of x86-64")
def test_float16_without_its_instructions(tmp_path: Path) -> None:
    """LLVM calls functions of the compiler's library then, and ends a process that has not loaded it."""
    done = subprocess.run(
        [sys.executable, "-c", WIDENS_FLOAT16],
        cwd=ROOT,
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr[-2000:]
