"""Compiles the GPU kernels with several versions of Triton, without a GPU: `python -m checks.compiled_kernels`.

Writes what each variant needs to bench/results/compiled-kernels.json, and the table of docs/performance.md. Versions of
Triton that are not installed are unpacked into build/triton first, which needs a package index. Takes ten minutes on
two cores.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "compiled-kernels.json"
PAGE = ROOT / "docs" / "performance.md"
OTHER_VERSIONS = ("3.6.0", "3.9.0")
BEGIN, END = "<!-- compiled kernels: `python -m checks.compiled_kernels` -->\n", "<!-- end of compiled kernels -->\n"
DECODE, PREFILL, MERGE = "_attend_chunks", "_attend_tiles", "_merge_parts"

Variant = dict[str, Any]
Variants = dict[str, Variant]
Results = dict[str, dict[str, Variants]]


@dataclass(frozen=True, slots=True)
class Capability:
    """The limits of a multiprocessor (CUDA C++ Programming Guide, "Compute Capabilities").

    products: the matrix instructions that prefill has to use.
    """

    device: str
    shared_kib: int
    max_warps: int
    max_programs: int
    products: str

    @property
    def program_bytes(self) -> int:
        """Bytes of shared memory that one program can use; the device keeps one KiB of each program."""
        return (self.shared_kib - 1) * 1024

    def programs(self, variant: Variant) -> int:
        """Returns how many programs of a variant a multiprocessor runs at a time, of 65,536 registers."""
        warp_registers = -(-variant["registers"] * 32 // 256) * 256
        by_registers = 65536 // (warp_registers * variant["num_warps"])
        by_shared_memory = self.shared_kib * 1024 // (variant["shared_memory"] + 1024)
        by_warps = self.max_warps // variant["num_warps"]
        return int(min(self.max_programs, by_warps, by_registers, by_shared_memory))


CAPABILITIES = {
    "80": Capability("A100", 164, 64, 32, "mma.sync"),
    "89": Capability("L4, RTX 4090", 100, 48, 24, "mma.sync"),
    "90": Capability("H100, H200", 228, 64, 32, "wgmma.mma_async"),
    "100": Capability("B200", 228, 64, 32, "tcgen05.mma"),
    "120": Capability("RTX 5090", 100, 48, 24, "mma.sync"),
}


KNOWN_SPILLS = {
    ("3.6.0", "80", "float32, 2 x 256 / decode attention / _attend_chunks / *fp32 / 1"): 16,
    ("3.6.0", "100", "float32, 4 x 128 / decode attention / _attend_chunks / *fp32 / 1"): 8,
    ("3.9.0", "80", "float32, 4 x 128 / prefill attention / _attend_tiles / *fp32 / 1"): 8,
    ("3.9.0", "89", "float32, 4 x 128 / prefill attention / _attend_tiles / *fp32 / 1"): 8,
    ("3.9.0", "100", "bfloat16, 7 x 64 / prefill attention with a window / _attend_tiles / *bf16 / 1"): 8,
}
"""Bytes that a thread spills, by version of Triton, capability and variant. Tile sizes are chosen so that no variant
spills with the version in constraints.txt; a few bytes with another version are accepted, and listed here."""


def compile_kernels(capability: str, folder: Path | None = None, num_models: int | None = None) -> Variants:
    """Compiles all variants with the installed Triton, or the one unpacked in `folder`; returns them by name.

    num_models: only the variants of the first models of `checks.compile_offline`.

    Raises RuntimeError with the end of the output if a kernel does not compile.
    """
    paths = [str(ROOT)] if folder is None else [str(folder), str(ROOT)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "checks.compile_offline", capability]
    if num_models is not None:
        command.append(str(num_models))
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise RuntimeError(f"{' '.join(command)}: {finished.stderr[-3000:]}")
    variants = [json.loads(line) for line in finished.stdout.splitlines()]
    return {variant.pop("name"): variant for variant in variants}


def faults(capability: str, variants: Variants, triton: str = "") -> list[str]:
    """Returns what is wrong with the variants of a capability: one sentence each, none if all is as it should be.

    triton: the version that compiled them, whose KNOWN_SPILLS are accepted.
    """
    limits, found = CAPABILITIES[capability], []
    for name, variant in variants.items():
        if variant["spilled"] != KNOWN_SPILLS.get((triton, capability, name), 0):
            found.append(f"{name} spills {variant['spilled']} bytes")
        if variant["shared_memory"] > limits.program_bytes:
            found.append(f"{name} needs {variant['shared_memory']} bytes of shared memory")
        is_wide = name.startswith("float32")
        if PREFILL in name and not is_wide and variant["products"] != [limits.products]:
            found.append(f"{name} uses {variant['products']} instead of {limits.products}")
        if DECODE in name and not is_wide and variant["products"] != ["mma.sync"]:
            found.append(f"{name} uses {variant['products']} instead of mma.sync")
        if DECODE in name or (PREFILL in name and not is_wide):
            if variant["copy_bytes"] != 16:
                found.append(f"{name} copies {variant['copy_bytes']} bytes at a time")
            if variant["groups_in_flight"] < 2:
                found.append(f"{name} waits for all but {variant['groups_in_flight']} groups of copies")
        # As many as decode launches: see kernels/triton/tuning.py. float32 exists for correctness.
        if DECODE in name and not is_wide and limits.programs(variant) < limits.shared_kib // 75:
            found.append(f"only {limits.programs(variant)} programs of {name} fit a multiprocessor")
    return found


def unpack(wanted: str) -> Path:
    """Returns the folder of a version of Triton, after unpacking its wheel there if need be."""
    folder = folder_of(wanted)
    if not folder.is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"triton=={wanted}"]
        subprocess.run([*command, "--target", str(folder)], check=True)
    return folder


def folder_of(wanted: str) -> Path:
    """Returns where a version of Triton is unpacked."""
    return ROOT / "build" / "triton" / wanted


def table(results: Results) -> str:
    """Returns the Markdown table of attention for Llama 3.1 8B's heads; registers with each version of Triton."""
    versions = sorted(results, key=lambda name: [int(part) for part in name.split(".")])
    lines = [
        f"| device | kernel | products | registers, Triton {' / '.join(versions)} | warps | stages "
        "| shared memory, KiB | programs on a multiprocessor |",
        "|---|---|---|---|---|---|---|---|",
    ]
    names = {
        "decode": f"decode attention / {DECODE}",
        "merge of decode": f"decode attention / {MERGE}",
        "prefill": f"prefill attention / {PREFILL}",
        "prefill, window": f"prefill attention with a window / {PREFILL}",
    }
    for capability, limits in CAPABILITIES.items():
        for title, part in names.items():
            found = [_only(results[each][capability], f"bfloat16, 4 x 128 / {part} ") for each in versions]
            programs = [str(limits.programs(variant)) for variant in found]
            cells = (
                f"{int(capability) / 10} ({limits.device})",
                title,
                ", ".join(found[0]["products"]) or "none",
                " / ".join(str(variant["registers"]) for variant in found),
                _joined([str(variant["num_warps"]) for variant in found]),
                _joined([str(variant["num_stages"]) for variant in found]),
                _joined([f"{variant['shared_memory'] / 1024:g}" for variant in found]),
                _joined(programs),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _only(variants: Variants, prefix: str) -> Variant:
    (variant,) = (variant for name, variant in variants.items() if name.startswith(prefix))
    return variant


def _joined(values: list[str]) -> str:
    return values[0] if len(set(values)) == 1 else " / ".join(values)


def written(results: Results) -> str:
    """Returns the text of the file of results, one variant in each line."""
    parts = []
    for name, capabilities in results.items():
        inner = []
        for capability, variants in capabilities.items():
            lines = ",\n".join(f"   {json.dumps(key)}: {json.dumps(variant)}" for key, variant in variants.items())
            inner.append(f'  "{capability}": {{\n{lines}\n  }}')
        parts.append(f' "{name}": {{\n' + ",\n".join(inner) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=OTHER_VERSIONS, help="beside the installed one")
    versions = sorted({*parser.parse_args().versions, version("triton")})
    folders = {each: None if each == version("triton") else unpack(each) for each in versions}
    jobs = [(each, capability) for each in versions for capability in CAPABILITIES]
    with ThreadPoolExecutor(2) as pool:
        compiled = list(pool.map(lambda job: compile_kernels(job[1], folders[job[0]]), jobs))
    results: Results = {each: {} for each in versions}
    status = 0
    for (each, capability), variants in zip(jobs, compiled, strict=True):
        results[each][capability] = variants
        for fault in faults(capability, variants, each):
            print(f"Triton {each}, capability {capability}: {fault}", file=sys.stderr)
            status = 1
    RESULTS.write_text(written(results))
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + table(results) + "\n" + END + rest.split(END)[1])
    print(f"{sum(map(len, compiled))} variants in {RESULTS.relative_to(ROOT)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
