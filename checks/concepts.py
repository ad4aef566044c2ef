"""Counts the classes and functions involved in one decode step: `python -m checks.concepts [ROOT]`.

Runs one decode of a small batch through the scheduler core, and lists the classes of the core whose instances the
executed functions handle, with the functions themselves. ROOT can be another checkout, for a comparison.
"""

import subprocess
import sys
from pathlib import Path

from checks.house import given_root

PROBE = """
import sys
from enum import Enum
import scheduler.core as core

bounds = core.SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
scheduler = core.Scheduler(bounds, num_blocks=64, block_size=16)
scheduler.executor_attached(1, 64)
for number in (1, 2):
    params = core.SequenceParams(max_total_tokens=32)
    scheduler.add(core.Request(number, [5, 6, 7], params, seeds=(number,)))
plan = scheduler.schedule()
scheduler.commit(core.StepResult(1, plan.step_id, [8, 9]))

classes, functions = set(), set()

def is_ours(value):
    return type(value).__module__.startswith("scheduler.core") and not isinstance(value, Enum)

def profile(frame, event, argument):
    if event == "return" and frame.f_globals.get("__name__", "").startswith("scheduler.core"):
        functions.add(f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}")
        classes.update(type(value).__name__ for value in [*frame.f_locals.values(), argument] if is_ours(value))

sys.setprofile(profile)
plan = scheduler.schedule()
scheduler.commit(core.StepResult(1, plan.step_id, [10, 11]))
sys.setprofile(None)
classes -= {"StepResult"}  # the input
names = sorted(name.removeprefix("scheduler.core.") for name in functions if "<" not in name)
print(f"classes handled in one decode     {len(classes):>4}  {' '.join(sorted(classes))}")
print(f"functions executed in one decode  {len(names):>4}  {' '.join(names)}")
"""


def main(root: Path) -> int:
    return subprocess.run(
        [sys.executable, "-c", PROBE], cwd=root, env={"PYTHONPATH": str(root)}, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main(given_root(__doc__)))
