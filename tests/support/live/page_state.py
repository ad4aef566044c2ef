"""Applies frames like the page's `model.js`, in Python, for tests: the counterpart of `scheduler.live.frames`."""

import json
from dataclasses import dataclass, field
from typing import Any

from scheduler.core import SequenceView
from scheduler.live.frames import Frame


@dataclass
class PageState:
    """The state of the page after some frames.

    blocks     by block id; 0 is the null block
    sequences  as the core shows them
    rows       of the last step
    steps      (step id, tokens), as sent
    """

    server: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    blocks: list[int] = field(default_factory=lambda: [0])
    sequences: dict[str, SequenceView] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    rows: dict[int, tuple[str, int]] = field(default_factory=dict)
    steps: list[tuple[int, int]] = field(default_factory=list)
    num_frames: int = 0
    num_key_frames: int = 0

    def take_event(self, event: bytes) -> None:
        if not event.startswith(b":"):
            self.take(json.loads(event.removeprefix(b"data: ")))

    def take(self, frame: Frame) -> None:
        self.num_frames += 1
        self.server = frame.get("server") or self.server
        if frame.get("is_key"):
            self.num_key_frames += 1
            self.blocks = [0] * (self.server.get("num_blocks", -1) + 1)
            self.sequences.clear()
        self._take_blocks(frame.get("blocks", []))
        for key in frame.get("gone", []):
            del self.sequences[key]
        for key, name, num_prompt_tokens in frame.get("come", []):
            request_id, index = map(int, key.split("."))
            self.names[key] = name
            self.sequences[key] = SequenceView(request_id, index, -1, num_prompt_tokens, 0, 0, ())
        for key, slot, num_tokens, num_computed_tokens, kept, *blocks in frame.get("sequences", []):
            old = self.sequences[key]
            table = (*old.block_table[:kept], *blocks)
            self.sequences[key] = SequenceView(
                old.request_id, old.index, slot, old.num_prompt_tokens, num_tokens, num_computed_tokens, table
            )
        if "rows" in frame or frame.get("is_key"):
            self.rows = {slot: (key, num_tokens) for slot, key, num_tokens in frame.get("rows", [])}
        for step in frame.get("steps", []):
            self._take_step(*step)
        self.numbers = frame["numbers"]

    def _take_blocks(self, runs: list[int]) -> None:
        block = 1
        for gap, length, value in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
            block += gap
            self.blocks[block : block + length] = [value] * length
            block += length

    def _take_step(
        self,
        step_id: int,
        num_tokens: int,
        retired: tuple[int, ...] = (),
        entered: tuple[Any, ...] = (),
        row_counts: tuple[int, ...] = (),
        forked: tuple[Any, ...] = (),
        paused: tuple[int, ...] = (),
    ) -> None:
        if step_id == 1:
            self.rows.clear()
        for slot in retired:
            self.rows.pop(slot, None)
        for slot, key in zip(entered[::2], entered[1::2], strict=True):
            self.rows[slot] = (key, 0)
        for slot, count in zip(row_counts[::2], row_counts[1::2], strict=True):
            self.rows[slot] = (self.rows[slot][0], count)
        self.steps.append((step_id, num_tokens))
        assert sum(count for _, count in self.rows.values()) == num_tokens, (
            "the rows do not add up to the tokens of the step"
        )
        for slot, key in zip(forked[::2], forked[1::2], strict=True):
            self.rows[slot] = (key, 1)
        for slot in paused:
            self.rows[slot] = (self.rows[slot][0], 0)
