"""Generates the gRPC stubs from the .proto files, into the package `quire`.

`make protos` runs it as a script, and hatch_build.py calls it whenever the project is built or installed.
The generated modules are build products and are not committed.
"""

import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(root: Path = ROOT) -> None:
    """Writes `*_pb2.py`, `*_pb2_grpc.py` and their type stubs into `quire/`; raises RuntimeError on failure."""
    sources = sorted((root / "protos" / "quire").rglob("*.proto"))
    arguments = [
        "protoc",
        f"-I{root / 'protos'}",
        f"-I{files('grpc_tools') / '_proto'}",
        f"--python_out={root}",
        f"--grpc_python_out={root}",
        f"--mypy_out=quiet:{root}",
        f"--mypy_grpc_out=quiet:{root}",
        *map(str, sources),
    ]
    # protoc looks for its mypy plug-ins on PATH. In a virtual environment they are in the folder of the interpreter.
    if protoc.main([*arguments, *_plugins()]) != 0:
        raise RuntimeError("protoc failed; see its message above")
    for package in ("quire/v1", "quire/executor", "quire/executor/v1"):
        (root / package / "__init__.py").touch()


def _plugins() -> list[str]:
    bin_dir = Path(sys.executable).parent
    return [
        f"--plugin={name}={bin_dir / name}"
        for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
        if (bin_dir / name).exists()
    ]


if __name__ == "__main__":
    generate()
