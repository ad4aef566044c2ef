"""Rehearses gpu-check on a machine without a package index: `python -m checks.gpu_rehearsal`.

Makes the bundle of `python -m bench gpu-bundle`, and an environment that holds nothing but what such a machine has.
There it collects the tests that a GPU would run, and runs `make gpu-check NO_INSTALL=1 BUNDLE=…` in a clean checkout,
without an index, a network or a home folder. Every phase has to pass and to leave its results, and nothing else may be
written. Without a GPU the phases are small.

    python -m checks.gpu_rehearsal --quick               # this Python, its packages; two phases; about a minute
    python -m checks.gpu_rehearsal --python python3.12   # the machine's versions, from an index: a few GB

Exits with status 1 and the reason if anything fails.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from bench.gpu.requirements import PROVIDED, closure
from checks.steps import CheckFailed, expect, timed

ROOT = Path(__file__).resolve().parent.parent
MACHINE_VERSIONS = {"torch": "2.11.0", "triton": "3.6.0", "transformers": "5.17.*"}
QUICK_PHASES = ("environment", "correctness")
MAY_BE_SKIPPED = ("sanitizer", "two_devices")  # without compute-sanitizer, and without a second GPU
DEVICE_TESTS = "tests/kernels/triton tests/executor/cuda"
COMMAND_TIMEOUT_S = 1500.0


def rehearse(folder: Path, python: str | None, is_quick: bool) -> None:
    """Raises CheckFailed at the first problem."""
    checkout, bundle, temporary = folder / "checkout", folder / "bundle", folder / "tmp"
    temporary.mkdir()
    with timed("rehearsal: a clean checkout"):
        copy_checkout(checkout)
    with timed("rehearsal: an environment with what the machine has"):
        bare = linked_environment(folder / "bare") if python is None else machine_environment(folder / "bare", python)
    version = run(folder, {}, str(bare), "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    with timed("rehearsal: the bundle"):
        print(run(ROOT, {}, sys.executable, "-m", "bench", "gpu-bundle", "--output", str(bundle), "--python", version))
    before = files_of(checkout)
    variables = isolated(folder)
    with timed("rehearsal: collect the tests of a GPU"):
        collect = (
            f"TRITON_INTERPRET=1 $PYTHON -m pytest -o addopts= -q --collect-only -p no:cacheprovider {DEVICE_TESTS}"
        )
        use = ("-m", "bench", "gpu-bundle", "--use", str(bundle), "--shell", collect)
        print(run(checkout, variables, str(bare), *use).splitlines()[-1])
    results = folder / "results"
    only = f"--phase {','.join(QUICK_PHASES)} " if is_quick else ""
    with timed("rehearsal: make gpu-check"):
        flags = ("NO_INSTALL=1", f"PYTHON={bare}", f"BUNDLE={bundle}", f"ARGS={only}--output {results}")
        print(run(checkout, variables, "make", "gpu-check", *flags))
    check_results(results, expected_phases(QUICK_PHASES if is_quick else ()))
    expect(files_of(checkout) == before, f"the checkout was changed: {sorted(files_of(checkout) ^ before)}")
    left = sorted(path.name for path in temporary.iterdir())
    expect(not left, f"temporary files were left: {left}")
    expect(not (folder / "home").exists(), "the home folder was written to")


def copy_checkout(target: Path) -> None:
    """Copies the files that git does not ignore: no stubs, no environment."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def machine_environment(folder: Path, python: str) -> Path:
    """Installs the machine's versions from an index; returns the interpreter."""
    run(ROOT, {}, python, "-m", "venv", str(folder))
    interpreter = folder / "bin" / "python"
    wanted = [f"{name}=={MACHINE_VERSIONS[name]}" if name in MACHINE_VERSIONS else name for name in PROVIDED]
    run(folder, {}, str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted)
    print(run(folder, {}, str(interpreter), "-m", "pip", "list", "--disable-pip-version-check", "--format=freeze"))
    return interpreter


def linked_environment(folder: Path) -> Path:
    """Links the machine's packages from the environment of this process; returns the interpreter."""
    venv.create(folder, with_pip=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    for name in sorted(closure(PROVIDED)):
        try:
            files = metadata.distribution(name).files or ()
        except metadata.PackageNotFoundError:  # an optional one, or for another platform
            continue
        for file in files:
            if ".." not in file.parts and not (site / file).exists():  # no scripts
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                (site / file).symlink_to(file.locate())
    return folder / "bin" / "python"


def isolated(folder: Path) -> dict[str, str]:
    """Returns variables with which neither an index nor the network nor a home folder can be reached."""
    nowhere = "http://127.0.0.1:9"
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), nowhere)
    return proxies | {
        "HOME": str(folder / "home"),
        "PATH": "/usr/bin:/bin",
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "TMPDIR": str(folder / "tmp"),
        "no_proxy": "127.0.0.1,localhost",  # gRPC reads this name in lower case only
        "NO_PROXY": "127.0.0.1,localhost",
    }


def expected_phases(prefixes: tuple[str, ...]) -> list[str]:
    """Returns the names of all phases that gpu-check has here, or of those that begin with one of the prefixes."""
    import torch

    from bench.gpu import check

    phases = check.gpu_phases() if torch.cuda.is_available() else check.small_phases()
    return [phase.name for phase in check.select(phases, ",".join(prefixes))]


def check_results(folder: Path, expected: Iterable[str]) -> None:
    """Checks that every phase has a file, and that it passed with results or may be skipped and says why."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    found = {record["phase"]: record for record in records}
    missing = [name for name in expected if name not in found]
    expect(not missing, f"there are no results of {', '.join(missing)}, only of {', '.join(found) or 'no phase'}")
    for name, record in found.items():
        print(f"rehearsal: {name}: {record['status']} {record['reason']}".rstrip())
        if record["status"] == "skipped" and name.startswith(MAY_BE_SKIPPED) and record["reason"]:
            continue
        last = "\n".join(record["last_lines"])
        expect(record["status"] == "passed", f"phase {name}: {record['status']} {record['reason']}\n{last}")
        expect(bool(record["results"]), f"phase {name} left no results")


def files_of(folder: Path) -> set[tuple[str, int]]:
    """Returns path and time of change of each file, without the bytecode that Python keeps where it can."""
    paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {(str(path.relative_to(folder)), path.stat().st_mtime_ns) for path in paths}


def run(folder: Path, variables: dict[str, str], *command: str) -> str:
    """Returns what the command prints; with `variables` it gets no other ones. Raises CheckFailed."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=variables or None,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    expect(done.returncode == 0, f"`{' '.join(command)}` ended with status {done.returncode}:\n{done.stdout}")
    return done.stdout


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="install the machine's versions for this interpreter (needs an index)")
    parser.add_argument("--quick", action="store_true", help=f"run only the phases {' and '.join(QUICK_PHASES)}")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-rehearsal-") as folder:
        try:
            rehearse(Path(folder), given.python, given.quick)
        except CheckFailed as failure:
            print(f"rehearsal: {failure}", file=sys.stderr)
            return 1
    print("rehearsal: passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
