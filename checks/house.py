"""Measures the structure of the tree and checks it against limits: `python -m checks.house [ROOT]`.

Prints one row for each figure: files, lines of code, rooms, import arrows, circles, and the files that one sampling
parameter affects. ROOT can be another checkout, for a comparison. Exits with status 1 if a limit is exceeded.

A *room* is a folder of a package; the other modules form the room of the package itself. An *arrow* runs from a
room to another room that it imports. A *circle* is a group of files that import each other. Code is what is left
without blank lines, comments and docstrings.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGES = ("scheduler", "executor", "gateway", "fleet", "kernels", "planning", "quire", "bench", "deploy")
COMMAND_LINE = "quire.cli"
GENERATED = re.compile(r"quire/(v1|executor)/|bench/results/")
SAMPLING_PARAMETER = re.compile(r"\bmin_p\b")
"""A sampling parameter with a unique name: the files that contain it are those that a new parameter would change."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number and its limit (None: no limit)."""

    name: str
    value: int
    limit: int | None = None
    detail: str = ""

    def __str__(self) -> str:
        limit = "" if self.limit is None else f"at most {self.limit}"
        return f"{self.name:<58}{self.value:>8,}  {limit:<14}{self.detail}"


def code_lines(source: str) -> int:
    """Returns the number of lines that hold code: no blank lines, comments or docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines & {number for number, line in enumerate(source.splitlines(), start=1) if line})


def source_files(root: Path) -> list[Path]:
    """Returns the Python files of the product, without tests and generated code, relative to `root`."""
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.splitlines() if name.startswith(tuple(f"{each}/" for each in PACKAGES))]
    return [Path(name) for name in names if name.endswith(".py") and not GENERATED.search(name)]


def module_name(path: Path) -> str:
    """Returns the dotted name of a source file: "scheduler.core.plan"."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imports(root: Path, files: Iterable[Path]) -> dict[str, set[str]]:
    """Returns the modules of the tree that each module imports, in functions and for type checking too."""
    modules = {module_name(path): path for path in files}
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        names = set(_imported_names(ast.parse((root / path).read_text())))
        parents = {each.rpartition(".")[0] for each in names - modules.keys()}
        found[name] = ((names | parents) & modules.keys()) - {name}
    return found


def _imported_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms(arrows: dict[str, set[str]], package: str, root: Path) -> dict[str, set[str]]:
    """Returns the rooms of a package, each with the other rooms that it imports. Rooms below a room count as part of
    it. The room of the package itself, which starts everything, is left out."""
    found: dict[str, set[str]] = defaultdict(set)
    for importer, imported in arrows.items():
        source = _room(importer, package, root)
        if source:
            found[source] |= {target for each in imported if (target := _room(each, package, root))} - {source}
    return found


def packages(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """Returns the top-level packages, each with those that it imports. The command line counts as a package."""
    found: dict[str, set[str]] = defaultdict(set)
    for importer, imported in arrows.items():
        if importer != "quire.__main__":
            found[_package(importer)] |= {_package(each) for each in imported} - {_package(importer)}
    return found


def _package(module: str) -> str:
    is_command_line = module == COMMAND_LINE or module.startswith(f"{COMMAND_LINE}.")
    return COMMAND_LINE if is_command_line else module.split(".")[0]


def _room(module: str, package: str, root: Path) -> str:
    parts = module.split(".")
    is_room = parts[0] == package and len(parts) > 1 and (root / package / parts[1]).is_dir()
    return parts[1] if is_room else ""


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """Returns a circle of imports, or an empty list if there is none."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def measure(root: Path) -> Iterator[Figure]:
    """Yields every figure of the checkout at `root`."""
    files = source_files(root)
    sources = {path: (root / path).read_text() for path in files}
    arrows = imports(root, files)
    yield Figure("files", len(files))
    yield Figure("lines of code", sum(map(code_lines, sources.values())))
    kernel = [path for path in files if path.parent == Path("scheduler/core") and path.name != "__init__.py"]
    yield Figure("scheduler/core: files of the decision kernel", len(kernel), 24)
    yield Figure(
        "scheduler/core: lines of code of the decision kernel", sum(code_lines(sources[p]) for p in kernel), 1640
    )
    long = [path for path in files if path.parts[0] != "kernels" and sources[path].count("\n") > 300]
    yield Figure("files over 300 lines outside kernels", len(long), 0, " ".join(map(str, long)))
    flat = [path for path in files if path.parent == Path("scheduler") and path.name != "__init__.py"]
    yield Figure("scheduler: files beside its rooms", len(flat), 2)
    for package, most in (("scheduler", 31), ("executor", None)):
        found = rooms(arrows, package, root)
        yield Figure(f"{package}: rooms", len(found), 10)
        yield Figure(f"{package}: arrows among rooms", sum(map(len, found.values())), most)
        yield Figure(f"{package}: rooms in a circle", len(circle(found)), 0, " → ".join(circle(found)))
    ring = circle(arrows)
    yield Figure("files in a circle", len(ring), 0, " → ".join(ring))
    top = packages(arrows)
    yield Figure("packages in a circle", len(circle(top)), 0, " → ".join(circle(top)))
    cli = [
        name for name, used in arrows.items() if _package(name) != COMMAND_LINE and COMMAND_LINE in map(_package, used)
    ]
    cli = [name for name in cli if name != "quire.__main__"]
    yield Figure("modules that import the command line", len(cli), 0, " ".join(cli))
    touched = [path for path in files if SAMPLING_PARAMETER.search(sources[path])]
    others = [*(root / "protos").rglob("*.proto"), *(root / "scheduler/live/static").glob("*")]
    touched += [path.relative_to(root) for path in others if SAMPLING_PARAMETER.search(path.read_text())]
    yield Figure("files that a sampling parameter touches", len(touched), None, " ".join(map(str, touched)))


def main(root: Path) -> int:
    is_within = True
    for figure in measure(root):
        print(figure)
        is_within &= figure.limit is None or figure.value <= figure.limit
    return 0 if is_within else 1


def given_root(description: str | None) -> Path:
    """Returns the folder that the command line names. Ends the process for `--help`, or if there is no such folder."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=Path(), help="a checkout; absent: this folder")
    root: Path = parser.parse_args().root
    if not root.is_dir():
        parser.error(f"{root} is not a folder")
    return root.resolve()


if __name__ == "__main__":
    sys.exit(main(given_root(__doc__)))
