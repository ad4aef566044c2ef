"""The wheel has one top-level package, so other distributions may own names of the tree."""

import os
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from hatch_build import quire_imports, stage
from tests.support.paths import ROOT

HOOK = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["hooks"]["custom"]
MODULES = {"quire", "quire.logs", "kernels", "kernels.cpu", "kernels.triton", "bench", "bench.kernels", "bench.logs"}


def rewritten(source: str) -> str:
    return quire_imports(source, MODULES)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from kernels import cpu", "from quire.kernels import cpu"),
        ("from kernels.cpu import attend", "from quire.kernels.cpu import attend"),
        ("if x:\n    from kernels.cpu import attend", "if x:\n    from quire.kernels.cpu import attend"),
        ("import kernels", "import quire.kernels as kernels"),
        ("import kernels, os, bench", "import quire.kernels as kernels, os, quire.bench as bench"),
        ("import kernels.cpu as home", "import quire.kernels.cpu as home"),
        ("é = 1; import kernels", "é = 1; import quire.kernels as kernels"),
        ('run("-m", "bench.kernels")', 'run("-m", "quire.bench.kernels")'),
        ('("-m", "bench", "kernels")', '("-m", "quire.bench", "kernels")'),
        ('import_module("bench.kernels")', 'import_module("quire.bench.kernels")'),
    ],
)
def test_imports_of_the_tree_become_imports_of_quire(source: str, expected: str) -> None:
    assert rewritten(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "from quire import logs",
        "from quire.logs import configure",
        "from kernels_of_others import cpu",
        "import bench_tools",
        "from .kernels import cpu",
        'kind = "kernels"',
        'text = "bench.kernels measures kernels"',
        'log = logging.getLogger("bench.logs")',
        "# from kernels import cpu",
        "kernels.cpu.attend()",
    ],
)
def test_other_text_is_not_changed(source: str) -> None:
    assert rewritten(source) == source


def test_an_import_that_would_bind_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"write `from … import …` for `import kernels\.cpu`"):
        rewritten("import kernels.cpu")


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    for path, text in {"quire/bench/run.py": "a = 1\n", "bench/run.py": "a = 2\n"}.items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    with pytest.raises(FileExistsError, match=r"run\.py would overwrite another file"):
        stage(tmp_path, tmp_path / "staged", ("quire", "bench"))


def test_installed_modules_import_nothing_from_other_top_level_names(tmp_path: Path) -> None:
    """Imports all of the staged package while each name of the tree belongs to a package that cannot be imported.

    Modules that need Ray are left out where it is not installed.
    """
    stage(ROOT, tmp_path / "site" / "quire", HOOK["packages"], HOOK["exclude"])
    for name in set(HOOK["packages"]) - {"quire"}:
        (tmp_path / "site" / name).mkdir()
        (tmp_path / "site" / name / "__init__.py").write_text(f"raise RuntimeError('{name} belongs to others')\n")
    script = """
        import importlib, pathlib, sys
        site = pathlib.Path(sys.argv[1])
        for path in sorted((site / "quire").rglob("*.py")):
            parts = path.relative_to(site).with_suffix("").parts
            if parts[-1] != "__main__":
                try:
                    importlib.import_module(".".join(parts))
                except ModuleNotFoundError as error:
                    if error.name != "ray":
                        raise
        print(sum(name.startswith("quire.") for name in sys.modules))
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(script), str(tmp_path / "site")],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 200


def test_every_data_file_of_the_packages_is_installed(tmp_path: Path) -> None:
    stage(ROOT, tmp_path, HOOK["packages"], HOOK["exclude"])
    static = {path.name for path in (ROOT / "scheduler" / "live" / "static").iterdir()}
    assert {path.name for path in (tmp_path / "scheduler" / "live" / "static").iterdir()} == static
    assert not (tmp_path / "bench" / "results").exists()
    assert not list(tmp_path.rglob("*.pyc"))
