"""The cache of compiled kernels: processes that share it, sources that change, and directories that cannot be used."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import time
from ctypes import CFUNCTYPE, c_int64
from typing import TYPE_CHECKING

import pytest
from numba.core import event
from numba.core.caching import IndexDataCacheFile

from kernels.cpu import compiler
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SIGNATURE = compiler.types.int64(compiler.types.int64)

VARIANTS = """
def adder(number):
    def add(value):
        return value + number
    return add
"""

COMPILE = """
import sys, time
from ctypes import CFUNCTYPE, c_int64
from pathlib import Path
from numba.core import event
from numba.core.caching import IndexDataCacheFile as Files
from kernels.cpu.compiler import compiled, types
from variants import adder

directory, number, meets = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "meets"

def wait(name):
    ends_s = time.monotonic() + 1  # with the lock, the other process has not come so far
    while not (directory / name).exists() and time.monotonic() < ends_s:
        time.sleep(0.01)

def save_index(files, overloads, save=Files._save_index):
    (directory / f"chosen-{number}").touch()
    wait("chosen-2" if number == 1 else "indexed-1")
    save(files, overloads)
    (directory / f"indexed-{number}").touch()

def save_code(files, name, code, save=Files._save_data):
    if number == 1:
        wait("saved-2")
    save(files, name, code)
    (directory / f"saved-{number}").touch()

if meets:
    Files._save_index, Files._save_data = save_index, save_code
with event.install_recorder("numba:run_pass") as passes:
    add = compiled(adder(number), types.int64(types.int64))
print(CFUNCTYPE(c_int64, c_int64)(add.address)(40), len(passes.buffer))
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Returns a function that starts a process, which prints 40 + number and the number of passes of its compiler."""
    (tmp_path / "variants.py").write_text(VARIANTS)
    environment = os.environ | {
        "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
    }

    def start(number: int, how: str = "") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", COMPILE, str(tmp_path), str(number), how]
        return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE)

    return start


def results(*processes: subprocess.Popen[str]) -> list[list[int]]:
    return [[int(word) for word in process.communicate()[0].split()] for process in processes]


def test_processes_that_compile_variants_at_once_get_their_own(start: Callable[..., subprocess.Popen[str]]) -> None:
    assert [result for result, _ in results(start(1, "meets"), start(2, "meets"))] == [41, 42]
    assert results(start(1), start(2)) == [[41, 0], [42, 0]]


def test_of_processes_that_start_at_once_one_compiles(start: Callable[..., subprocess.Popen[str]]) -> None:
    (first, first_passes), (second, second_passes) = results(start(1), start(1))
    assert first == second == 41
    assert min(first_passes, second_passes) == 0 < max(first_passes, second_passes)


def add_one(value: int) -> int:
    return value + 1


def test_a_missing_file_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_directory", lambda: tmp_path)
    num_passes = []
    for _ in range(3):
        with event.install_recorder("numba:run_pass") as passes:
            add = compiler.compiled(add_one, SIGNATURE)
        assert CFUNCTYPE(c_int64, c_int64)(add.address)(40) == 41
        num_passes.append(len(passes.buffer))
        (code,) = tmp_path.rglob("*.nbc")
        if len(num_passes) == 2:
            code.unlink()  # as if a process had been killed before it saved the code
    first, again, without_code = num_passes
    assert again == 0 < min(first, without_code)


def test_without_a_directory_nothing_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_directory", lambda: None)
    assert CFUNCTYPE(c_int64, c_int64)(compiler.compiled(add_one, SIGNATURE).address)(1) == 2


def test_a_stopped_process_that_has_the_cache_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_directory", lambda: tmp_path)
    monkeypatch.setattr(compiler, "_LOCK_S", 0.1)
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        add = compiler.compiled(add_one, SIGNATURE)
        assert CFUNCTYPE(c_int64, c_int64)(add.address)(1) == 2
        assert [path.name for path in tmp_path.rglob("*")] == ["lock"]
    compiler.compiled(add_one, SIGNATURE)
    assert list(tmp_path.rglob("*.nbc"))


@pytest.mark.parametrize("lacks", ["space", "directory"])
def test_a_cache_that_cannot_be_written_stops_no_process(
    lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path if lacks == "space" else tmp_path / "removed"
    monkeypatch.setattr(compiler, "_directory", lambda: directory)

    def save(files: IndexDataCacheFile, overloads: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(IndexDataCacheFile, "_save_index", save)
    assert CFUNCTYPE(c_int64, c_int64)(compiler.compiled(add_one, SIGNATURE).address)(1) == 2
    assert not list(tmp_path.rglob("*.nbc"))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a directory with one source, which the compiler takes for the kernels' own."""
    directory = tmp_path / "package"
    directory.mkdir()
    (directory / "a.py").write_text("x = 1")
    monkeypatch.setattr(compiler, "__file__", str(directory / "compiler.py"))
    monkeypatch.setattr(compiler, "_GIVEN", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return directory


def directory_of_cache() -> Path | None:
    compiler._directory.cache_clear()
    try:
        return compiler._directory()
    finally:
        compiler._directory.cache_clear()


def test_each_change_of_a_source_changes_the_directory(package: Path) -> None:
    directories = {directory_of_cache()}
    for name, text in [("b", "x = 1"), ("b", "x = 2"), ("a", "x = 2")]:
        (package / f"{name}.py").write_text(text)
        directories.add(directory_of_cache())
    assert len(directories) == 4
    assert {each and each.parent for each in directories} == {package / "__pycache__"}


def test_the_cache_is_the_users_if_the_sources_are_read_only(package: Path, tmp_path: Path) -> None:
    (package / "__pycache__").touch()  # no directory can be made there, also not by root
    directory = directory_of_cache()
    assert directory is not None
    assert directory.parent == tmp_path / "home" / "quire"


def test_a_directory_that_is_named_is_the_only_one(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_GIVEN", str(tmp_path / "given"))
    directory = directory_of_cache()
    assert directory is not None
    assert directory.parent == tmp_path / "given"
    monkeypatch.setattr(compiler, "_GIVEN", str(package / "a.py"))
    assert directory_of_cache() is None


def test_a_user_without_a_home_directory_needs_none(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "~quire-no-such-user/.cache")
    assert directory_of_cache() is not None
    shutil.rmtree(package / "__pycache__")
    (package / "__pycache__").touch()
    assert directory_of_cache() is None
    monkeypatch.setattr(compiler, "_GIVEN", str(tmp_path / "given"))
    assert directory_of_cache() is not None


def test_directories_of_other_sources_are_removed_when_they_are_old(package: Path) -> None:
    for name, age_s in [("kernels-old", 8 * 86_400), ("kernels-new", 0), ("triton", 8 * 86_400)]:
        lock = package / "__pycache__" / name / "lock"
        lock.parent.mkdir(parents=True)
        lock.touch()
        os.utime(lock, (time.time() - age_s, time.time() - age_s))
    directory = directory_of_cache()
    assert directory is not None
    assert {path.name for path in directory.parent.iterdir()} == {"kernels-new", "triton", directory.name}
