"""What a step computes, as the host sees it when it launches the step: before anybody knows what it samples.

The host's books run ahead of the device. They take it that nobody ends but for length, which is known beforehand; a
sequence that has ended otherwise keeps its rows until a result says so, and the device, which knows, computes nothing
for them.

A step with reports is another matter: it begins when all results before it are in, and the books learn its tokens as
soon as it is done.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from executor.plans.plan import Fork, Ints
from executor.slots.batch import decodes_first, row_starts
from executor.slots.sampling_table import Draw
from executor.slots.slots import Slots

# Stands in the books for a token that only the device knows. It is negative, as `open_rows` wants it, and in nobody's
# set of end ids, so a sequence that gets it ends for its length or not at all.
_UNKNOWN_TOKEN = -2


@dataclass(frozen=True, slots=True)
class HostStep:
    """Rows of decodes first, then those of prefills, as in `executor.slots.batch`.

    order[S]            slots that compute: decodes, each with one row, then prefills
    counts[S]           rows of each
    first_positions[S]  position of the first of them
    reporting           slots that get a result, ascending
    sampling[R]         those of them that sample, as far as the host knows: the slots that computed their last known
                        token, ascending, and after them their children
    sample_rows[R]      the row of each whose logits it samples from
    beams[B]            slots that report candidates, ascending; beam_rows[B], the rows of their logits
    prompt_rows[P]      the rows of `Slots.prompt_spans`
    has_reports         something is reported besides tokens, or logits are changed; see `Slots.wants_reports`
    draw                how they sample
    has_children        there are forks, of living sequences or not
    """

    order: Ints
    counts: Ints
    first_positions: Ints
    num_decodes: int
    reporting: Ints
    sampling: Ints
    sample_rows: NDArray[np.int64]
    beams: Ints
    beam_rows: NDArray[np.int64]
    prompt_rows: NDArray[np.int64]
    has_reports: bool
    draw: Draw
    has_children: bool

    @property
    def is_decode_only(self) -> bool:
        """Every row computes a slot's last token and samples for that slot; no row is anybody else's."""
        return 0 < self.num_decodes == len(self.order) == len(self.sampling) and not self.has_children

    @property
    def starts(self) -> Ints:
        """[S + 1]: rows of order[s] are [starts[s], starts[s + 1])."""
        return row_starts(self.counts)


def take_step(slots: Slots, forks: tuple[Fork, ...]) -> HostStep:
    """Reads the step from slots to which its plan was applied; and advances, forks and appends, tokens unknown.

    Appends nothing in a step with reports: its tokens will be known.
    """
    counters, has_reports = slots.counters, slots.wants_reports
    reaching = slots.sampling
    order, num_decodes = decodes_first(slots)
    counts = counters.row_count[order]
    first_positions = counters.num_computed_tokens[order]
    children = np.array([fork.child_slot for fork in forks], dtype=np.int32)
    reporting = np.sort(np.concatenate((reaching, slots.overrun, children)))

    last_row = np.full(slots.limits.max_num_seqs, -1, dtype=np.int64)
    last_row[order] = np.cumsum(counts, dtype=np.int64) - 1
    spans, prompt_rows = slots.prompt_spans, np.zeros(0, dtype=np.int64)
    if spans is not None:
        first_rows = last_row[spans.slots] + 1 - counters.row_count[spans.slots]
        prompt_rows = spans.following(first_rows.astype(np.int32)).astype(np.int64)
    for fork in forks:
        last_row[fork.child_slot] = last_row[fork.parent_slot]
    slots.advance()
    slots.fork(forks)
    sampling = np.concatenate((reaching, children[~counters.has_ended[children]]))
    draw = slots.draw(sampling)
    if not has_reports:
        slots.append(sampling, np.full(len(sampling), _UNKNOWN_TOKEN, dtype=np.int32))
    return HostStep(
        order=order,
        counts=counts,
        first_positions=first_positions,
        num_decodes=num_decodes,
        reporting=reporting,
        sampling=sampling,
        sample_rows=last_row[sampling],
        beams=slots.beams,
        beam_rows=last_row[slots.beams],
        prompt_rows=prompt_rows,
        has_reports=has_reports,
        draw=draw,
        has_children=bool(forks),
    )
