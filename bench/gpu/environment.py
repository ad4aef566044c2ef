"""Reports what gpu-check would run on: versions, missing packages, stubs, the GPU, its tools, and a first kernel.

    python -m bench gpu-environment --device cuda --json FILE

Without a GPU the kernel is compiled for an H100 but not run. Each part is written as soon as it is known. Exits with
status 1 after the last part if a package is missing or too old, if stubs cannot be imported, or if the kernel fails.
"""

import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.command_line import Parser
from bench.gpu import bundle

_VERSIONS = ("torch", "triton", "transformers", "grpcio", "protobuf", "numba", "numpy", "tokenizers", "pytest")
_TOOLS = ("nvidia-smi", "nvcc", "ptxas", "cuobjdump", "compute-sanitizer")
_SMI_FIELDS = (
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "clocks.max.mem",
    "power.limit",
    "temperature.gpu",
    "mig.mode.current",
)
_SMI_TIMEOUT_S = 20.0
_PRECISION_FLAGS = {
    "cuda.matmul": (
        "allow_tf32",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    ),
    "cudnn": ("allow_tf32", "benchmark", "deterministic"),
}
_NUM_VALUES = 1000
_BLOCK = 256


def versions() -> dict[str, Any]:
    """Returns the versions of Python and of the packages that decide what can run; None for a missing package."""
    found: dict[str, Any] = {"python": platform.python_version(), "executable": sys.executable}
    return found | {name: _version(name) for name in _VERSIONS}


def packages() -> list[str]:
    """Returns a line for each needed package that is missing or has a version that is not allowed."""
    try:
        from bench.gpu.requirements import problems
    except ModuleNotFoundError as error:
        return [f"{error.name} is missing; without it the other packages cannot be checked"]
    return problems()


def stubs() -> list[str]:
    """Returns a line for each generated module that cannot be imported."""
    modules = [".".join(path.with_suffix("").parts) for path in bundle.stubs()]
    return [f"{name}: {error}" for name in modules if (error := _import_error(name))]


def tools() -> dict[str, str | None]:
    """Returns the paths of the tools that are on PATH."""
    return {name: shutil.which(name) for name in _TOOLS}


def precision() -> dict[str, bool]:
    """Returns the flags of torch that allow sums or products of less precision than float32."""
    import torch

    settings = {"cuda.matmul": torch.backends.cuda.matmul, "cudnn": torch.backends.cudnn}
    return {
        f"{name}.{flag}": bool(getattr(settings[name], flag))
        for name, flags in _PRECISION_FLAGS.items()
        for flag in flags
    }


def gpu() -> dict[str, Any]:
    """Returns the properties of the GPUs: sizes in bytes, clocks in MHz. Raises RuntimeError if torch finds none."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU")
    properties: Any = torch.cuda.get_device_properties(0)  # torch's type stubs lack some of its fields
    free, total = torch.cuda.mem_get_info(0)
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_total": total,
        "memory_free": free,
        "shared_memory_per_block": properties.shared_memory_per_block_optin,
        "l2_cache": properties.L2_cache_size,
        "cuda": torch.version.cuda,
        "nvidia_smi": _nvidia_smi(),
    }


def first_kernel(device: str) -> dict[str, Any]:
    """Compiles a small Triton kernel; on a GPU it also runs it and compares the result. Raises whatever fails."""
    os.environ.pop("TRITON_INTERPRET", None)  # it has to be compiled
    import torch
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def double(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
        index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(source + index, mask=index < count)
        tl.store(target + index, values * 2.0, mask=index < count)

    if device == "cpu":
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        types = {"source": "*fp32", "target": "*fp32", "count": "i32", "BLOCK": "constexpr"}
        compiled = triton.compile(ASTSource(double, types, {"BLOCK": _BLOCK}), target=GPUTarget("cuda", 90, 32))
        return {"is_compiled": True, "has_run": False, "cubin_bytes": len(compiled.asm["cubin"])}
    source = torch.arange(_NUM_VALUES, dtype=torch.float32, device=device)
    target = torch.zeros_like(source)
    compiled = double[(triton.cdiv(_NUM_VALUES, _BLOCK),)](source, target, _NUM_VALUES, BLOCK=_BLOCK)
    if not torch.equal(target.cpu(), source.cpu() * 2):
        raise RuntimeError("the first kernel ran and its result is wrong")
    return {"is_compiled": True, "has_run": True, "cubin_bytes": len(compiled.asm["cubin"])}


def main(arguments: Sequence[str]) -> int:
    parser = Parser("gpu-environment", __doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--json", type=Path, required=True, help="file of what is found")
    given = parser.parse_args(arguments)
    parts: dict[str, Callable[[], Any]] = {
        "versions": versions,
        "missing_packages": packages,
        "failing_stubs": stubs,
        "tools": tools,
        "precision": precision,
    }
    if given.device == "cuda":
        parts["gpu"] = gpu
    parts["first_kernel"] = lambda: first_kernel(given.device)
    report: dict[str, Any] = {"device": given.device, "problems": []}
    given.json.parent.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        report[name] = _outcome(name, part, report["problems"])
        given.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"{name}: {json.dumps(report[name])}", flush=True)
    for problem in report["problems"]:
        print(f"problem: {problem}", file=sys.stderr)
    return 1 if report["problems"] else 0


def _outcome(name: str, part: Callable[[], Any], problems: list[str]) -> Any:
    """Returns what a part finds, or None if it fails. Adds what is wrong to `problems`."""
    try:
        found = part()
    except Exception as error:  # noqa: BLE001  a part that fails must not hide the next
        traceback.print_exc()
        problems.append(f"{name}: {type(error).__name__}: {error}")
        return None
    if isinstance(found, list):
        problems += found
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _import_error(name: str) -> str | None:
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001  stubs raise RuntimeError for an old grpcio, and errors of their own for protobuf
        return f"{type(error).__name__}: {error}"
    return None


def _nvidia_smi() -> dict[str, str] | None:
    """Returns what nvidia-smi reports of the first GPU, or None if it does not run."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(_SMI_FIELDS, (value.strip() for value in done.stdout.strip().split(",")), strict=False))
