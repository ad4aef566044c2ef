"""The measured shape of a small tree is what a person counts in it."""

import subprocess
import sys
from pathlib import Path

import pytest

from checks.house import circle, code_lines, imports, main, measure, rooms, source_files
from tests.support.paths import ROOT


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with two rooms in the scheduler, a circle between two files, and one sampling parameter."""
    files = {
        "scheduler/__init__.py": "",
        "scheduler/core/__init__.py": "",
        "scheduler/core/plan.py": '"""Plans."""\n\nMIN = 1  # a comment\n\n\nclass Plan:\n    min_p: float\n',
        "scheduler/core/pool.py": "from scheduler.core.plan import Plan\n",
        "scheduler/engine/__init__.py": "",
        "scheduler/engine/session.py": "def run() -> None:\n    from scheduler.core import plan\n",
        "scheduler/engine/one.py": "import scheduler.engine.two\n",
        "scheduler/engine/two.py": "from scheduler.engine.one import x\n",
        "quire/v1/generated.py": "x = 1\n" * 400,
        "tests/test_plan.py": "x = 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "protos").mkdir()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)
    return tmp_path


def test_code_is_counted_without_comments_and_docstrings() -> None:
    assert code_lines('"""Text.\n\nMore.\n"""\n\n# why\nx = """a\n\nb"""\n\ny = 2  # why\n') == 3


def test_figures_of_a_small_tree(tree: Path) -> None:
    figures = {figure.name: figure for figure in measure(tree)}
    assert figures["files"].value == 8
    assert figures["scheduler/core: files of the decision kernel"].value == 2
    assert figures["scheduler/core: lines of code of the decision kernel"].value == 4
    assert figures["scheduler: rooms"].value == 2
    assert figures["scheduler: arrows among rooms"].value == 1
    assert figures["files in a circle"].detail == "scheduler.engine.one → scheduler.engine.two → scheduler.engine.one"
    assert figures["files that a sampling parameter touches"].detail == "scheduler/core/plan.py"
    assert main(tree) == 1


def test_imports_in_functions_are_arrows_too(tree: Path) -> None:
    arrows = imports(tree, source_files(tree))
    assert arrows["scheduler.engine.session"] >= {"scheduler.core.plan"}
    assert rooms(arrows, "scheduler", tree)["engine"] == {"core"}


def test_a_circle_is_named() -> None:
    assert circle({"a": {"b"}, "b": set()}) == []
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}


@pytest.mark.parametrize("check", ["house", "concepts"])
def test_the_command_line_explains_itself(check: str) -> None:
    def ended(word: str) -> tuple[int, str]:
        command = [sys.executable, "-m", f"checks.{check}", word]
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        return result.returncode, result.stdout + result.stderr

    code, text = ended("--help")
    assert (code, "usage: " in text) == (0, True)
    code, text = ended("/no/such/folder")
    assert (code, "/no/such/folder is not a folder" in text) == (2, True)
