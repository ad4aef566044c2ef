"""Makes and uses a folder with what a GPU machine without a package index lacks: wheels and the generated stubs.

    python -m bench gpu-bundle --output DIR             # here, with an index and the packages of `make`
    make gpu-check NO_INSTALL=1 BUNDLE=DIR              # there; or: python3 -m bench gpu-bundle --use DIR

The first command downloads wheels for Linux on x86-64 of all that gpu-check needs beyond the distributions that the
machine provides (`bench.gpu.requirements.PROVIDED`), with the versions of constraints.txt. The second command copies
the tree and the stubs into a temporary folder, installs the wheels beside them, and runs gpu-check there, which gets
all other flags. It writes nothing else but the results, and kernels that Triton compiles, in the home folder.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from argparse import Namespace
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.command_line import BenchError, Parser

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 60 << 20
_MANIFEST = "manifest.json"
_PLATFORMS = tuple(f"manylinux{glibc}_x86_64" for glibc in ("_2_31", "_2_28", "_2_17", "2014", "_2_5"))
# The stubs refuse versions of these two that are older than the generator's.
_WITH_STUBS = ("grpcio", "protobuf")
_BESIDE_PACKAGES = ("models", "protos", "tests", "pyproject.toml", "constraints.txt")


def make(folder: Path, python: str) -> int:
    """Writes the bundle for a version of Python, such as "3.12", and returns its size in bytes. Raises BenchError."""
    if folder.exists() and any(folder.iterdir()) and not (folder / _MANIFEST).is_file():
        raise BenchError(f"{folder} holds something else; name an empty folder or an earlier bundle")
    with tempfile.TemporaryDirectory(prefix="quire-bundle-") as directory:
        new = Path(directory) / "new"
        _download(pinned(_carried(python)), new / "wheels", python)
        _generate_stubs(Path(directory) / "generated", new / "quire")
        wheels = sorted(path.name for path in (new / "wheels").iterdir())
        manifest = {"python": python, "wheels": wheels, "protos": _digest_of_protos()}
        (new / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        size = size_within(new, MAX_BYTES)
        if folder.exists():
            shutil.rmtree(folder)
        shutil.copytree(new, folder)
    return size


def pinned(names: Sequence[str]) -> list[str]:
    """Returns `name==version` for each name, with the versions of constraints.txt. Raises BenchError."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    versions = {_canonical(line.split("==")[0]): line for line in lines if "==" in line and not line.startswith("#")}
    if unknown := [name for name in names if name not in versions]:
        raise BenchError(f"constraints.txt has no version of {', '.join(unknown)}")
    return [versions[name] for name in names]


def size_within(folder: Path, limit: int) -> int:
    """Returns the bytes of all files below a folder. Raises BenchError if they exceed the limit."""
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    total = sum(sizes.values())
    if total > limit:
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:5]
        listed = ", ".join(f"{path.name} ({sizes[path] / 2**20:.1f})" for path in largest)
        raise BenchError(f"the bundle has {total / 2**20:.1f} MiB, more than {limit / 2**20:.0f}; largest: {listed}")
    return total


def check(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a bundle that fits this Python and this tree. Raises BenchError if it does not."""
    try:
        manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchError(f"{folder} is no bundle ({error}); `python -m bench gpu-bundle` makes it") from error
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    if manifest["python"] != python:
        raise BenchError(
            f"{folder} is for Python {manifest['python']}, and {sys.executable} is {python}; "
            f"make it again with `--python {python}`"
        )
    if missing := [name for name in manifest["wheels"] if not (folder / "wheels" / name).is_file()]:
        raise BenchError(f"{folder} lacks wheels: {', '.join(missing)}; copy it again")
    if missing := [str(path) for path in stubs() if not (folder / path).is_file()]:
        raise BenchError(f"{folder} lacks stubs: {', '.join(missing)}; copy it again")
    if manifest["protos"] != _digest_of_protos():
        raise BenchError(f"the stubs in {folder} are of other .proto files than this tree's; make it again")
    return manifest


def unpack(folder: Path, target: Path) -> tuple[Path, dict[str, str]]:
    """Installs the bundle's wheels and copies the tree and the stubs, all below `target`.

    Returns the tree and the environment variables of a process that runs there. Raises BenchError if the bundle does
    not fit this Python and this tree.
    """
    wheels = [str(folder / "wheels" / name) for name in check(folder)["wheels"]]
    packages, tree = target / "packages", target / "tree"
    install = ("install", "--isolated", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target", str(packages))
    _pip(*install, "--disable-pip-version-check", "--no-cache-dir", *wheels)
    _copy_tree(tree)
    shutil.copytree(folder / "quire", tree / "quire", dirs_exist_ok=True)
    paths = [str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "PYTHON": sys.executable}
    variables["TORCHINDUCTOR_CACHE_DIR"] = str(target / "inductor")  # torch would leave it in the folder of all users
    if not os.access(Path.home(), os.W_OK):  # where Triton would keep compiled kernels
        variables["TRITON_CACHE_DIR"] = os.environ.get("TRITON_CACHE_DIR", str(target / "triton"))
    return tree, dict(os.environ) | variables


def use(folder: Path, command: Sequence[str]) -> int:
    """Runs a command with a bundle and returns its exit status. Raises BenchError if the bundle does not fit."""
    received: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    def end(number: int, frame: object) -> None:
        """Ends the command, now or as soon as it has started, so that the folder is removed."""
        received.append(number)
        for process in started:
            process.terminate()

    before = signal.signal(signal.SIGTERM, end)
    try:
        with tempfile.TemporaryDirectory(prefix="quire-gpu-") as directory:
            tree, variables = unpack(folder, Path(directory))
            started.append(subprocess.Popen(command, cwd=tree, env=variables))
            if received:
                started[0].terminate()
            return started[0].wait()
    finally:
        signal.signal(signal.SIGTERM, before)


def _carried(python: str) -> list[str]:
    """Returns the names of the distributions that the bundle holds."""
    from bench.gpu.requirements import PROVIDED, closure, needed

    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": "x86_64",
        "platform_system": "Linux",
        "sys_platform": "linux",
    }
    own = closure((each.name for each in needed()), environment) - closure(PROVIDED, environment)
    for name in sorted(own):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError as error:
            raise BenchError(f"{name} is not installed here, so what it requires is unknown; see `make`") from error
    return sorted({*own, *_WITH_STUBS})


def _download(requirements: Sequence[str], folder: Path, python: str) -> None:
    abis = [f"--abi={abi}" for abi in (f"cp{python.replace('.', '')}", "abi3", "none")]
    target = (
        f"--python-version={python}",
        "--implementation=cp",
        *abis,
        *(f"--platform={each}" for each in _PLATFORMS),
    )
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--dest", str(folder))
    _pip("download", *options, *target, *requirements)


def _pip(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in (done.stderr + done.stdout).splitlines() if "rror" in line or "No module" in line]
        raise BenchError(f"pip {arguments[0]}: " + ("; ".join(errors[-3:]) or done.stderr.strip() or "it failed"))


def _generate_stubs(folder: Path, target: Path) -> None:
    """Generates the stubs of this tree's .proto files into `target`, the root of the package `quire`."""
    shutil.copytree(ROOT / "protos", folder / "protos")
    program = f"import pathlib, runpy; runpy.run_path('protos/build.py')['generate'](pathlib.Path({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"the stubs cannot be generated: {done.stderr.strip().splitlines()[-1]}")
    shutil.copytree(folder / "quire", target, ignore=shutil.ignore_patterns("*.pyi"))


def stubs() -> list[Path]:
    """Returns the generated modules of this tree's .proto files, relative to the root."""
    sources = [path.relative_to(ROOT / "protos") for path in sorted((ROOT / "protos" / "quire").rglob("*.proto"))]
    return [path.with_name(path.stem + end) for path in sources for end in ("_pb2.py", "_pb2_grpc.py")]


def _digest_of_protos() -> str:
    contents = [path.read_bytes() for path in sorted((ROOT / "protos" / "quire").rglob("*.proto"))]
    return hashlib.sha256(b"".join(contents)).hexdigest()


def _copy_tree(target: Path) -> None:
    """Copies what the phases run. Results go to the original tree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    target.mkdir()
    for name in (*project["tool"]["hatch"]["build"]["hooks"]["custom"]["packages"], *_BESIDE_PACKAGES):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copyfile(source, target / name)
    (target / "bench" / "results").symlink_to(ROOT / "bench" / "results")


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _parse(arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    parser = Parser("gpu-bundle", __doc__)
    parser.add_argument("--output", type=Path, help="folder to make; with --use the folder of gpu-check's results")
    parser.add_argument("--python", default="3.12", help="version of Python on the other machine (default: 3.12)")
    parser.add_argument("--use", type=Path, metavar="DIR", help="run gpu-check with this bundle; takes its flags too")
    parser.add_argument("--shell", metavar="COMMAND", help="with --use: run this instead, where $PYTHON is this Python")
    given, others = parser.parse_known_args(arguments)
    if others and (given.shell or not given.use):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if given.shell and (given.output or not given.use):
        parser.error("--shell needs --use, and no --output")
    if not given.use and not given.output:
        parser.error("one of --output and --use is needed")
    return given, others


def main(arguments: Sequence[str]) -> int:
    given, others = _parse(arguments)
    if given.use:
        results = ["--output", str(given.output.resolve())] if given.output else []
        check_command = [sys.executable, "-m", "bench", "gpu-check", *others, *results]
        return use(given.use.resolve(), ["bash", "-c", given.shell] if given.shell else check_command)
    size = make(given.output, given.python)
    wheels = len(list((given.output / "wheels").iterdir()))
    print(f"{given.output}: {wheels} wheels for Python {given.python} and the stubs, {size / 2**20:.1f} MiB")
    return 0
