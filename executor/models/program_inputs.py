"""The inputs of a step at addresses that stay the same for a program of CPU kernels."""

import numpy as np

from executor.plans.plan import Ints
from executor.slots.launch import Launch

PARTS = ROWS, LOGITS = "rows", "logits"
"""Parts of the program: jobs over all rows of a step, and jobs over the rows that logits are made of."""


class _Sequences:
    """The sequences of a step as attention reads them; see `Launch`."""

    def __init__(self, max_num_sequences: int) -> None:
        self.slots = np.zeros(max_num_sequences, np.int32)
        self.query_starts = np.zeros(max_num_sequences + 1, np.int32)
        self.context_lens = np.zeros(max_num_sequences, np.int32)

    def take(self, slots: Ints, query_starts: Ints, context_lens: Ints) -> int:
        """Copies the sequences of a step, and returns their number."""
        count = len(slots)
        self.slots[:count] = slots
        self.query_starts[: count + 1] = query_starts
        self.context_lens[:count] = context_lens
        return count


class ProgramInputs:
    """The inputs of a step at addresses that stay the same for the program."""

    def __init__(self, max_num_rows: int, max_num_seqs: int) -> None:
        self.token_ids = np.zeros(max_num_rows, np.int32)
        self.positions = np.zeros(max_num_rows, np.int32)
        self.slot_mapping = np.zeros(max_num_rows, np.int64)
        self.logit_rows = np.zeros(max_num_rows, np.int32)
        # The logit rows of a slot are its last one, those that score its prompt, or both.
        self.sequences = {ROWS: _Sequences(max_num_seqs), LOGITS: _Sequences(2 * max_num_seqs)}

    def take(self, launch: Launch) -> dict[str, int]:
        """Copies the inputs of a step. Returns the number of sequences that attend in each part."""
        num_rows = launch.num_rows
        self.token_ids[:num_rows] = launch.token_ids
        self.positions[:num_rows] = launch.positions
        self.slot_mapping[:num_rows] = launch.slot_mapping
        self.logit_rows[: len(launch.logit_rows)] = launch.logit_rows
        return {
            ROWS: self.sequences[ROWS].take(launch.slots, launch.query_starts, launch.context_lens),
            LOGITS: self.sequences[LOGITS].take(*_logit_sequences(launch)),
        }


def _logit_sequences(launch: Launch) -> tuple[Ints, Ints, Ints]:
    """Returns the sequences of the logit rows: slots[R], query_starts[R + 1] and context_lens[R].

    Logit rows that follow each other in a slot are one sequence, so that attention reads its keys for all of them at
    once.
    """
    rows = launch.logit_rows
    if launch.num_decodes == launch.num_rows:
        owners = rows
    else:
        owners = np.searchsorted(launch.query_starts, rows, side="right") - 1
    is_first = np.ones(len(rows), np.bool_)
    is_first[1:] = (rows[1:] != rows[:-1] + 1) | (owners[1:] != owners[:-1])
    starts = np.append(np.flatnonzero(is_first), len(rows)).astype(np.int32)
    return launch.slots[owners[starts[:-1]]], starts, launch.positions[rows[starts[1:] - 1]] + 1
