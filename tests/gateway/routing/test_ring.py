"""The ring keeps prefixes together, bounds loads, and moves little when a scheduler goes away."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.ring import MAX_EXCESS, Ring

NAMES = ["a:1", "b:1", "c:1", "d:1"]
KEYS = [f"prompt {i}".encode() for i in range(400)]


def test_a_key_has_one_place_as_long_as_loads_are_low() -> None:
    ring, idle = Ring(NAMES), dict.fromkeys(NAMES, 0)
    assert [ring.choose(key, idle) for key in KEYS] == [Ring(NAMES[::-1]).choose(key, idle) for key in KEYS]
    counts = Counter(ring.choose(key, idle) for key in KEYS)
    assert all(40 < counts[name] < 180 for name in NAMES)


@pytest.mark.parametrize("keys", [KEYS, KEYS[:1] * 400])
def test_no_scheduler_gets_much_more_than_its_share(keys: list[bytes]) -> None:
    ring, loads = Ring(NAMES), dict.fromkeys(NAMES, 0)
    for key in keys:
        most = math.ceil(MAX_EXCESS * (sum(loads.values()) + 1) / len(NAMES))
        name = ring.choose(key, loads)
        loads[name] += 1
        assert loads[name] <= most


def test_only_keys_of_a_lost_scheduler_move() -> None:
    ring, idle = Ring(NAMES), dict.fromkeys(NAMES, 0)
    rest = {name: 0 for name in NAMES if name != "b:1"}
    for key in KEYS:
        before, after = ring.choose(key, idle), ring.choose(key, rest)
        assert after in rest
        assert before in ("b:1", after)


def test_the_home_ignores_loads() -> None:
    ring = Ring(NAMES)
    for key in KEYS:
        assert ring.home(key, NAMES) == ring.choose(key, dict.fromkeys(NAMES, 0))
    assert ring.home(b"key", []) is None
    assert Ring().home(b"key", NAMES) is None


def test_a_ring_that_has_changed_equals_a_new_one() -> None:
    ring, idle = Ring(NAMES), dict.fromkeys([*NAMES, "e:1"], 0)
    ring.add("e:1")
    ring.remove("b:1")
    ring.remove("unknown:1")
    del idle["b:1"]
    assert [ring.choose(key, idle) for key in KEYS] == [Ring(list(idle)).choose(key, idle) for key in KEYS]


SOME_NAMES = st.sets(st.integers(0, 20), min_size=1, max_size=10)


@given(SOME_NAMES, st.integers(0, 20))
def test_only_the_keys_of_a_replica_that_comes_or_goes_move(numbers: set[int], other: int) -> None:
    names = {f"replica-{number}" for number in numbers - {other}} or {"replica-0"}
    comes = f"replica-{other}" if other or len(names) > 1 else "replica-1"
    before, after = Ring(names), Ring(names)
    after.add(comes)
    for key in KEYS[:100]:
        old, new = before.home(key, names), after.home(key, {*names, comes})
        assert new in (old, comes)


@given(SOME_NAMES, st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=80))
def test_no_load_exceeds_its_bound_whatever_the_keys_are(numbers: set[int], requests: list[tuple[int, bool]]) -> None:
    """Requests with few keys come, and some end: a choice never makes a load larger than the bound at that time."""
    names = [f"replica-{number}" for number in numbers]
    ring, loads, ends = Ring(names), dict.fromkeys(names, 0), list[str]()
    for key, has_end in requests:
        most = math.ceil(MAX_EXCESS * (sum(loads.values()) + 1) / len(names))
        name = ring.choose(str(key).encode(), loads)
        loads[name] += 1
        ends.append(name)
        assert loads[name] <= most
        if has_end:
            loads[ends.pop(0)] -= 1
