"""The count of concepts runs on this checkout."""

import subprocess
import sys

from tests.support.paths import ROOT


def test_one_decode_is_traced() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "checks.concepts"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert {"Scheduler", "StepPlan", "KVCache", "Sequence"} <= set(done.splitlines()[0].split())
    assert "scheduler.Scheduler.schedule" in done
