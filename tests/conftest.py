"""Settings that hold for all tests."""

from __future__ import annotations

import gc
import os
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

# Before torch is imported, here and in the processes that tests start: one thread each. The suite's workers, and the
# services they start, share the cores; of two threads that meet at each operator's end, one always waits for a core
# while the other spins on its own, and what takes a second alone takes many. Executors set the number they are given.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_configure() -> None:
    keep_grpc_threads()
    if find_spec("hypothesis"):  # a GPU machine does not have it
        choose_examples()


def keep_grpc_threads() -> None:
    """Keeps the threads of grpc.aio until the process ends.

    Otherwise the end of the last channel ends them. If the garbage collector finds that channel during another test,
    the end waits for a thread that cannot end meanwhile, and that test hangs until its time-out.
    """
    import grpc.aio

    grpc.aio.init_grpc_aio()


def choose_examples() -> None:
    """Lets Hypothesis try the same examples in every run, and judge none by its time: other processes use the cores."""
    from hypothesis import HealthCheck, settings

    slow = [HealthCheck.too_slow]
    settings.register_profile("suite", deadline=None, derandomize=True, database=None, suppress_health_check=slow)
    settings.load_profile("suite")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Prevents collections of garbage, which find none in what is imported and take a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


BENCHMARKS = Path(__file__).parent / "bench"
"""Folder in which all tests are exhaustive, without a mark in each file."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves files unread that have none of the tests that a run chooses by its mark: each worker reads all others."""
    is_benchmark = collection_path.is_relative_to(BENCHMARKS)
    match config.getoption("markexpr"):
        case "not exhaustive" if is_benchmark:
            return True
        case "exhaustive" if collection_path.name.startswith("test_") and not is_benchmark:
            return "exhaustive" not in collection_path.read_text(encoding="utf-8") or None
    return None


ONE_SERVER = (
    tuple(f"tests/deploy/test_{name}.py" for name in ("names", "operations_page", "queries")),
    tuple(f"tests/e2e/test_{name}.py" for name in ("beams", "resumed_streams", "sampling", "sharing")),
    ("tests/gateway/clients/test_openai_",),
)
"""Beginnings of the paths of files that share a server, which a fixture of their folder starts in each process."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives the files that share a server to one worker, if workers share the suite by files."""
    from xdist.scheduler import LoadFileScheduling

    class ByServer(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return next((paths[0] for paths in ONE_SERVER if file.startswith(paths)), file)

    return ByServer(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Moves the files with longer time-outs to the front, if workers share the suite by files.

    The files are given out in the order of the list (with `--no-loadscope-reorder`), and no worker can take over a file
    that another one has begun: a long one that begins last would keep one worker busy alone.
    """
    if not hasattr(config, "workerinput"):
        return
    default_s = float(config.getini("timeout"))
    sums_s: Counter[Path] = Counter()
    for item in items:
        if mark := item.get_closest_marker("timeout"):
            sums_s[item.path] += mark.args[0] - default_s
    items.sort(key=lambda item: -sums_s[item.path])


@pytest.fixture
def counted() -> Callable[[], dict[str, int]]:
    """Returns a function that returns how many unexpected errors were counted since the test began, by where."""
    from quire.unexpected import NUM_UNEXPECTED

    before = NUM_UNEXPECTED.copy()
    return lambda: dict(NUM_UNEXPECTED - before)
