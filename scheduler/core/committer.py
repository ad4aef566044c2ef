"""Takes in what a plan came to: tokens, beams, ends; and gives back the blocks that only this plan still held."""

from scheduler.core.active_request import ActiveRequest
from scheduler.core.beam import Candidates
from scheduler.core.books import Books
from scheduler.core.draft import Step
from scheduler.core.errors import InvariantViolation, ResultMismatch
from scheduler.core.plan import Events, StepResult
from scheduler.core.reports import (
    add_logprobs,
    add_prompt_logprobs,
    candidates_by_beam,
    check_counts,
    check_reports,
    check_token_ids,
)
from scheduler.core.sequence import FinishReason, Sequence, State


class Committer:
    def __init__(self, books: Books, vocab_size: int) -> None:
        self._books = books
        self._vocab_size = vocab_size

    def commit(self, result: StepResult) -> Events:
        """Takes in what the oldest plan in flight came to. Raises ResultMismatch, changing nothing, if it cannot be."""
        step = self._check_result(result)
        self._books.in_flight.popleft()
        events = Events()
        for sequence, num_cached in step.admitted:
            self._note_start(sequence, num_cached, events)
        self._take_in_prefills(step)
        self._append_tokens(step, result, events)
        if result.logprobs is not None:
            add_logprobs(step, result.logprobs, events)
        if result.prompt_logprobs is not None:
            add_prompt_logprobs(step, result.prompt_logprobs, events)
        if result.candidates is not None:
            self._decide_beams(step, candidates_by_beam(step, result.candidates), events)
        self._end_sequences(step, result, events)
        for block_table in step.releases:
            self._books.cache.release(block_table)
        return events

    def _check_result(self, result: StepResult) -> Step:
        books = self._books
        if not books.in_flight:
            raise ResultMismatch(f"result of step {result.step_id}, but no plan is in flight")
        step = books.in_flight[0]
        if (result.epoch, result.step_id) != (books.epoch, step.step_id):
            raise ResultMismatch(
                f"result of step {result.step_id} of epoch {result.epoch}, "
                f"but step {step.step_id} of epoch {books.epoch} is next"
            )
        check_counts(step, result)
        check_reports(step, result)
        check_token_ids(result, self._vocab_size)
        return step

    def _note_start(self, sequence: Sequence, num_cached: int, events: Events) -> None:
        """The first admission is when a client's prompt tokens count as cached or not: a recompute is not a hit."""
        if sequence.index > 0 or sequence.num_cached_tokens is not None or sequence.is_finished:
            return
        sequence.num_cached_tokens = num_cached
        self._books.counters.num_prefix_queried_tokens += sequence.num_prompt_tokens
        self._books.counters.num_prefix_hit_tokens += num_cached
        events.started.append(sequence)

    def _take_in_prefills(self, step: Step) -> None:
        for sequence, num_tokens in step.prefills:
            if not sequence.is_finished:
                sequence.num_computed_tokens += num_tokens
                if sequence.num_computed_tokens >= sequence.publish_at:
                    self._books.cache.publish(sequence)

    def _append_tokens(self, step: Step, result: StepResult, events: Events) -> None:
        for sequence, token_id in zip(step.sampled, result.token_ids, strict=True):
            if sequence.state is State.FINISHED:
                continue  # overrun: it ended after this step was planned
            token_ids = sequence.token_ids
            sequence.num_computed_tokens = num_computed = len(token_ids)
            token_ids.append(token_id)
            if num_computed >= sequence.publish_at:
                self._books.cache.publish(sequence)
            events.sequences.append(sequence)
            events.token_ids.append(token_id)
        self._books.counters.num_generated_tokens += len(events.token_ids)

    # --- beams ------------------------------------------------------------------------------------------------

    def _decide_beams(self, step: Step, candidates: dict[Sequence, Candidates], events: Events) -> None:
        """Each group that reported goes on with the beams it has decided on, or has ended."""
        for beam in step.beams:
            if beam.is_finished:
                continue  # overrun: its request ended after this step was planned
            beam.num_computed_tokens = beam.num_planned_tokens
            if beam.num_computed_tokens >= beam.publish_at:
                self._books.cache.publish(beam)
        for leader in dict.fromkeys(beam.leader for beam in step.beams if not beam.is_finished):
            leader.show_progress()
            self._decide(self._books.active(leader), candidates, events)

    def _decide(self, active: ActiveRequest, candidates: dict[Sequence, Candidates], events: Events) -> None:
        books, group = self._books, active.group
        if group is None:
            raise InvariantViolation(f"request {active.request.request_id} reported candidates, and is no beam search")
        leader = group.leader
        is_first = not group.beams
        dropped = group.decide(candidates)
        if is_first:
            books.batch.replace(leader, group.beams[0])
        if group.branches:
            books.drop_beams(active, dropped)
            books.batch.decided.append(group)
            return
        results = group.search.results()
        books.counters.num_generated_tokens += sum(len(result.token_ids) for result in results)
        books.finish(leader, results[0].reason)
        events.beams.append((leader, results))

    # --- ends -------------------------------------------------------------------------------------------------

    def _end_sequences(self, step: Step, result: StepResult, events: Events) -> None:
        if result.end_reasons is not None:
            for sequence, reason in zip(step.sampled, result.end_reasons, strict=True):
                if reason is not None:
                    self._end(sequence, reason, events)
        for sequence in step.ending:
            self._end(sequence, FinishReason.LENGTH, events)

    def _end(self, sequence: Sequence, reason: FinishReason, events: Events) -> None:
        if not sequence.is_finished:
            self._books.finish(sequence, reason)
            events.finished.append((sequence, reason))
