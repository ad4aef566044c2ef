"""Locks the packages of the images: versions from constraints.txt, and the hash of every file that may be installed.

    python -m deploy.lock        # or: make lock

Writes deploy/locks/*.txt, which the Dockerfiles install with `pip install --require-hashes`. torch-cuda.txt holds torch
from pip's default index and what its CUDA build requires. torch-cpu.txt holds the CPU builds of the same version, which
come from another index. Its hashes are kept as long as the version is the same: for another version, `--cpu-builds`
names the page of that index.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "deploy" / "locks"
PIP_TOOLS = "pip-tools==7.6.2"
CUDA_ONLY = ("triton", "nvidia-", "cuda-")
"""Packages that only CUDA builds of torch need: names or, with a dash at the end, beginnings of names."""

_HEADER = "# Made by `make lock` from pyproject.toml and constraints.txt.\n"


def wanted() -> dict[str, list[str]]:
    """Returns the direct requirements of each lock."""
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = configuration["project"]
    extras = project["optional-dependencies"]
    return {
        # The hub client downloads the tokenizer of a hub id.
        "scheduler": [*project["dependencies"], *extras["otel"], *extras["jwt"], "huggingface-hub"],
        "executor": [*project["dependencies"], *extras["executor"]],
        "build": configuration["build-system"]["requires"],
    }


def lock_names() -> tuple[str, ...]:
    """Returns the names of all locks. One of those of torch is installed after `executor`."""
    return (*wanted(), "torch-cpu", "torch-cuda")


def is_cuda_only(name: str) -> bool:
    return any(name == each or (each.endswith("-") and name.startswith(each)) for each in CUDA_ONLY)


def entries(lock: str) -> dict[str, list[str]]:
    """Returns the lines of each locked package by `name==version`."""
    found: dict[str, list[str]] = {}
    last = ""
    for line in lock.splitlines():
        if "==" in line and not line.startswith((" ", "#", "-")):
            last = line.split()[0]
            found[last] = []
        elif line.startswith("    --hash="):
            found[last].append(line.strip().removesuffix("\\").strip())
    return found


def render(packages: dict[str, list[str]]) -> str:
    """Returns the text of a lock, without the options of the index that it was made with."""
    return _HEADER + "".join(" \\\n    ".join((pin, *hashes)) + "\n" for pin, hashes in sorted(packages.items()))


def without_torch(packages: dict[str, list[str]]) -> dict[str, list[str]]:
    """Returns the packages of a lock, without torch and without what only its CUDA builds need."""
    names = {pin: pin.partition("==")[0] for pin in packages}
    return {pin: packages[pin] for pin, name in names.items() if name != "torch" and not is_cuda_only(name)}


def cpu_builds(page: str, version: str) -> list[str]:
    """Returns the hashes of the CPU builds of a version of torch. page: that of torch in a package index (PEP 503)."""
    found = re.findall(rf"torch-{re.escape(version)}(?:\+|%2B)cpu-[^\"#<>]*#sha256=([0-9a-f]{{64}})", page)
    return [f"--hash=sha256:{each}" for each in sorted(set(found))]


def torch_locks(
    compiled: dict[str, list[str]], before: dict[str, list[str]], page: str
) -> dict[str, dict[str, list[str]]]:
    """Returns the locks of torch.

    compiled: torch and all that its CUDA build requires, with hashes. before: the lock of the CPU builds as it was.
    page: that of an index of CPU builds, or empty. Raises LookupError if neither knows CPU builds of the version.
    """
    (pin,) = (pin for pin in compiled if pin.startswith("torch=="))
    hashes = cpu_builds(page, pin.partition("==")[2]) or before.get(f"{pin}+cpu")
    if not hashes:
        raise LookupError(f"no hash of a CPU build of {pin} is known: name a page that has them with --cpu-builds URL")
    cuda = {each: compiled[each] for each in compiled if each == pin or is_cuda_only(each.partition("==")[0])}
    return {"torch-cpu": {f"{pin}+cpu": hashes}, "torch-cuda": cuda}


def _compile(
    python: Path, requirements: list[str], directory: Path, environment: dict[str, str]
) -> dict[str, list[str]]:
    """Returns the packages that some requirements need, with the hashes of their files. Raises CalledProcessError."""
    source, target = directory / "wanted.in", directory / "lock.txt"
    source.write_text("\n".join(requirements), encoding="utf-8")
    target.unlink(missing_ok=True)
    options = ("--quiet", "--generate-hashes", "--strip-extras", "--no-header", "--no-annotate", "--allow-unsafe")
    inputs = ("--constraint", ROOT / "constraints.txt", source)
    command = [python, "-m", "piptools", "compile", *options, "--output-file", target, *inputs]
    subprocess.run([str(word) for word in command], check=True, env=environment)
    return entries(target.read_text(encoding="utf-8"))


def _default_index(environment: dict[str, str]) -> dict[str, str]:
    """Returns the environment without settings of pip that offer packages of other indexes."""
    others = {"PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONSTRAINT"}
    return {name: value for name, value in environment.items() if name not in others} | {"PIP_CONFIG_FILE": os.devnull}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.lock", description=__doc__)
    parser.add_argument("--cpu-builds", metavar="URL", help="the page of torch in a package index of its CPU builds")
    address = parser.parse_args().cpu_builds
    page = ""
    if address is not None:
        with urllib.request.urlopen(address, timeout=60) as response:
            page = response.read().decode()
    LOCKS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        venv.create(directory / "venv", with_pip=True)
        python = directory / "venv" / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", PIP_TOOLS], check=True)
        environment = dict(os.environ)
        locks = {each: _compile(python, wanted()[each], directory, environment) for each in wanted()}
        locks = {each: without_torch(packages) for each, packages in locks.items()}
        before = LOCKS / "torch-cpu.txt"
        known = entries(before.read_text(encoding="utf-8")) if before.exists() else {}
        try:
            locks |= torch_locks(_compile(python, ["torch"], directory, _default_index(environment)), known, page)
        except LookupError as error:
            print(f"quire: {error}", file=sys.stderr)
            return 1
    for each, packages in locks.items():
        (LOCKS / f"{each}.txt").write_text(render(packages), encoding="utf-8")
        print(f"{each}: {len(packages)} packages", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
