"""The wanted state of a fleet, after each command."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.wanted import MAX_REPLICAS, FleetError, Wanted


def test_the_highest_replicas_leave_and_free_numbers_join() -> None:
    wanted = Wanted.of(3).scaled(1, 9.0)
    assert (wanted.serving, wanted.draining) == ({0}, {1: 9.0, 2: 9.0})
    assert wanted.scaled(2, 10.0).serving == {0, 3}, "1 and 2 are still ending"
    assert wanted.without({1, 2}).scaled(2, 10.0).serving == {0, 1}


def test_a_drained_replica_is_not_replaced() -> None:
    wanted = Wanted.of(3).drained(1, 9.0)
    assert (wanted.serving, wanted.draining) == ({0, 2}, {1: 9.0})
    assert wanted.drained(1, 99.0) == wanted, "a second command does not put it off"
    assert wanted.drained(1, 5.0).draining == {1: 5.0}, "but can bring it forward"


@pytest.mark.parametrize("number", [0, -1, MAX_REPLICAS + 1])
def test_a_wrong_number_is_refused(number: int) -> None:
    for command in (Wanted.of, lambda number: Wanted.of(1).scaled(number, 1.0)):
        with pytest.raises(FleetError, match=str(number)):
            command(number)


def test_commands_that_cannot_be_carried_out() -> None:
    with pytest.raises(FleetError, match=r"no replica 7.*0, 1"):
        Wanted.of(2).drained(7, 1.0)
    with pytest.raises(FleetError, match="last one"):
        Wanted.of(1).drained(0, 1.0)
    down = Wanted.of(2).down(5.0)
    for command in (lambda: down.scaled(3, 1.0), lambda: down.drained(0, 1.0)):
        with pytest.raises(FleetError, match="going down"):
            command()
    assert down.down(9.0) == down
    assert down.down(1.0).down_by_s == 1.0


@given(
    st.lists(st.one_of(st.integers(1, 9).map(lambda n: ("scale", n)), st.integers(0, 9).map(lambda n: ("drain", n))))
)
def test_any_commands_keep_the_number_and_survive_a_file(commands: list[tuple[str, int]]) -> None:
    wanted = Wanted.of(2)
    for verb, number in commands:
        try:
            wanted = wanted.scaled(number, 5.0) if verb == "scale" else wanted.drained(number, 5.0)
        except FleetError:
            continue
        if verb == "scale":
            assert len(wanted.serving) == number
        assert wanted.serving
        assert not wanted.serving & wanted.draining.keys()
        assert Wanted.from_json(wanted.as_json(256.0), 256.0) == wanted


def test_times_in_a_file_are_on_a_clock_that_outlives_the_controller() -> None:
    value = Wanted.of(2).drained(0, 5.0).down(7.0).as_json(100.0)
    assert (value["draining"], value["down_by_s"]) == ({"0": 105.0}, 107.0)
    after = Wanted.from_json(value, 98.0)
    assert (after.draining, after.down_by_s) == ({0: 7.0}, 9.0)
