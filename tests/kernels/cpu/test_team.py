"""Jobs: a kernel reads each field by its name, and no field may be missing."""

import ctypes
import threading

import numpy as np
import pytest

from kernels.cpu.team import Job, job_dtype

LAYOUT = job_dtype("rows out num_rows", "scale")


def written(address: int) -> dict[str, float]:
    (record,) = np.frombuffer(ctypes.string_at(address, LAYOUT.itemsize), LAYOUT)
    return {name: record[name] for name in LAYOUT.names or ()}


def test_fields_are_matched_by_name_in_any_order() -> None:
    job = Job(LAYOUT)
    address = job.fill(scale=0.5, num_rows=3, rows=1 << 62, out=2)
    assert written(address) == {
        "ticket": 0,
        "rows": 1 << 62,
        "out": 2,
        "num_rows": 3,
        "scale": 0.5,
    }


def test_fill_resets_the_ticket() -> None:
    job = Job(LAYOUT)
    ctypes.c_int64.from_address(job.fill(rows=1, out=2, num_rows=3, scale=0.5)).value = 7
    assert written(job.fill(rows=1, out=2, num_rows=3, scale=0.5))["ticket"] == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"rows": 1, "out": 2, "scale": 0.5},
        {"rows": 1, "out": 2, "num_rows": 3, "scale": 0.5, "columns": 4},
        {"rows": 1, "out": 2, "numrows": 3, "scale": 0.5},
        {"ticket": 1, "out": 2, "num_rows": 3, "scale": 0.5},
    ],
)
def test_missing_and_unknown_fields_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(TypeError, match="a job "):
        Job(LAYOUT).fill(**fields)


def test_each_thread_has_its_own_record() -> None:
    job, addresses = Job(LAYOUT), []
    thread = threading.Thread(target=lambda: addresses.append(job.fill(rows=1, out=2, num_rows=3, scale=0.5)))
    mine = job.fill(rows=4, out=5, num_rows=6, scale=0.25)
    thread.start()
    thread.join()
    assert addresses != [mine]
    assert written(mine)["rows"] == 4
