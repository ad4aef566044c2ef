"""The packages of other client libraries, installed apart from the project, once for each set of versions."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

from tests.support.paths import ROOT

PROGRAMS = ROOT / "tests" / "gateway" / "clients" / "programs"
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "quire-tests"
_TIMEOUT_S = 600


class NotInstalled(Exception):
    """The packages could not be installed. The message says why."""


def command_of(program: str, directory: Path) -> list[str]:
    """Returns the command that runs a program of PROGRAMS with the packages that it needs. Raises NotInstalled.

    directory  an empty one, for programs of Node: they find packages only beside themselves
    """
    if program.endswith(".mjs"):
        packages = _node_packages()
        for each in PROGRAMS.glob("*.mjs"):
            shutil.copy(each, directory)
        (directory / "node_modules").symlink_to(packages / "node_modules")
        return ["node", str(directory / program)]
    # The project's own environment has the package openai.
    python = sys.executable if program.startswith("openai") else str(_python_packages() / "bin" / "python")
    return [python, str(PROGRAMS / program)]


def python_tool(module: str) -> list[str]:
    """Returns the command of a module of a package in requirements.txt. Raises NotInstalled."""
    return [str(_python_packages() / "bin" / "python"), "-m", module]


def node_tool(script: str) -> list[str]:
    """Returns the command of a script of a package in package-lock.json. Raises NotInstalled.

    script  its path within node_modules
    """
    return ["node", str(_node_packages() / "node_modules" / script)]


def evaluation_python() -> str:
    """Returns the Python of an environment with requirements-evaluation.txt. Raises NotInstalled.

    Torch and transformers are those of the project's environment, so that no other build of torch is downloaded.
    """
    requirements = PROGRAMS / "requirements-evaluation.txt"
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise NotInstalled("there is no torch")
    shared = str(Path(torch.origin).parent.parent)

    def install(directory: Path) -> None:
        venv.create(directory, with_pip=True)
        (site_packages,) = directory.glob("lib/python*/site-packages")
        (site_packages / "shared.pth").write_text(shared)
        _run(*_pip(directory), "--no-deps", "--requirement", requirements, directory=directory)

    versions = requirements.read_bytes() + shared.encode()
    return str(_installed(f"evaluation-{sys.version.split()[0]}", versions, install) / "bin" / "python")


def _python_packages() -> Path:
    """Returns an environment with requirements.txt."""
    requirements = PROGRAMS / "requirements.txt"

    def install(directory: Path) -> None:
        venv.create(directory, with_pip=True)
        _run(*_pip(directory), "--requirement", requirements, directory=directory)

    return _installed(f"python-{sys.version.split()[0]}", requirements.read_bytes(), install)


def _pip(directory: Path) -> tuple[object, ...]:
    """Returns the command that installs packages. Python compiles the few modules that are imported when they are."""
    return (directory / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile")


def _node_packages() -> Path:
    """Returns a directory with the packages of package-lock.json."""
    if shutil.which("npm") is None:
        raise NotInstalled("there is no npm")

    def install(directory: Path) -> None:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(PROGRAMS / name, directory)
        _run("npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", directory=directory)

    return _installed("node", (PROGRAMS / "package-lock.json").read_bytes(), install)


def _installed(name: str, versions: bytes, install: Callable[[Path], None]) -> Path:
    """Returns the directory in which `install` has succeeded for these versions. Raises NotInstalled."""
    directory = _CACHE / f"{name}-{hashlib.sha256(versions).hexdigest()[:12]}"
    done = directory / ".installed"
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several workers share the suite; each can install something else
        if not done.exists():
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            install(directory)
            done.touch()
    return directory


def _run(*command: object, directory: Path) -> None:
    try:
        subprocess.run(
            [str(word) for word in command],
            cwd=directory,
            check=True,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [""])[-1]
        raise NotInstalled(f"{command[0]} failed: {last}") from None
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"{command[0]} took longer than {_TIMEOUT_S} s") from None
