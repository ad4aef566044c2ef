"""Settings that hold for all tests."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

# Before torch is imported, here and in the processes that tests start: one thread each. The suite's workers, and the
# services they start, share the cores; of two threads that meet at each operator's end, one always waits for a core
# while the other spins on its own, and what takes a second alone takes many. Executors set the number they are given.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_configure() -> None:
    """Keeps the threads of grpc.aio until the process ends.

    Otherwise the end of the last channel ends them. If the garbage collector finds that channel during another test,
    the end waits for a thread that cannot end meanwhile, and that test hangs until its time-out.
    """
    import grpc.aio

    grpc.aio.init_grpc_aio()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Runs the tests with a longer time-out first if workers share the suite.

    A worker cannot take over a test that has begun, so a long test that begins last would keep one worker busy alone.
    """
    if not hasattr(config, "workerinput"):
        return
    default_s = float(config.getini("timeout"))

    def may_take_long(item: pytest.Item) -> bool:
        mark = item.get_closest_marker("timeout")
        return mark is not None and mark.args[0] > default_s

    items.sort(key=may_take_long, reverse=True)
