"""The next actions of a controller, for every state of a fleet."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.parts import Part, PartStatus, Role, State
from fleet.reconcile import Address, Drain, Kill, Start, ended_replicas, reconcile
from fleet.restarts import FIRST_DELAY_S, HEALTHY_S, MAX_DELAY_S, Restarts
from fleet.wanted import Wanted

NOW_S = 100.0
E0, E1 = Part(Role.EXECUTOR, 0), Part(Role.EXECUTOR, 1)
S0, S1 = Part(Role.SCHEDULER, 0), Part(Role.SCHEDULER, 1)
G0 = Part(Role.GATEWAY, 0)


def status(part: Part, state: State = State.READY, name: str = "", **fields: object) -> PartStatus:
    return PartStatus(part, name or f"{part}'", state, 50.0, **({"address": f"at {part}"} | fields))  # type: ignore[arg-type]


def serving(*indices: int) -> list[PartStatus]:
    """Returns a fleet in which everything is as it should be."""
    parts = [status(Part(Role.EXECUTOR, index)) for index in indices]
    parts += [status(Part(Role.SCHEDULER, index), peers=(f"at executor-{index}",)) for index in indices]
    return [*parts, status(G0, peers=tuple(f"at scheduler-{index}" for index in indices))]


def without(parts: list[PartStatus], *gone: Part) -> list[PartStatus]:
    return [each for each in parts if each.part not in gone]


def test_nothing_is_done_where_all_is_well() -> None:
    assert reconcile(Wanted.of(2), serving(0, 1), NOW_S) == []


def test_executors_and_schedulers_start_first_and_gateways_when_there_is_a_scheduler() -> None:
    actions = reconcile(Wanted.of(2), [], NOW_S)
    assert [action.part for action in actions] == [E0, E1, S0, S1]
    actions = reconcile(Wanted.of(1), [status(E0, State.STARTING), status(S0, State.STARTING)], NOW_S)
    assert actions == [Address(S0, "scheduler-0'", ("at executor-0",)), Start(G0, ("at scheduler-0",))]


@pytest.mark.parametrize("part", [E0, S0, G0])
def test_a_part_that_has_ended_is_started_alone(part: Part) -> None:
    """The death of an executor takes no scheduler with it, and the other way round."""
    observed = [*without(serving(0, 1), part), status(part, State.ENDED)]
    starts = [action for action in reconcile(Wanted.of(2), observed, NOW_S) if isinstance(action, Start)]
    assert [action.part for action in starts] == [part]
    assert not [action for action in reconcile(Wanted.of(2), observed, NOW_S) if isinstance(action, Kill)]


def test_a_part_waits_for_its_time() -> None:
    observed = without(serving(0), E0)
    assert reconcile(Wanted.of(1), observed, NOW_S, lambda part: NOW_S + 1) == []
    assert reconcile(Wanted.of(1), observed, NOW_S, lambda part: NOW_S) == [Start(E0, ())]


def test_a_new_executor_is_made_known_to_its_scheduler() -> None:
    observed = [*without(serving(0), E0), status(E0, State.STARTING, "new", address="elsewhere")]
    assert reconcile(Wanted.of(1), observed, NOW_S) == [Address(S0, "scheduler-0'", ("elsewhere",))]


def test_an_orphan_is_killed_before_its_place_is_given_away() -> None:
    """Two incarnations of one part: the older one must go, and no third one is started, also if both are to go."""
    orphan = replace(status(E0, name="orphan"), started_s=1.0)
    assert reconcile(Wanted.of(1), [*serving(0), orphan], NOW_S) == [Kill(E0, "orphan")]
    hung = status(E0, State.HUNG)
    actions = reconcile(Wanted.of(1), [*without(serving(0), E0), hung], NOW_S)
    assert actions == [Kill(E0, "executor-0'")]


def test_a_part_on_a_lost_machine_is_replaced_at_once_and_killed_if_it_still_runs() -> None:
    observed = [*without(serving(0), E0), status(E0, State.LOST, "lost")]
    assert reconcile(Wanted.of(1), observed, NOW_S) == [Kill(E0, "lost"), Start(E0, ())]


def test_parts_that_are_not_wanted_are_killed() -> None:
    killed = reconcile(Wanted.of(1), [*serving(0), status(E1), status(Part(Role.GATEWAY, 3))], NOW_S)
    assert killed == [Kill(E1, "executor-1'"), Kill(Part(Role.GATEWAY, 3), "gateway-3'")]


def test_a_replica_drains_in_steps() -> None:
    wanted = Wanted.of(2).scaled(1, NOW_S + 60)
    observed = serving(0, 1)
    assert reconcile(wanted, observed, NOW_S) == [Address(G0, "gateway-0'", ("at scheduler-0",))]
    observed = [*without(observed, G0), status(G0, peers=("at scheduler-0",))]
    assert reconcile(wanted, observed, NOW_S) == [Drain(S1, "scheduler-1'", True)]
    draining = [*without(observed, S1), status(S1, is_draining=True)]
    assert reconcile(wanted, draining, NOW_S) == []
    assert not ended_replicas(wanted, draining)
    ended = [*without(observed, S1), status(S1, State.ENDED)]
    assert reconcile(wanted, ended, NOW_S) == [Kill(E1, "executor-1'")]
    assert ended_replicas(wanted, without(ended, E1)) == {1}


def test_a_replica_keeps_its_streams_while_no_other_one_can_take_them() -> None:
    wanted = Wanted.of(2).scaled(1, NOW_S + 60)
    observed = [*without(serving(0, 1), S0, G0), status(S0, State.STARTING, peers=("at executor-0",))]
    observed.append(status(G0, peers=("at scheduler-0",)))
    assert reconcile(wanted, observed, NOW_S) == []
    assert reconcile(wanted, observed, NOW_S + 60) == [Kill(S1, "scheduler-1'")]


def test_a_fleet_goes_down_in_order() -> None:
    wanted = Wanted.of(1).down(NOW_S + 60)
    observed = serving(0)
    assert reconcile(wanted, observed, NOW_S) == [Drain(G0, "gateway-0'", False)]
    observed = without(observed, G0)
    assert reconcile(wanted, observed, NOW_S) == [Drain(S0, "scheduler-0'", False)]
    observed = without(observed, S0)
    assert reconcile(wanted, observed, NOW_S) == [Kill(E0, "executor-0'")]
    assert reconcile(wanted, [], NOW_S) == []


def test_what_is_left_at_the_deadline_is_killed() -> None:
    wanted = Wanted.of(1).down(NOW_S)
    assert reconcile(wanted, serving(0), NOW_S) == [Kill(G0, "gateway-0'")]


def test_gateways_keep_the_last_schedulers_they_know() -> None:
    """An empty list would be refused by the gateway."""
    assert Address not in map(type, reconcile(Wanted.of(1), without(serving(0), S0), NOW_S))


# --- any state ------------------------------------------------------------------------------------------------------

parts = st.builds(Part, st.sampled_from(list(Role)), st.integers(0, 3))
statuses = st.builds(
    PartStatus,
    part=parts,
    incarnation=st.uuids().map(str),
    state=st.sampled_from(list(State)),
    started_s=st.integers(0, 9).map(float),
    address=st.sampled_from(["", "a", "b"]),
    peers=st.sampled_from([(), ("a",), ("a", "b")]),
    is_draining=st.booleans(),
)
wanteds = st.builds(
    lambda serving, draining, gateways, down: Wanted(
        serving, {index: by_s for index, by_s in draining.items() if index not in serving}, gateways, down
    ),
    st.frozensets(st.integers(0, 3), min_size=1),
    st.dictionaries(st.integers(0, 3), st.sampled_from([50.0, 150.0])),
    st.integers(1, 2),
    st.sampled_from([None, None, 50.0, 150.0]),
)


@settings(max_examples=300, deadline=None)
@given(wanteds, st.lists(statuses, max_size=12), st.dictionaries(parts, st.sampled_from([50.0, 150.0])))
def test_no_state_leads_to_a_wrong_action(wanted: Wanted, observed: list[PartStatus], waits: dict[Part, float]) -> None:
    by_name = {each.incarnation: each for each in observed}
    occupied = {each.part for each in observed if each.state.occupies}
    actions = reconcile(wanted, observed, NOW_S, lambda part: waits.get(part, 0.0))
    starts = Counter(action.part for action in actions if isinstance(action, Start))
    for part, number in starts.items():
        assert number == 1
        assert part not in occupied, "its place is not free"
        assert waits.get(part, 0.0) <= NOW_S
        assert wanted.down_by_s is None
        assert part.index < wanted.gateways if part.role is Role.GATEWAY else part.index in wanted.serving
        has_peers = bool(next(a.peers for a in actions if isinstance(a, Start) and a.part == part))
        assert has_peers or part.role is not Role.GATEWAY
    told = {address for e in observed if e.part.role is Role.GATEWAY and e.state.occupies for address in e.peers}
    for action in actions:
        if isinstance(action, Start):
            continue
        target = by_name[action.incarnation]
        assert target.part == action.part
        assert target.state.occupies or target.state is State.LOST
        if isinstance(action, Drain) and action.moves_streams:
            assert target.address not in told, "a gateway could still send requests there"
            assert action.part.index in wanted.draining
            assert any(
                e.part.role is Role.SCHEDULER and e.state is State.READY and e.part.index in wanted.serving
                for e in observed
            )
        if isinstance(action, Kill) and wanted.down_by_s is None and target.state in (State.STARTING, State.READY):
            younger = [e for e in observed if e.part == target.part and e.state.occupies and e is not target]
            if not younger and action.part.role is not Role.GATEWAY and action.part.index in wanted.serving:
                raise AssertionError("a part that serves was killed")
            if not younger and action.part.index in wanted.draining and action.part.role is not Role.GATEWAY:
                has_scheduler = Part(Role.SCHEDULER, action.part.index) in occupied
                is_late = wanted.draining[action.part.index] <= NOW_S
                assert is_late or (action.part.role is Role.EXECUTOR and not has_scheduler)


# --- pauses ---------------------------------------------------------------------------------------------------------


def seen(name: str, state: State = State.ENDED) -> list[PartStatus]:
    """The clock of the part's machine may show anything."""
    return [PartStatus(E0, name, state, -1e6)]


def test_ends_with_one_exit_code_are_counted_in_a_row() -> None:
    restarts, numbers = Restarts(), []
    for i, code in enumerate((3, 3, 1, 3, 3, 3)):
        restarts.note([replace(each, exit_code=code) for each in seen(f"i{i}")], 0.0)
        numbers.append(restarts.num_alike(E0))
    assert (numbers, restarts.num_alike(E1)) == ([1, 2, 1, 1, 2, 3], 0)


def test_a_gang_that_dies_at_once_is_started_less_and_less_often() -> None:
    restarts, now_s, pauses = Restarts(), 1000.0, []
    assert restarts.not_before_s(E0) == 0
    for i in range(12):
        restarts.note(seen(f"i{i}", State.STARTING), now_s)
        restarts.note(seen(f"i{i}"), now_s)
        restarts.note(seen(f"i{i}"), now_s + 0.1)  # the same end is seen again
        pauses.append(round(restarts.not_before_s(E0) - now_s, 6))
        now_s = restarts.not_before_s(E0)
    assert pauses[:4] == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S, 8 * FIRST_DELAY_S]
    assert pauses[-1] == MAX_DELAY_S
    assert restarts.num_ends(E0) == 12
    restarts.note(seen("healthy", State.READY), now_s)
    restarts.note(seen("healthy"), now_s + HEALTHY_S)
    assert restarts.not_before_s(E0) == pytest.approx(now_s + HEALTHY_S + FIRST_DELAY_S)
    assert restarts.not_before_s(E1) == 0
    assert restarts.num_ends(E0) == 13, "all count, and not only those after short runs"
