"""Commits the result of a plan: appends tokens, continues beams, ends sequences, and releases deferred blocks."""

from collections.abc import Collection
from math import inf, isnan

from scheduler.core import reports
from scheduler.core.beams.group import BeamGroup
from scheduler.core.beams.search import Candidates
from scheduler.core.errors import InvariantViolation, ResultMismatch
from scheduler.core.plan import Events, Logprobs, StepResult
from scheduler.core.sequence import FinishReason, Sequence, State
from scheduler.core.state import SchedulerState
from scheduler.core.step import Step

BeamCandidates = dict[Sequence, Candidates]


def commit(state: SchedulerState, result: StepResult) -> Events:
    """Commits the result of the oldest plan in flight. Raises ResultMismatch, changing nothing, for any other."""
    step = _check_result(state, result)
    state.in_flight.popleft()
    events = Events()
    for sequence, num_cached in step.admitted:
        _note_start(state, sequence, num_cached, events)
    candidates = reports.candidates_by_beam(step, result.candidates) if result.candidates is not None else {}
    late = {beam for beam, (_, values) in candidates.items() if values[0] == inf}
    _commit_prefills(state, step, late)
    if result.prompt_logprobs is not None:
        _commit_prompt_reports(state, step, result.prompt_logprobs, events)
    for place in result.deferred:
        if not step.sampled[place].is_finished:
            state.defer(step.sampled[place])
    _append_tokens(state, step, result, events)
    state.accounts.charge_tokens(events.sequences)
    if result.logprobs is not None:
        reports.add_logprobs(step, result.logprobs, events)
    if candidates:
        _commit_beams(state, step, candidates, late, events)
    _end_sequences(state, step, result, events)
    for block_table in step.releases:
        state.cache.release(block_table)
    return events


def _check_result(state: SchedulerState, result: StepResult) -> Step:
    if not state.in_flight:
        raise ResultMismatch(f"result of step {result.step_id}, but no plan is in flight")
    step = state.in_flight[0]
    if (result.epoch, result.step_id) != (state.epoch, step.step_id):
        raise ResultMismatch(
            f"result of step {result.step_id} of epoch {result.epoch}, "
            f"but step {step.step_id} of epoch {state.epoch} is next"
        )
    reports.check_counts(step, result)
    reports.check_reports(step, result)
    reports.check_token_ids(result, state.vocab_size)
    return step


def _note_start(state: SchedulerState, sequence: Sequence, num_cached: int, events: Events) -> None:
    """Counts prompt tokens as cached or not at a request's first admission, because a recompute is not a hit."""
    if sequence.is_finished or (active := state.active(sequence)).has_started:
        return
    active.has_started = True
    sequence.num_cached_tokens = num_cached
    state.counters.num_prefix_queried_tokens += sequence.num_given_tokens
    state.counters.num_prefix_hit_tokens += num_cached
    events.started.append(sequence)


def _commit_prefills(state: SchedulerState, step: Step, late: Collection[Sequence]) -> None:
    for sequence, num_tokens in step.prefills.items():
        if not sequence.is_finished:
            sequence.num_computed_tokens += num_tokens - (sequence in late)
            state.counters.num_prefilled_tokens += num_tokens
            if sequence.num_computed_tokens >= sequence.publish_at:
                state.cache.publish(sequence)


def _commit_prompt_reports(state: SchedulerState, step: Step, logprobs: Logprobs, events: Events) -> None:
    """Reports on prompts, and ends the sequences whose reports have numbers that are not finite."""
    reports.add_prompt_logprobs(step, logprobs, events)
    for sequence, _, tokens in events.prompt_logprobs:
        if any(isnan(token.values[0]) for token in tokens):
            _end(state, sequence, FinishReason.NOT_FINITE, events)


def _append_tokens(state: SchedulerState, step: Step, result: StepResult, events: Events) -> None:
    sequences, new_ids, finished = events.sequences, events.token_ids, State.FINISHED
    for sequence, token_id in zip(step.sampled, result.token_ids, strict=True):
        if sequence.state is finished:
            continue  # the sequence ended after this step was planned, or was deferred
        token_ids = sequence.token_ids
        sequence.num_computed_tokens = num_computed = len(token_ids)
        token_ids.append(token_id)
        if num_computed >= sequence.publish_at:
            state.cache.publish(sequence)
        sequences.append(sequence)
        new_ids.append(token_id)
    state.counters.num_generated_tokens += len(new_ids)


# --- beams ----------------------------------------------------------------------------------------------------


def _commit_beams(
    state: SchedulerState, step: Step, candidates: BeamCandidates, late: Collection[Sequence], events: Events
) -> None:
    """Continues each group whose beams have all reported with the beams that it decides on, or ends the group."""
    beams = [beam for beam in step.beams if not beam.is_finished]  # others: their request ended after the plan was made
    state.accounts.charge_tokens(beams)
    groups: dict[BeamGroup, None] = {}
    for beam in beams:
        group = _group_of(state, beam)
        groups[group] = None
        if beam in late:
            beam.row_count = 0
            group.late.append(beam)
            continue
        group.reported[beam] = candidates[beam]
        beam.num_computed_tokens = beam.num_planned_tokens
        if beam.num_computed_tokens >= beam.publish_at:
            state.cache.publish(beam)
    for group in groups:
        if group.late:
            state.defer_beams(group)
        else:
            _decide_beams(state, group, events)


def _group_of(state: SchedulerState, beam: Sequence) -> BeamGroup:
    group = state.active(beam).group
    if group is None:
        raise InvariantViolation(f"request {beam.request.request_id} reported candidates, and is no beam search")
    return group


def _decide_beams(state: SchedulerState, group: BeamGroup, events: Events) -> None:
    leader = group.leader
    best = [values[0] for _, values in group.reported.values()]
    if any(map(isnan, best)) or (leader.params.grammar and -inf in best):  # a grammar leaves a token, or it failed
        _end(state, leader, FinishReason.NOT_FINITE if any(map(isnan, best)) else FinishReason.GRAMMAR, events)
        return
    is_first = not group.beams
    dropped = group.decide()
    if is_first:
        state.batch.replace(leader, group.beams[0])
    if group.branches:
        state.drop_beams(state.active(leader), dropped)
        state.batch.decided.append(group)
        return
    results = group.search.results()
    state.counters.num_generated_tokens += sum(len(result.token_ids) for result in results)
    state.finish(leader)
    events.beams.append((leader, results))


# --- ends -----------------------------------------------------------------------------------------------------


def _end_sequences(state: SchedulerState, step: Step, result: StepResult, events: Events) -> None:
    for sequence, reason in zip(step.sampled, result.end_reasons or (), strict=False):  # the lengths were checked
        if reason is not None:
            _end(state, sequence, reason, events)
    for sequence in step.ending:
        _end(state, sequence, FinishReason.LENGTH, events)


def _end(state: SchedulerState, sequence: Sequence, reason: FinishReason, events: Events) -> None:
    if not sequence.is_finished:
        if reason is FinishReason.NOT_FINITE:
            for holder in state.active(sequence).holders(sequence):
                state.cache.withdraw(holder.block_table)  # the numbers in its KV may be the cause
        state.finish(sequence)
        events.finished.append((sequence, reason))
