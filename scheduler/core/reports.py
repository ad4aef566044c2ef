"""Checks the log-probabilities and candidates of a result against its plan, and splits them by sequence.

The arrays of a result are flat. The plan says how many entries each sequence has, in the order of slots.
"""

from scheduler.core.beams.search import Candidates
from scheduler.core.errors import ResultMismatch
from scheduler.core.plan import Events, Logprobs, StepResult, TokenLogprobs
from scheduler.core.sequence import Sequence
from scheduler.core.step import Step


def check_counts(step: Step, result: StepResult) -> None:
    """Raises ResultMismatch unless each sequence that sampled has one token, and deferred ones are among them."""
    for name, values in (("token_ids", result.token_ids), ("end_reasons", result.end_reasons)):
        if values is not None and len(values) != len(step.sampled):
            raise ResultMismatch(
                f"step {step.step_id} sampled {len(step.sampled)} sequences, its result has {len(values)} {name}"
            )
    if result.deferred and not 0 <= min(result.deferred) <= max(result.deferred) < len(step.sampled):
        raise ResultMismatch(f"step {step.step_id} defers sequences that did not sample: {result.deferred}")


def check_token_ids(result: StepResult, vocab_size: int) -> None:
    """Raises ResultMismatch unless every token id is below vocab_size."""
    for part in (result, result.candidates, result.logprobs, result.prompt_logprobs):
        ids = part.token_ids if part else ()
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise ResultMismatch(f"step {result.step_id} names tokens {min(ids)} to {max(ids)} of {vocab_size}")


def check_reports(step: Step, result: StepResult) -> None:
    """Raises ResultMismatch unless each array has as many entries as the step asked for."""
    has_reports = not (result.candidates is result.logprobs is result.prompt_logprobs is None)
    if not (has_reports or step.beams or step.reporting or step.prompt_reports):
        return  # nearly always
    num_candidates = sum(beam.params.num_candidates for beam in step.beams)
    num_logprobs = sum(sequence.params.num_logprobs for sequence in step.reporting)
    num_prompt_logprobs = sum(s.params.num_prompt_logprobs * num_rows for s, _, num_rows in step.prompt_reports)
    for name, logprobs, num_wanted, has_ranks in (
        ("candidates", result.candidates, num_candidates, False),
        ("logprobs", result.logprobs, num_logprobs, True),
        ("prompt_logprobs", result.prompt_logprobs, num_prompt_logprobs, True),
    ):
        lengths = _lengths(logprobs, has_ranks)
        if lengths != {num_wanted}:
            raise ResultMismatch(f"step {step.step_id} has {num_wanted} {name} to report, not {sorted(lengths)}")


def _lengths(logprobs: Logprobs | None, has_ranks: bool) -> set[int]:
    if logprobs is None:
        return {0}
    return {len(logprobs.token_ids), len(logprobs.values), len(logprobs.ranks if has_ranks else logprobs.values)}


def candidates_by_beam(step: Step, logprobs: Logprobs) -> dict[Sequence, Candidates]:
    candidates: dict[Sequence, Candidates] = {}
    start = 0
    for beam in step.beams:
        end = start + beam.params.num_candidates
        candidates[beam] = (logprobs.token_ids[start:end], logprobs.values[start:end])
        start = end
    return candidates


def add_logprobs(step: Step, logprobs: Logprobs, events: Events) -> None:
    """Adds the log-probabilities of the sampled tokens to the events, except those of sequences that have ended."""
    start = 0
    sampled = set(events.sequences)
    for sequence in step.reporting:
        width = sequence.params.num_logprobs
        if sequence in sampled:
            events.logprobs.append((sequence, _cut(logprobs, start, width)))
        start += width


def add_prompt_logprobs(step: Step, logprobs: Logprobs, events: Events) -> None:
    """Adds the log-probabilities of prompt tokens to the events, unless they were reported before a preemption."""
    start = 0
    for sequence, first, num_rows in step.prompt_reports:
        width = sequence.params.num_prompt_logprobs
        rows = [_cut(logprobs, start + row * width, width) for row in range(num_rows)]
        start += width * num_rows
        num_known = sequence.num_prompt_reported - first
        if sequence.is_finished or num_known >= num_rows:
            continue
        events.prompt_logprobs.append((sequence, first + num_known + 1, rows[num_known:]))
        sequence.num_prompt_reported = first + num_rows


def _cut(logprobs: Logprobs, start: int, width: int) -> TokenLogprobs:
    end = start + width
    return TokenLogprobs(
        list(logprobs.token_ids[start:end]), list(logprobs.values[start:end]), list(logprobs.ranks[start:end])
    )
