"""The names of the package `quire`, which are imported at their first use."""

import subprocess
import sys

import pytest

import quire

FIRST_USE = """
import sys, quire
assert "grpc" not in sys.modules
assert quire.errors.QueueFullError is quire.QueueFullError
from quire import *
assert Client is quire.Client
"""


def test_names_and_modules_are_there_at_their_first_use() -> None:
    subprocess.run([sys.executable, "-c", FIRST_USE], check=True)


def test_every_name_exists_and_no_other() -> None:
    assert all(hasattr(quire, name) for name in quire.__all__)
    with pytest.raises(AttributeError, match="Missing"):
        _ = quire.Missing
