"""The build hook of hatchling: generates the gRPC stubs and lays out the wheel.

The tree keeps its packages at the top. An installation must not, because other distributions own names such as
`kernels` too. So the wheel holds one top-level package, `quire`, with the others inside it::

    tree                          wheel
    quire/client.py               quire/client.py
    quire/executor/v1/…           quire/executor/v1/…          (generated)
    executor/main.py              quire/executor/main.py
    models/tiny/config.json       quire/models/tiny/config.json

`scheduler.core` of the tree is `quire.scheduler.core` of an installation, and `quire_imports` rewrites the imports to
match. An editable installation runs the unchanged tree.
"""

import ast
import runpy
import shutil
import tempfile
from collections.abc import Collection, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # the tests import this module outside a build
    BuildHookInterface = object


class QuireHook(BuildHookInterface):
    """The build hook, configured in pyproject.toml.

    packages     the packages of the tree, `quire` among them
    checkpoint   the folder of the embedded model; `checkpoint-files` are the files that serving needs
    exclude      paths that are not installed
    """

    _staged: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        runpy.run_path(str(root / "protos" / "build.py"))["generate"](root)
        if self.target_name != "wheel" or version == "editable":
            return
        self._staged = Path(tempfile.mkdtemp(prefix="quire-wheel-"))
        stage(root, self._staged, self.config["packages"], self.config["exclude"])
        checkpoint = Path(self.config["checkpoint"])
        for name in self.config["checkpoint-files"]:
            _copy(root / checkpoint / name, self._staged / checkpoint / name)
        build_data["force_include"][str(self._staged)] = "quire"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._staged is not None:
            shutil.rmtree(self._staged)


def stage(root: Path, target: Path, packages: Collection[str], exclude: Collection[str] = ()) -> None:
    """Writes the contents of the installed package `quire` into `target`.

    Raises ValueError for a source that cannot be rewritten, and FileExistsError for two different files of one name;
    an empty one gives way to the other.
    """
    modules = {module for package in packages for module in _modules(root, package)}
    for package in packages:
        inside = target if package == "quire" else target / package
        for path in _files(root, root / package, exclude):
            destination = inside / path.relative_to(root / package)
            if path.suffix != ".py":
                _copy(path, destination)
                continue
            text = quire_imports(path.read_text(encoding="utf-8"), modules, str(path))
            # `quire.executor` is the namespace of executor.proto as well: the __init__.py of its stubs is empty.
            staged = destination.read_text(encoding="utf-8") if destination.exists() else ""
            if staged and text and staged != text:
                raise FileExistsError(f"{path} would overwrite another file in the wheel")
            destination.parent.mkdir(parents=True, exist_ok=True)
            destination.write_text(text or staged, encoding="utf-8")


def quire_imports(source: str, modules: Collection[str], path: str = "<source>") -> str:
    """Returns a module's source with `quire.` before the dotted names of `modules`, except those within quire.

    It changes import statements, strings that consist of the dotted name of a module, and the string after "-m".
    The fixed names of loggers stay. Raises ValueError for `import a.b` without `as`, which would bind another name.
    """
    lines = [line.encode() for line in source.splitlines(keepends=True)]  # columns of the ast count bytes
    for line, column, old, new in sorted(set(_changes(ast.parse(source, path), modules, path)), reverse=True):
        text = lines[line - 1]
        start = text.index(old.encode(), column)
        lines[line - 1] = text[:start] + new.encode() + text[start + len(old.encode()) :]
    return b"".join(lines).decode()


def _changes(tree: ast.Module, modules: Collection[str], path: str) -> Iterator[tuple[int, int, str, str]]:
    """Yields (line, column to search from, old text, new text)."""
    names = {module for module in modules if module.split(".")[0] != "quire"}
    loggers: set[ast.expr] = set()
    programs: set[ast.expr] = set()
    for node in ast.walk(tree):  # the parents of a string come before it
        match node:
            case ast.Call(func=ast.Attribute(attr="getLogger"), args=arguments):
                loggers.update(arguments)
            case ast.Call(args=words) | ast.Tuple(elts=words) | ast.List(elts=words):
                programs |= {after for word, after in pairwise(words) if getattr(word, "value", None) == "-m"}
            case ast.ImportFrom(module=str(module), level=0) if module in names:
                yield node.lineno, node.col_offset, f"from {module} ", f"from quire.{module} "
            case ast.alias(name=name, asname=None) if "." in name and name in names:
                raise ValueError(f"{path}:{node.lineno}: write `from … import …` for `import {name}`")
            case ast.Import(names=aliases):
                for each in aliases:
                    if each.name in names:
                        own_name = "" if each.asname else f" as {each.name}"
                        yield each.lineno, each.col_offset, each.name, f"quire.{each.name}{own_name}"
            case ast.Constant(value=str(value)) if value in names and (
                node in programs or ("." in value and node not in loggers)
            ):
                yield node.lineno, node.col_offset, value, f"quire.{value}"


def _modules(root: Path, package: str) -> Iterator[str]:
    for path in (root / package).rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _files(root: Path, folder: Path, exclude: Collection[str]) -> Iterator[Path]:
    left_out = [root / each for each in exclude]
    for path in sorted(folder.rglob("*")):
        is_cache = "__pycache__" in path.parts
        if path.is_file() and not is_cache and not any(path.is_relative_to(each) for each in left_out):
            yield path


def _copy(source: Path, destination: Path) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, destination)
