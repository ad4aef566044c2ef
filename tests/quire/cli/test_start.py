"""Ctrl-C before a command has begun."""

import signal
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

COMMAND = """
import os, runpy, signal, sys, time
import typer.main

signal.signal(signal.SIGINT, {handler})

class Interrupt:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "{module}":
            os.kill(os.getpid(), signal.SIGINT)

def interrupted(app):
    raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt)
if not "{module}":
    typer.main.get_command = interrupted
sys.argv = ["quire", "--version"]
runpy.run_module("quire", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("module", "handler", "exit_code"),
    [
        ("grpc", "signal.default_int_handler", -signal.SIGINT),  # of which shells make 130
        ("executor.config", "signal.default_int_handler", -signal.SIGINT),
        ("", "signal.default_int_handler", 130),
        ("executor.config", "signal.SIG_IGN", 0),
    ],
    ids=["client", "imports", "flags", "ignored"],
)
def test_ctrl_c_at_the_start_prints_no_traceback(module: str, handler: str, exit_code: int) -> None:
    code = COMMAND.format(module=module, handler=handler)
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (exit_code, "")
