"""Checks the installation that users get: `python -m checks.wheel`.

Builds the wheel, installs it into a fresh environment together with a distribution that owns the names `kernels` and
`scheduler`, and runs `quire demo` and one request there. Needs a package index, and about two minutes. Exits with
status 1 and the reason if anything fails.
"""

import signal
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

from checks.gpu_rehearsal import copy_checkout
from checks.steps import CheckFailed, expect, timed

ROOT = Path(__file__).resolve().parent.parent
MAX_WHEEL_BYTES = 10_000_000
OCCUPIED_NAMES = ("kernels", "scheduler")
REQUIRED_FILES = {
    "quire/models/tiny/SHA256SUMS",
    "quire/models/tiny/config.json",
    "quire/models/tiny/generation_config.json",
    "quire/models/tiny/model.safetensors",
    "quire/models/tiny/tokenizer.json",
    "quire/models/tiny/tokenizer_config.json",
    "quire/fleet/local_control.py",
    "quire/gateway/http/static/index.html",
    "quire/lifeline.py",
    "quire/scheduler/live/static/index.html",
    "quire/scheduler/text/chat_worker.py",
    "quire/scheduler/text/grammar_worker.py",
    "quire/scheduler/text/worker_pipe.py",
    "quire/executor/v1/executor_pb2.py",
    "quire/v1/generation_pb2.py",
}
FREE_PORTS = (
    "--listen=127.0.0.1:0",
    "--http-listen=127.0.0.1:0",
    "--executor=127.0.0.1:0",
    "--metrics-address=",
    "--gateway-listen=127.0.0.1:0",
)
COMMAND_TIMEOUT_S = 500.0


def main() -> int:
    """Runs all checks; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="quire-wheel-") as folder:
        try:
            check(Path(folder))
        except CheckFailed as failure:
            print(f"wheel: {failure}", file=sys.stderr)
            return 1
    return 0


def check(folder: Path) -> None:
    """Raises CheckFailed at the first problem."""
    with timed("wheel: build the wheel and the source distribution"):
        wheel, sdist = build(folder)
    check_wheel(wheel)
    check_sdist(sdist)
    with timed("wheel: install the wheel into a fresh environment"):
        python = install(wheel, folder)
    elsewhere = folder / "elsewhere"
    for name in ("quire", *OCCUPIED_NAMES):
        write_package(elsewhere / name, f"raise RuntimeError('{name} was imported from the working directory')\n")
    quire = str(python.with_name("quire"))
    check_other_owners(python, elsewhere)
    with timed("wheel: quire demo"):
        output = run(elsewhere, quire, "demo")
        expect("tokens/s" in output, f"the demonstration printed no summary:\n{output}")
    with timed("wheel: quire serve and one request"):
        expect(bool(serve_one_request(quire, elsewhere).strip()), "the request came back without text")
    check_other_owners(python, elsewhere)


def build(folder: Path) -> tuple[Path, Path]:
    """Returns the wheel and the source distribution, made with the versions of constraints.txt.

    A copy of the checkout is built, because the build writes the stubs, which other processes may read meanwhile.
    """
    checkout = folder / "checkout"
    copy_checkout(checkout)
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    python = environment(folder / "build")
    pip_install(python, *requirements)
    dist = folder / "dist"
    dist.mkdir()
    build_all = "import sys; from hatchling import build as b; b.build_sdist(sys.argv[1]); b.build_wheel(sys.argv[1])"
    run(checkout, str(python), "-P", "-c", build_all, str(dist))
    return next(dist.glob("*.whl")), next(dist.glob("*.tar.gz"))


def check_wheel(wheel: Path) -> None:
    """Checks that the wheel is small, complete, and owns no top-level name but `quire`."""
    size = wheel.stat().st_size
    print(f"wheel: {wheel.name} has {size / 1e6:.1f} MB")
    expect(size <= MAX_WHEEL_BYTES, f"the wheel has {size:,} bytes, more than {MAX_WHEEL_BYTES:,}")
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    foreign = {top for top in tops if top != "quire" and not (top.startswith("quire-") and top.endswith(".dist-info"))}
    expect(not foreign, f"the wheel installs more than `quire` at the top level: {sorted(foreign)}")
    expect(names >= REQUIRED_FILES, f"the wheel lacks {sorted(REQUIRED_FILES - names)}")


def check_sdist(sdist: Path) -> None:
    """Checks that the source distribution has all files that building the wheel needs."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"hatch_build.py", "protos/build.py", "protos/quire/v1/generation.proto", "models/tiny/model.safetensors"}
    expect(names >= needed, f"the source distribution lacks {sorted(needed - names)}")


def install(wheel: Path, folder: Path) -> Path:
    """Installs the wheel and another distribution with the tree's names; returns the environment's interpreter."""
    python = environment(folder / "installed")
    other = folder / "other"
    for name in OCCUPIED_NAMES:
        write_package(other / name, "OWNER = 'another distribution'\n")
    (other / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "other-kernels"\nversion = "1"\n'
        f"[tool.hatch.build.targets.wheel]\npackages = {list(OCCUPIED_NAMES)}\n",
        encoding="utf-8",
    )
    pip_install(python, str(other))
    pip_install(python, f"{wheel}[executor]")
    return python


def check_other_owners(python: Path, folder: Path) -> None:
    """Checks that the other distribution's packages were not replaced."""
    for name in OCCUPIED_NAMES:
        owner = run(folder, str(python), "-P", "-c", f"import {name}; print({name}.OWNER)")
        expect(owner.strip() == "another distribution", f"`import {name}` gives another module: {owner}")


def serve_one_request(quire: str, folder: Path) -> str:
    """Returns the generated text."""
    with subprocess.Popen([quire, "serve", *FREE_PORTS], cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            ready = next((line for line in server.stdout if line.startswith("ready ")), "")
            expect(bool(ready), f"`quire serve` ended with status {server.poll()} before it was ready")
            address = dict(word.split("=", 1) for word in ready.split()[1:])["grpc"]
            text = run(folder, quire, "generate", "Once upon a time", "--address", address, "--max-tokens", "16")
            server.send_signal(signal.SIGTERM)
            expect(server.wait(COMMAND_TIMEOUT_S) == 0, f"`quire serve` ended with status {server.returncode}")
        finally:
            server.kill()
    return text


def environment(folder: Path) -> Path:
    """Creates an empty virtual environment; returns its interpreter."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def pip_install(python: Path, *requirements: str) -> None:
    arguments = ("--quiet", "--disable-pip-version-check", "--constraint", str(ROOT / "constraints.txt"))
    run(ROOT, str(python), "-P", "-m", "pip", "install", *arguments, *requirements)


def write_package(folder: Path, source: str) -> None:
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(source, encoding="utf-8")


def run(folder: Path, *command: str) -> str:
    """Returns what the command prints. Raises CheckFailed with its errors if it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    expect(done.returncode == 0, f"`{' '.join(command)}` failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
