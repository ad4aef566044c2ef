"""Linear layers over packed weights."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.cpu.amx import MATRIX, ROWS, begin_products, end_products
from kernels.cpu.compiler import compiled
from kernels.cpu.native import (
    FLOAT32,
    LINE_BYTES,
    array,
    count_up,
    read,
    storage_bytes,
    storage_of,
    write,
)
from kernels.cpu.panels import MAX_ROWS, PANEL, Panels, inputs_at_once, multiply, row_format, tile_rows
from kernels.cpu.team import Job, Kernel, job_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

# Rows of a unit: enough to make good use of a panel in the cache, few enough that a prompt gives many units.
UNIT_ROWS, MATRIX_UNIT_ROWS = 8 * MAX_ROWS, 4 * ROWS
# The most panels of a unit. Narrow panels share the rows of a unit, which are widened once and then read from a cache.
UNIT_PANELS = 8 if PANEL < 64 else 1
# Fewer panels where a thread would not get as many units, so that all threads end at about the same time.
UNITS_PER_THREAD = 4
# All rows of a unit process this many inputs before the next ones. Each tile of rows reads this span of a panel again:
# of a narrow panel from the first-level cache, otherwise from a second-level cache of 1 MiB, into which the span and
# the next one, which is prefetched, fit. Twice as many bfloat16 take the same room; without matrix registers, that was
# not faster.
SPAN_INPUTS = 512 if PANEL < 64 else 1024

# bias: null if there is none.
LINEAR_JOB = job_dtype(
    "x x_row_bytes panels panel_bytes bias out out_row_bytes num_rows in_size out_size num_panels num_threads"
)

_job = Job(LINEAR_JOB)


@cache
def linear_kernel(storage: int, weight_storage: int, row_kind: int) -> Kernel:
    """Returns the kernel for x Wᵀ + b; a unit has up to UNIT_PANELS panels.

    Inputs and outputs have the same storage. row_kind: see `row_format`.
    """
    widens = storage != FLOAT32 and row_kind == FLOAT32
    most_rows = tile_rows(row_kind)
    span_inputs = 2 * SPAN_INPUTS if row_kind == MATRIX else SPAN_INPUTS
    unit_rows = MATRIX_UNIT_ROWS if row_kind == MATRIX else UNIT_ROWS
    width = inputs_at_once(weight_storage)
    number_bytes = storage_bytes(storage)
    step_bytes, panel_step_bytes = width * number_bytes, width * PANEL * storage_bytes(weight_storage)

    def linear(address: int) -> None:
        job = array(address, 1, LINEAR_JOB)[0]
        num_steps = job.in_size // width
        num_pieces = (job.num_rows + unit_rows - 1) // unit_rows
        # A single tile reads its panel only once, so there is no need to cut the inputs into spans.
        unit_panels, most_steps = 1, num_steps
        if job.num_rows > most_rows:
            most_steps = span_inputs // width
            unit_panels = max(1, min(UNIT_PANELS, job.num_panels * num_pieces // (UNITS_PER_THREAD * job.num_threads)))
        # A tile reads its rows directly, or after they were widened to float32: by the first of several panels.
        widened_rows, widened_inputs = 0, most_steps * width
        if widens:
            widened_rows = min(job.num_rows, unit_rows) if unit_panels > 1 else most_rows
        num_sums = unit_panels * unit_rows * PANEL
        scratch = np.empty(num_sums + widened_rows * widened_inputs + 16, np.float32)
        sums_address = (scratch.ctypes.data + 63) // 64 * 64
        widened = sums_address + num_sums * 4
        num_units = (job.num_panels + unit_panels - 1) // unit_panels * num_pieces
        full_rows = max(1, min(most_rows, job.num_rows))
        begin_products(row_kind, full_rows)
        unit = count_up(address)
        while unit < num_units:
            # Take the next unit before this one is done, so that its data is prefetched during the multiplication.
            next_unit = count_up(address)
            first_panel, piece = unit // num_pieces * unit_panels, unit % num_pieces
            num_panels = min(unit_panels, job.num_panels - first_panel)
            panels = job.panels + first_panel * job.panel_bytes
            next_panels = panels
            if next_unit < num_units:
                next_panels = job.panels + next_unit // num_pieces * unit_panels * job.panel_bytes
            start, stop = piece * unit_rows, min(job.num_rows, (piece + 1) * unit_rows)
            for step in range(0, num_steps, most_steps):
                span_steps = min(most_steps, num_steps - step)
                for which in range(num_panels):
                    span = panels + which * job.panel_bytes + step * panel_step_bytes
                    if which + 1 < num_panels:
                        ahead = span + job.panel_bytes
                    elif step + span_steps < num_steps:
                        ahead = panels + (step + span_steps) * panel_step_bytes
                    else:
                        ahead = next_panels
                    ahead_stop = ahead + span_steps * panel_step_bytes
                    for first in range(start, stop, most_rows):
                        num_rows = min(most_rows, stop - first)
                        rows = job.x + first * job.x_row_bytes + step * step_bytes
                        row_bytes = job.x_row_bytes
                        if widens:
                            own = widened + (first - start if unit_panels > 1 else 0) * widened_inputs * 4
                            for row in range(num_rows if which == 0 else 0):
                                for i in range(span_steps * width):
                                    number = read(storage, rows + row * row_bytes, i)
                                    write(FLOAT32, own, row * widened_inputs + i, number)
                            rows, row_bytes = own, widened_inputs * 4
                        sums = sums_address + (which * unit_rows + first - start) * PANEL * 4
                        if step == 0:
                            multiply(
                                num_rows, full_rows, row_kind, weight_storage, 0,
                                rows, row_bytes, span, span_steps, sums, PANEL * 4, ahead,
                            )  # fmt: skip
                        else:
                            multiply(
                                num_rows, full_rows, row_kind, weight_storage, 1,
                                rows, row_bytes, span, span_steps, sums, PANEL * 4, ahead,
                            )  # fmt: skip
                        ahead = min(ahead + span_steps * LINE_BYTES, ahead_stop)
            for which in range(num_panels):
                first_column = (first_panel + which) * PANEL
                num_columns = min(PANEL, job.out_size - first_column)
                for row in range(stop - start):
                    sums = sums_address + (which * unit_rows + row) * PANEL * 4
                    out = job.out + (start + row) * job.out_row_bytes + first_column * number_bytes
                    if job.bias != 0:
                        bias = job.bias + first_column * 4
                        for i in range(num_columns):
                            write(storage, out, i, read(FLOAT32, sums, i) + read(FLOAT32, bias, i))
                    else:
                        for i in range(num_columns):
                            write(storage, out, i, read(FLOAT32, sums, i))
            unit = next_unit
        end_products(row_kind)
        scratch[0] = 0  # numba frees an array after its last use: this keeps the array alive until here

    return Kernel(compiled(linear))


class PackedLinear:
    """A linear layer over panels."""

    __slots__ = ("panels",)

    def __init__(self, panels: Panels) -> None:
        self.panels = panels

    @property
    def num_bytes(self) -> int:
        """See `kernels.Linear`."""
        return self.panels.num_bytes

    def kernel(self, dtype: torch.dtype) -> Kernel:
        """Returns the kernel for inputs of this dtype. Raises TypeError for a dtype that kernels do not support."""
        storage, weight_storage = storage_of(dtype), storage_of(self.panels.panels.dtype)
        return linear_kernel(storage, weight_storage, row_format(storage, weight_storage, self.panels.in_size))

    def fields(self, x: torch.Tensor, out: torch.Tensor) -> dict[str, int]:
        """Returns the fields of a LINEAR_JOB, except num_rows."""
        own, number_bytes = self.panels, x.element_size()
        return {
            "x": x.data_ptr(),
            "x_row_bytes": x.stride(0) * number_bytes,
            "panels": own.panels.data_ptr(),
            "panel_bytes": own.panels.stride(0) * own.panels.element_size(),
            "bias": 0 if own.bias is None else own.bias.data_ptr(),
            "out": out.data_ptr(),
            "out_row_bytes": out.stride(0) * number_bytes,
            "in_size": own.in_size,
            "out_size": own.out_size,
            "num_panels": len(own.panels),
            "num_threads": torch.get_num_threads(),
        }

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `kernels.Linear`."""
        num_rows, in_size = x.shape
        if in_size != self.panels.in_size or x.stride(1) != 1:
            raise ValueError(f"x must have {self.panels.in_size} contiguous columns, not {in_size}")
        out = x.new_empty(num_rows, self.panels.out_size)
        self.kernel(x.dtype).run_in_team(_job.fill(num_rows=num_rows, **self.fields(x, out)))
        return out


def pack_linear(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None = None) -> PackedLinear:
    """See `kernels.Kernels.pack_linear`."""
    return PackedLinear(Panels.pack(weights, biases, _narrowest(weights)))


def _narrowest(weights: Sequence[torch.Tensor]) -> torch.dtype:
    """Returns the smallest dtype that represents every weight exactly.

    A product with one row reads all weights and does little else, so its time is proportional to their size. A few rows
    are looked at at once: they stay in a cache, and most weights that need float32 show it in the first.
    """
    dtype = weights[0].dtype
    if dtype is torch.float32:
        some_rows = [rows for weight in weights for rows in torch.split(weight, 64)]
        for narrow in (torch.bfloat16, torch.float16):
            if all(torch.equal(rows.to(narrow).float(), rows) for rows in some_rows):
                return narrow
    return dtype
