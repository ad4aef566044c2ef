"""Programs run jobs in order on a team, and do not wait for threads that have not entered a job."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.cpu import team
from kernels.cpu.elementwise import NORM_JOB, TAKE_JOB, norm_kernel, take_fields, take_kernel
from kernels.cpu.native import FLOAT32
from kernels.cpu.program import Program


class Relay:
    """A program that copies rows from buffer to buffer; each job moves every row up by one."""

    def __init__(self, num_rows: int, num_jobs: int) -> None:
        self.num_rows = num_rows
        self.buffers = [torch.zeros(num_rows, 64) for _ in range(num_jobs + 1)]
        self.order = np.roll(np.arange(num_rows, dtype=np.int32), 1)
        self.program = Program()
        for before, after in zip(self.buffers, self.buffers[1:], strict=False):
            self.program.add(take_kernel(), TAKE_JOB, "rows", **take_fields(before, after))
        self.program.seal()
        self.program.set("rows", indices=self.order.ctypes.data, num_rows=num_rows)

    def run(self) -> None:
        self.buffers[0].normal_()
        for buffer in self.buffers[1:]:
            buffer.fill_(torch.nan)
        self.program.run()
        for place, buffer in enumerate(self.buffers):
            assert torch.equal(buffer, self.buffers[0].roll(place, 0)), f"after job {place}"


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_job_begins_after_the_previous_one_has_finished(num_threads: int) -> None:
    """With more threads than processors, there are always threads that enter a job only after it has finished."""
    torch.set_num_threads(num_threads)
    relay = Relay(num_rows=97, num_jobs=40)
    for _ in range(200):
        relay.run()


def test_python_threads_replace_a_missing_openmp_runtime(monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    monkeypatch.setattr(team, "_launch", None)
    relay = Relay(num_rows=50, num_jobs=20)
    for _ in range(20):
        relay.run()


def test_programs_run_without_a_sleep_function(monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    monkeypatch.setattr(team, "_sleep", 0)
    relay = Relay(num_rows=50, num_jobs=20)
    for _ in range(20):
        relay.run()


def test_set_writes_the_fields_of_all_jobs_of_a_part() -> None:
    x = torch.randn(8, 64)
    outs = [torch.full((8, 64), torch.nan) for _ in range(3)]
    weight = torch.ones(64)
    program = Program()
    for out, part in zip(outs, ("head", "tail", "tail"), strict=True):
        fields = {"x_outer_bytes": 256, "weight": weight.data_ptr(), "num_inner": 1, "width": 64, "unit_rows": 2}
        program.add(
            norm_kernel(FLOAT32), NORM_JOB, part, x=x.data_ptr(), out=out.data_ptr(), number_bytes=4, eps=1e-6, **fields
        )
    program.seal()
    normed = torch.nn.functional.rms_norm(x, (64,), eps=1e-6)
    for num_head, num_tail in [(8, 3), (1, 0), (5, 8)]:
        for out in outs:
            out.fill_(torch.nan)
        program.set("head", num_rows=num_head)
        program.set("tail", num_rows=num_tail)
        program.run()
        for out, count in zip(outs, (num_head, num_tail, num_tail), strict=True):
            torch.testing.assert_close(out[:count], normed[:count])
            assert out[count:].isnan().all()


def test_set_leaves_out_fields_that_no_job_of_the_part_has() -> None:
    program = Program()
    program.add(take_kernel(), TAKE_JOB, "rows")
    program.add(norm_kernel(FLOAT32), NORM_JOB, "norms")
    program.seal()
    program.set("rows", num_rows=0, width=3)
    program.set("norms", num_rows=0, width=3)
    program.run()


def test_setting_an_unknown_field_is_an_error() -> None:
    program = Program()
    program.add(take_kernel(), TAKE_JOB, "rows")
    program.seal()
    with pytest.raises(KeyError):
        program.set("rows", num_columns=3)
    with pytest.raises(KeyError):
        program.set("columns", num_rows=3)
