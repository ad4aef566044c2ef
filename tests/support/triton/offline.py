"""Compiles every kernel of a model's shape for an H100 without a GPU, and prints the resources that each needs.

It runs as a separate program: it makes Triton assume that the current device is an H100, and ends each launch when its
kernel is compiled. The assembler and the tool that reads its output come with Triton.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kernels import AttentionShape
from kernels import triton as kernels

READER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True, slots=True)
class Needs:
    """The resources of one variant: registers and spilled bytes per thread, shared memory and warps per program."""

    name: str
    registers: int
    spilled: int
    shared_memory: int
    num_warps: int
    uses_warp_group_products: bool


class AbsentDriver:
    """Replaces the driver: gives the answers that Triton needs before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def needs(name: str, compiled: Any) -> Needs:
    """Returns the resources of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(READER), "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", report)
    if found is None:
        raise ValueError(f"no resource usage in {report!r}")
    registers, stack, local = map(int, found.groups())
    return Needs(
        name=name,
        registers=registers,
        spilled=stack + local,
        shared_memory=compiled.metadata.shared,
        num_warps=compiled.metadata.num_warps,
        uses_warp_group_products="wgmma.mma_async" in compiled.asm["ptx"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for option in ("num-heads", "num-kv-heads", "head-dim", "block-size", "hidden-size", "vocab-size"):
        parser.add_argument(f"--{option}", type=int, required=True)
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], required=True)
    given = parser.parse_args()

    driver.set_active(AbsentDriver())
    launch, compiled = JITFunction.run, {}

    def compile_only(function: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        result = launch(function, *arguments, grid=grid, warmup=True, **options)
        compiled[id(result)] = (function.__name__, result)

    JITFunction.run = compile_only
    kernels.warm_up(
        AttentionShape(
            getattr(torch, given.dtype), given.num_heads, given.num_kv_heads, given.head_dim, given.block_size
        ),
        hidden_size=given.hidden_size,
        vocab_size=given.vocab_size,
        device=torch.device("cpu"),
    )
    for name, result in compiled.values():
        print(json.dumps(asdict(needs(name, result))))


if __name__ == "__main__":
    main()
