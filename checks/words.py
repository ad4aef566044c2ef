"""Checks the English of code, tests and docs: `python -m checks.words [PATH …]`. CONTRIBUTING.md explains the rules.

W1  The first line of a docstring is a sentence: it starts with a capital letter, a digit or a name in backticks, ends
    with punctuation, and does not open with a word that makes it a riddle ("Of a request: …", "Who is next"). The
    description of a constant, below its assignment, can be a phrase, but not a riddle.
W2  A component is *it*: *who*, *nobody* and their like are for people, so *who* follows a noun that names people, and
    the others do not occur.

Prints one line for each finding and exits with status 1 if there is any, or 2 if no file is at the paths.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
EXCLUDED = (
    "bench/results/",
    "models/tiny/stories.py",
    "models/tiny/world.py",
    "checks/words.py",
    "tests/checks/test_words.py",
)
"""Files that are not checked: generated ones, the vocabulary of the stories, and those that list forbidden words."""

RIDDLES = re.compile(r"(Of|Who|Whoever|Whom|What|Whatever|So many|So much|Whether|How|Where|As|And|But|Is|Are)\b(?!-)")
SENTENCE = re.compile(r"^[`\"'(\[]*[A-Z0-9`*_/.<|$-].*?[.:!?)`*…]$", re.DOTALL)

PEOPLE = (
    "user|operator|person|people|reader|newcomer|attacker|student|team|developer|contributor|engineer|someone|anyone"
    "|everyone|author|maintainer|owner|stranger|customer|caller|those|peers?|one|all"
)
WHO = re.compile(r"(?<!\w)(?<!'s )who(?:m|ever|mever)?\b", re.IGNORECASE)
ALLOWED_WHO = re.compile(rf"\b(?:{PEOPLE})(?:s|es)?[,)]?\s+(?:(?:to|with|for|by|of)\s+)?whom?\b", re.IGNORECASE)
BODIES = re.compile(r"\b(?:no|some|any|every)body(?:'s)?\b(?! of )", re.IGNORECASE)
NAME_WORDS = re.compile(r"(?:^|_)(who|whom|whoever|nobody|somebody|anybody|everybody)(?:_|$)")


Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
"""Nodes that can have a docstring."""


class Finding(NamedTuple):
    path: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        path = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{path}:{self.line}: {self.rule} {self.text}"


def check_python(path: Path, source: str) -> Iterator[Finding]:
    """Yields what is wrong with the docstrings, comments, strings and names of one Python file."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, Scope):
            first = ast.get_docstring(node)
            if first is not None:
                yield from check_opening(path, node.body[0].lineno, first)
            for constant in constant_docstrings(node):
                if RIDDLES.match(str(constant.value).strip()):
                    yield Finding(path, constant.lineno, "W1", str(constant.value).strip().split("\n")[0])
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and NAME_WORDS.search(node.name):
            yield Finding(path, node.lineno, "W2", node.name)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from check_people(path, node.lineno, node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from check_people(path, token.start[0], token.string)


def constant_docstrings(node: Scope) -> Iterator[ast.Constant]:
    """Yields the strings that follow an assignment in a body, which describe the assigned name."""
    for assignment, described in pairwise(node.body):
        if isinstance(assignment, ast.Assign | ast.AnnAssign) and isinstance(described, ast.Expr):
            constant = described.value
            if isinstance(constant, ast.Constant):
                yield constant


def check_opening(path: Path, line: int, docstring: str) -> Iterator[Finding]:
    """Yields a finding if the first line of a docstring breaks W1."""
    paragraph = docstring.strip().split("\n\n")[0].split("\n    ")[0].strip()
    opening = paragraph.split("\n")[0]
    if RIDDLES.match(opening) or not SENTENCE.match(paragraph):
        yield Finding(path, line, "W1", opening)


def check_people(path: Path, line: int, text: str) -> Iterator[Finding]:
    """Yields a finding for each line of a text that breaks W2."""
    lines = text.split("\n")
    for number, each in enumerate(ALLOWED_WHO.sub(_blank, text).split("\n")):
        if WHO.search(each) or BODIES.search(each):
            yield Finding(path, line + number, "W2", lines[number].strip())


def _blank(match: re.Match[str]) -> str:
    """Returns white space with as many line breaks as the match has, so that line numbers stay."""
    return " " + "\n" * match[0].count("\n")


def check_text(path: Path, source: str) -> Iterator[Finding]:
    """Yields a finding for each line of a page, a .proto file or a script that breaks W2."""
    yield from check_people(path, 1, source)


def check_file(path: Path) -> list[Finding]:
    """Returns what is wrong with one file."""
    source = path.read_text()
    return list(check_python(path, source) if path.suffix == ".py" else check_text(path, source))


def tracked_files(names: list[str]) -> list[Path]:
    """Returns the files of this checkout below `names` that people write English in."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *names],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    suffixes = {".py", ".md", ".proto", ".toml", ".yaml", ".yml", ".js", ".html"}
    wanted = [name for name in listed if not name.startswith(EXCLUDED)]
    return [ROOT / name for name in wanted if Path(name).suffix in suffixes or Path(name).name in ("Makefile", "run")]


def main(names: list[str]) -> int:
    paths = [path for path in tracked_files(names) if path.is_file()]
    if not paths:
        print(f"words: no file to check in {' '.join(names)}")
        return 2
    findings = [finding for path in paths for finding in check_file(path)]
    for finding in findings:
        print(finding)
    print(f"words: {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
