"""The arrays of a step that are sent to the device, by name: NumPy arrays on the host, tensors on the device.

An array that a step does not need is None and is not sent. Nearly all decode steps that only choose the largest logits
send nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Generic, TypeVar, overload

from numpy.typing import NDArray
from torch import Tensor

from executor.cuda.upload import Upload

HostArray = NDArray[Any]
A = TypeVar("A")
"""`HostArray` or `Tensor`."""


@dataclass(frozen=True, slots=True)
class TokenEnds(Generic[A]):
    """Tokens that end a sequence: places[e] int64 in the flattened `DeviceSlots.end_kinds`, kinds[e] int32."""

    places: A
    kinds: A


@dataclass(frozen=True, slots=True)
class AdmittedSlots(Generic[A]):
    """Admitted slots: slots[n] int64, states[n, STATE_FIELDS] int32, and tables[m, 3] int32 like `table_updates`."""

    slots: A
    states: A
    tables: A
    ends: TokenEnds[A] | None


@dataclass(frozen=True, slots=True)
class BranchedSlots(Generic[A]):
    """Branched slots: slots[n] and parents[n] int64, token_ids[n] int32."""

    slots: A
    parents: A
    token_ids: A


@dataclass(frozen=True, slots=True)
class ForkedSlots(Generic[A]):
    """Forked slots: parents[n] and children[n], int64."""

    parents: A
    children: A


@dataclass(frozen=True, slots=True)
class MixedRows(Generic[A]):
    """Rows of a step that is not decode-only; see `executor.slots.step_inputs`.

    row_slots[T] int32; known_rows[2, T] int32: token ids and positions, as `open_rows` takes them; logit_rows[L] int64;
    sampling[R] int32; sampled_logits[R] int64, only with forks; tiles, only with prefills, as `PrefillWork` takes them.
    """

    row_slots: A
    known_rows: A
    logit_rows: A
    sampling: A
    sampled_logits: A | None
    tiles: A | None


@dataclass(frozen=True, slots=True)
class SamplingArrays(Generic[A]):
    """The sampling parameters of rows that are not in their slots.

    banned[n] int64: rows too short to end, whose end ids get -inf; None: there are none.
    uniforms[R] float32: None if all rows are greedy.
    """

    banned: A | None = None
    uniforms: A | None = None


@dataclass(frozen=True, slots=True)
class ChangedRows(Generic[A]):
    """Rows that are sampled again from changed logits: rows[n] int64, and how."""

    rows: A
    sampling: SamplingArrays[A] | None


@dataclass(frozen=True, slots=True)
class StepArrays(Generic[A]):
    """All arrays of a step: changes to the slots, the blocks to copy, and the rows to compute.

    table_updates[n, 3] int32; copied_blocks[2, n] int64, sources and destinations; decode_slots[bucket] int32, the rows
    of a decode-only step if they differ from those of the step before.
    """

    admitted: AdmittedSlots[A] | None = None
    branched: BranchedSlots[A] | None = None
    table_updates: A | None = None
    forked: ForkedSlots[A] | None = None
    copied_blocks: A | None = None
    decode_slots: A | None = None
    mixed: MixedRows[A] | None = None
    sampling: SamplingArrays[A] | None = None


@overload
def send(arrays: StepArrays[HostArray], upload: Upload) -> StepArrays[Tensor]: ...
@overload
def send(arrays: ChangedRows[HostArray], upload: Upload) -> ChangedRows[Tensor]: ...
def send(arrays: Any, upload: Upload) -> Any:
    """Returns the same arrays on the device. Copies nothing if there are none."""
    own = list(_leaves(arrays))
    return _with_leaves(arrays, iter(upload.send(own) if own else ()))


def _leaves(node: Any) -> Iterator[HostArray]:
    """Yields the arrays of a dataclass and of the dataclasses in it."""
    for field in fields(node):
        value = getattr(node, field.name)
        if is_dataclass(value):
            yield from _leaves(value)
        elif value is not None:
            yield value


def _with_leaves(node: Any, tensors: Iterator[Tensor]) -> Any:
    """Returns a copy of the dataclass that holds the next tensors in place of its arrays, in the order of `_leaves`."""
    values = {}
    for field in fields(node):
        value = getattr(node, field.name)
        if is_dataclass(value):
            value = _with_leaves(value, tensors)
        elif value is not None:
            value = next(tensors)
        values[field.name] = value
    return type(node)(**values)
