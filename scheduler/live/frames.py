"""Makes the frames for viewers: the difference between two snapshots, as JSON.

A *key frame* is the difference to an empty state, and every later frame builds on it. `static/model.js` applies frames
in the browser. Empty fields are left out.

    is_key      true: forget everything before
    server      {state, …the model}, when it changed
    blocks      [gap, length, value, …]: runs of blocks that changed to the same value. `gap` blocks after the last run
                (the first: after block 0) follow `length` of them. value: ref count, 0 free, -1 cached
    gone        [key, …]: sequences that no longer run
    come        [[key, name, num_prompt_tokens], …]: sequences that have begun to run; `name` is the client's request id
    sequences   [[key, slot, num_tokens, num_computed_tokens, kept, block, …], …]: those that changed. The block table
                is the first `kept` entries of the old one, followed by these
    rows        [[slot, key, num_tokens], …]: the batch before `steps`, in a key frame or after lost steps
    steps       [[step_id, num_tokens, retired, entered, row_counts, forked, paused], …]: `plan_log.LoggedStep`; empty
                lists at the end are left out
    durations   [[step_id, microseconds], …]: the time that steps took on the executor
    waiting     [[key, name, num_tokens, is_preempted], …]: the head of the queue
    numbers     {…}, in every frame
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from scheduler.core import SequenceView
    from scheduler.live.plan_log import LoggedStep, Rows
    from scheduler.live.snapshot import Snapshot

Frame = dict[str, Any]


def make_frame(
    old: Snapshot | None,
    new: Snapshot,
    name_of: Callable[[str], str],
    *,
    rows: Rows | None = None,
    steps: Iterable[LoggedStep] = (),
    durations: Iterable[tuple[int, int]] = (),
) -> Frame:
    """Makes a frame, which is a key frame if there is no `old` snapshot or if the pool has been replaced.

    `name_of` maps the key of a sequence to the client's request id.
    """
    is_key = old is None or old.model != new.model or old.blocks.size != new.blocks.size
    base = None if is_key else old
    frame: Frame = {
        "is_key": is_key,
        "server": _server(new) if base is None or base.state != new.state else {},
        "blocks": block_runs(np.zeros_like(new.blocks) if base is None else base.blocks, new.blocks),
        **_sequences({} if base is None else base.sequences, new.sequences, name_of),
        "rows": [[slot, key, num_tokens] for slot, (key, num_tokens) in (rows or {}).items()],
        "steps": [_step(step) for step in steps],
        "durations": list(durations),
        "waiting": [[s.key, name_of(s.key), s.num_tokens, int(s.is_preempted)] for s in new.waiting],
    }
    return {name: value for name, value in frame.items() if value} | {"numbers": _numbers(new)}


def encode_event(frame: Frame) -> bytes:
    """Encodes a frame as an event of a text/event-stream."""
    return b"data: " + json.dumps(frame, separators=(",", ":"), ensure_ascii=False).encode(errors="replace") + b"\n\n"


def block_runs(old: NDArray[np.int32], new: NDArray[np.int32]) -> list[int]:
    """Returns `[gap, length, value, …]` as described above. Block 0 belongs to no sequence."""
    changed = np.flatnonzero(old[1:] != new[1:]) + 1
    if not changed.size:
        return []
    values = new[changed]
    # A run ends where the next changed block is not its neighbour, or has changed to another value.
    breaks = np.flatnonzero((np.diff(changed) != 1) | (np.diff(values) != 0)) + 1
    first = changed[np.concatenate(([0], breaks))]
    lengths = np.diff(np.concatenate((np.concatenate(([0], breaks)), [changed.size])))
    gaps = first - np.concatenate(([1], (first + lengths)[:-1]))
    run_values = values[np.concatenate(([0], breaks))]
    return [int(number) for number in np.stack((gaps, lengths, run_values), axis=1).ravel()]


def _sequences(old: dict[str, SequenceView], new: dict[str, SequenceView], name_of: Callable[[str], str]) -> Frame:
    return {
        "gone": [key for key in old if key not in new],
        "come": [[key, name_of(key), new[key].num_prompt_tokens] for key in new if key not in old],
        "sequences": [_sequence(key, old.get(key), view) for key, view in new.items() if view != old.get(key)],
    }


def _sequence(key: str, old: SequenceView | None, new: SequenceView) -> list[Any]:
    old_table = () if old is None else old.block_table
    kept = _num_equal(old_table, new.block_table)
    return [key, new.slot, new.num_tokens, new.num_computed_tokens, kept, *new.block_table[kept:]]


def _num_equal(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Returns the length of the common prefix, which is nearly always all of `one`."""
    if other[: len(one)] == one:
        return len(one)
    return next(i for i, pair in enumerate(zip(one, (*other, None), strict=False)) if pair[0] != pair[1])


def _step(step: LoggedStep) -> list[Any]:
    if not step.changes_rows:
        return [step.step_id, step.num_tokens]
    changes: list[list[Any]] = [
        list(step.retired),
        [item for pair in step.entered for item in pair],
        list(step.row_counts),
        [item for pair in step.forked for item in pair],
        list(step.paused),
    ]
    while changes and not changes[-1]:
        changes.pop()
    return [step.step_id, step.num_tokens, *changes]


def _server(snapshot: Snapshot) -> dict[str, Any]:
    model = snapshot.model
    if model is None:
        return {"state": snapshot.state}
    return {
        "state": snapshot.state,
        "model_name": model.model_name,
        "dtype": model.dtype,
        "device": model.device,
        "block_size": model.block_size,
        "num_blocks": model.num_blocks,
        "max_model_len": model.max_model_len,
        "max_num_seqs": model.max_num_seqs,
        "max_num_batched_tokens": model.max_num_batched_tokens,
    }


def _numbers(snapshot: Snapshot) -> dict[str, Any]:
    usage, contiguous = snapshot.usage, snapshot.contiguous
    return {
        "free": usage.num_free_blocks if usage else 0,
        "cached": usage.num_cached_blocks if usage else 0,
        "active": usage.num_active_blocks if usage else 0,
        "shared": usage.num_shared_blocks if usage else 0,
        "used_slots": usage.num_used_token_slots if usage else 0,
        "wasted_slots": usage.num_wasted_token_slots if usage else 0,
        "contiguous_slots": contiguous.num_token_slots,
        "contiguous_used": contiguous.num_used_token_slots,
        "contiguous_fitting": contiguous.num_fitting_sequences,
        "running": len(snapshot.sequences),
        "waiting": snapshot.num_waiting,
        "waiting_prompt_tokens": snapshot.num_waiting_prompt_tokens,
        "oldest_waiting_s": snapshot.oldest_waiting_s,
        "steps": snapshot.num_steps,
        "generated_tokens": snapshot.num_generated_tokens,
        "preemptions": snapshot.num_preemptions,
        "cow_copies": snapshot.num_cow_copies,
        "prefix_queried_tokens": snapshot.num_prefix_queried_tokens,
        "prefix_hit_tokens": snapshot.num_prefix_hit_tokens,
    }
