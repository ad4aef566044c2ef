"""Kernels compile for an H100 without one: the interpreter accepts code that the compiler refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.exhaustive

if TYPE_CHECKING:
    from pathlib import Path

SHARED_MEMORY = 227 * 1024  # available to a program on a multiprocessor of capability 9.0
REGISTERS = 65536


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "shape",
    [
        "--num-heads 32 --num-kv-heads 8 --head-dim 128 --hidden-size 4096 --dtype bfloat16",
        "--num-heads 14 --num-kv-heads 2 --head-dim 80 --hidden-size 1120 --dtype float16",
    ],
)
def test_every_variant_compiles_fits_and_spills_no_registers(shape: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.triton.offline", "--block-size", "16", "--vocab-size", "128256"]
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    finished = subprocess.run(
        [*command, *shape.split()],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-6000:]
    variants = [json.loads(line) for line in finished.stdout.splitlines()]
    names = {variant["name"] for variant in variants}
    assert {"_attend_chunks", "_merge_parts", "_attend_tiles", "_rotate_and_store", "_norm_rows"} <= names
    assert {"_open_rows", "_close_rows", "_draw_rows"} <= names
    for variant in variants:
        assert variant["spilled"] == 0, variant
        assert variant["shared_memory"] <= SHARED_MEMORY, variant
        if variant["name"] == "_attend_tiles":
            assert variant["uses_warp_group_products"], variant
        if variant["name"] == "_attend_chunks":  # three programs per multiprocessor, as in the table of tile sizes
            assert 3 * (variant["shared_memory"] + 1024) <= SHARED_MEMORY + 1024, variant
            assert 3 * variant["registers"] * 32 * variant["num_warps"] <= REGISTERS, variant
