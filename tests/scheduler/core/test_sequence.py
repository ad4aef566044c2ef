"""A sequence: its states, its counts of tokens, and its losses."""

from itertools import product

import pytest

from scheduler.core import TRANSITIONS, InvariantViolation, State
from scheduler.core.sequence import Sequence
from tests.support.core.letter_tokens import make_request, make_sequence, to_ids


def sequence_in(state: State) -> Sequence:
    sequence = make_sequence("abc")
    sequence.state = state
    return sequence


@pytest.mark.parametrize(("source", "target"), list(product(State, State)))
def test_changes_state_only_as_the_table_allows(source: State, target: State) -> None:
    sequence = sequence_in(source)
    if target in TRANSITIONS[source]:
        sequence.become(target)
        assert sequence.state is target
    else:
        with pytest.raises(InvariantViolation, match=f"cannot become {target.value}"):
            sequence.become(target)
        assert sequence.state is source


def test_every_state_can_be_reached_and_only_the_end_is_final() -> None:
    reachable, frontier = {State.WAITING}, {State.WAITING}
    while frontier:
        frontier = {target for source in frontier for target in TRANSITIONS[source]} - reachable
        reachable |= frontier
    assert reachable == set(State)
    assert [state for state in State if not TRANSITIONS[state]] == [State.FINISHED]


def test_starts_with_its_prompt_and_nothing_computed() -> None:
    sequence = make_sequence("abc")
    assert sequence.state is State.WAITING
    assert tuple(sequence.token_ids) == to_ids("abc")
    assert (sequence.num_tokens, sequence.num_prompt_tokens, sequence.num_uncomputed_tokens) == (3, 3, 3)
    assert (sequence.num_computed_tokens, sequence.num_planned_tokens, sequence.slot) == (0, 0, -1)


def test_each_sample_has_its_own_seed_and_its_own_tokens() -> None:
    request = make_request(1, "ab", seeds=(5, 6))
    first, second = (Sequence(request, index, arrival=1) for index in range(2))
    assert (first.params.seed, second.params.seed) == (5, 6)
    first.token_ids.append(9)
    assert second.num_tokens == request.num_sequences == 2


def test_tokens_planned_ahead_do_not_make_uncomputed_tokens_negative() -> None:
    sequence = make_sequence("abc")
    sequence.num_planned_tokens = 5
    assert sequence.num_uncomputed_tokens == 0


def test_forgets_its_kv_and_keeps_its_tokens() -> None:
    sequence = make_sequence("abc")
    sequence.token_ids += to_ids("xy")
    sequence.slot, sequence.block_table, sequence.row_count = 3, [4, 5], 1
    sequence.num_computed_tokens = sequence.num_planned_tokens = 4
    sequence.forget_kv()
    assert (sequence.slot, sequence.block_table, sequence.row_count) == (-1, [], 0)
    assert (sequence.num_tokens, sequence.num_uncomputed_tokens, sequence.num_computed_tokens) == (5, 5, 0)


def test_is_suspect_after_two_losses_in_a_row() -> None:
    sequence = make_sequence("abc")
    verdicts = []
    for _ in range(3):
        sequence.count_loss(sequence.num_tokens)
        verdicts.append((sequence.num_losses, sequence.is_suspect))
    assert verdicts == [(1, False), (2, True), (3, True)]


@pytest.mark.parametrize(("num_new_tokens", "verdict"), [(0, (3, True)), (1, (3, True)), (2, (1, False))])
def test_two_tokens_clear_a_suspect(num_new_tokens: int, verdict: tuple[int, bool]) -> None:
    """The first one comes from the computation of the known tokens, and only the second one from a decode."""
    sequence = make_sequence("abc")
    for _ in range(2):
        sequence.count_loss(sequence.num_tokens)
    sequence.token_ids += [0] * num_new_tokens
    assert sequence.is_suspect is verdict[1]
    sequence.count_loss(sequence.num_tokens)
    assert (sequence.num_losses, sequence.is_suspect) == verdict, "after progress the count starts again"


def test_a_beam_search_makes_progress_if_it_gets_further_than_before() -> None:
    leader = make_sequence("abc")
    num_losses = []
    for num_tokens in (40, 40, 41, 5, 7, 3):
        leader.count_loss(num_tokens)
        num_losses.append(leader.num_losses)
    assert num_losses == [1, 2, 3, 4, 1, 2]
