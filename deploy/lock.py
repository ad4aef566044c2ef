"""Locks the packages of the images: versions from constraints.txt, and the hash of every file that may be installed.

    python -m deploy.lock        # or: make lock

Writes deploy/locks/*.txt, which the Dockerfiles install with `pip install --require-hashes`. torch is not among them:
its CPU builds and CUDA builds come from different indexes and have different hashes.
"""

import subprocess
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "deploy" / "locks"
PIP_TOOLS = "pip-tools==7.6.2"
UNLOCKED = ("torch", "triton", "nvidia-", "cuda-")
"""torch, and packages that only its CUDA builds need: names or, with a dash at the end, beginnings of names."""

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


def is_unlocked(name: str) -> bool:
    return any(name == each or (each.endswith("-") and name.startswith(each)) for each in UNLOCKED)


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


def render(lock: str) -> str:
    """Returns the lock without the options of the index that it was made with, and without unlocked packages."""
    packages = {pin: hashes for pin, hashes in entries(lock).items() if not is_unlocked(pin.partition("==")[0])}
    return _HEADER + "".join(" \\\n    ".join((pin, *hashes)) + "\n" for pin, hashes in sorted(packages.items()))


def main() -> None:
    LOCKS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        venv.create(Path(directory) / "venv", with_pip=True)
        python = Path(directory) / "venv" / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", PIP_TOOLS], check=True)
        for name, requirements in wanted().items():
            source, target = Path(directory) / f"{name}.in", Path(directory) / f"{name}.txt"
            source.write_text("\n".join(requirements), encoding="utf-8")
            options = (
                "--quiet",
                "--generate-hashes",
                "--strip-extras",
                "--no-header",
                "--no-annotate",
                "--allow-unsafe",
            )
            inputs = ("--constraint", ROOT / "constraints.txt", source)
            command = [python, "-m", "piptools", "compile", *options, "--output-file", target, *inputs]
            subprocess.run([str(word) for word in command], check=True)
            (LOCKS / f"{name}.txt").write_text(render(target.read_text(encoding="utf-8")), encoding="utf-8")
            print(f"{name}: {len(entries(target.read_text(encoding='utf-8')))} packages", flush=True)


if __name__ == "__main__":
    main()
