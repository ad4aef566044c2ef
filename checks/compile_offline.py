"""Compiles every kernel of some models for a GPU that need not be there: `python -m checks.compile_offline 90`.

Prints a line of JSON for each variant. It runs as a separate program: it makes Triton assume that the current device
has the compute capability (90 means 9.0), and ends each launch when its kernel is compiled. The assembler and the tool
that reads its output come with Triton.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
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
from kernels.triton import tuning

READER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
PRODUCTS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")


@dataclass(frozen=True, slots=True)
class Model:
    """A model whose kernels are compiled. Without hidden_size and vocab_size, only those that depend on the heads."""

    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int | None = None
    vocab_size: int | None = None


# Together they use every entry of the tables of tile sizes; the first has the shape of Llama 3.1 8B.
MODELS = {
    "bfloat16, 4 x 128": Model(torch.bfloat16, 32, 8, 128, 4096, 128256),
    "bfloat16, 7 x 64": Model(torch.bfloat16, 14, 2, 64),
    "bfloat16, 2 x 256": Model(torch.bfloat16, 8, 4, 256),
    "float16, 7 x 80": Model(torch.float16, 14, 2, 80, 1120, 128256),
    "float32, 7 x 64": Model(torch.float32, 14, 2, 64),
    "float32, 4 x 128": Model(torch.float32, 32, 8, 128, 4096, 128256),
    "float32, 2 x 256": Model(torch.float32, 8, 4, 256),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """The resources of one variant of a kernel.

    name: the model, the step of the warm-up that launched it first, the kernel, the dtype of its first argument, and a
    number. registers: per thread. spilled: bytes per thread. shared_memory: bytes per program. products: the kinds of
    matrix instructions. copy_bytes: the size of the smallest asynchronous copy to shared memory, 0 if there is none.
    groups_in_flight: how many groups of these copies still run while a program computes what earlier groups loaded.
    """

    name: str
    registers: int
    spilled: int
    shared_memory: int
    num_warps: int
    num_stages: int
    products: tuple[str, ...]
    copy_bytes: int
    groups_in_flight: int


class AbsentDriver:
    """Replaces the driver: gives the answers that Triton needs before it compiles."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def variant_of(name: str, compiled: Any) -> Variant:
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
    assembly = compiled.asm["ptx"]
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (0x[0-9a-f]+)", assembly)
    waits = re.findall(r"cp\.async\.wait_group\s+(\d+)", assembly)
    return Variant(
        name=name,
        registers=registers,
        spilled=stack + local,
        shared_memory=compiled.metadata.shared,
        num_warps=compiled.metadata.num_warps,
        num_stages=compiled.metadata.num_stages,
        products=tuple(kind for kind in PRODUCTS if kind in assembly),
        copy_bytes=min((int(copy, 16) for copy in copies), default=0),
        groups_in_flight=max(map(int, waits), default=0),
    )


class Recorder:
    """Compiles kernels where they would be launched, and collects a `Variant` of each."""

    def __init__(self) -> None:
        self.place = ""
        self.variants: list[Variant] = []
        self._seen: set[int] = set()
        self._names: Counter[str] = Counter()

    def install(self) -> None:
        """Replaces the launch of kernels."""
        launch = JITFunction.run

        def compile_only(function: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
            self._add(function.__name__, launch(function, *arguments, grid=grid, warmup=True, **options))

        JITFunction.run = compile_only

    def _add(self, kernel: str, compiled: Any) -> None:
        if id(compiled) in self._seen:
            return
        self._seen.add(id(compiled))
        name = f"{self.place} / {kernel} / {next(iter(compiled.src.signature.values()))}"
        self._names[name] += 1
        self.variants.append(variant_of(f"{name} / {self._names[name]}", compiled))


def compile_models(capability: int, num_models: int) -> list[Variant]:
    """Returns the variants of the first models, each with the name of the model and the step that needed it first."""
    driver.set_active(AbsentDriver(capability))
    assume_device(capability)
    recorder = Recorder()
    recorder.install()
    for name, model in list(MODELS.items())[:num_models]:

        def begin(step: str, done: int, total: int, name: str = name) -> None:
            recorder.place = f"{name} / {step}"

        shape = AttentionShape(model.dtype, model.num_heads, model.num_kv_heads, model.head_dim, block_size=16)
        device = torch.device("cpu")
        kernels.warm_up(shape, begin, hidden_size=model.hidden_size, vocab_size=model.vocab_size, device=device)
    return recorder.variants


def assume_device(capability: int) -> None:
    """Makes the tables of tile sizes answer as on a device of this capability; its size does not change a kernel."""
    assumed = tuning.multiprocessors_of(2, *divmod(capability, 10))
    for module in (tuning, kernels.decode):
        vars(module)["multiprocessors"] = lambda device: assumed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("capability", type=int, help="the compute capability times ten")
    parser.add_argument("num_models", type=int, nargs="?", default=len(MODELS), help="only the first ones")
    arguments = parser.parse_args()
    for variant in compile_models(arguments.capability, arguments.num_models):
        print(json.dumps(asdict(variant)), flush=True)


if __name__ == "__main__":
    main()
