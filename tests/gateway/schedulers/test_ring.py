"""The ring keeps prefixes together, bounds loads, and moves little when a scheduler goes away."""

import math
from collections import Counter

import pytest

from gateway.schedulers.ring import MAX_EXCESS, Ring, affinity_key
from quire.v1 import generation_pb2 as pb

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


def chat(*contents: str, salt: str = "") -> pb.GenerateRequest:
    messages = [pb.ChatMessage(role="user", content=each) for each in contents]
    return pb.GenerateRequest(chat=pb.ChatPrompt(messages=messages), cache_salt=salt)


def test_the_key_is_the_beginning_of_the_prompt() -> None:
    long = "x" * 2000
    assert affinity_key(chat(long, "first")) == affinity_key(chat(long, "second"))
    assert affinity_key(chat("a", "b")) != affinity_key(chat("a", "c"))
    assert affinity_key(chat("a")) != affinity_key(chat("a", salt="s"))
    text = pb.GenerateRequest(text=long + "1")
    assert affinity_key(text) == affinity_key(pb.GenerateRequest(text=long + "2"))
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(300)))
    assert affinity_key(ids) == affinity_key(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[*range(299), 5])))
    assert affinity_key(ids) != affinity_key(pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(1, 301))))
