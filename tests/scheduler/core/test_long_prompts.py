"""I15, its second half: a prompt that takes several steps leaves room in each of them for whoever comes."""

from collections import Counter

from scheduler.core import Request
from tests.scheduler.core.test_progress import build_rig
from tests.support.core.letters import make_request
from tests.support.core.rig import Rig

BUDGET = 16
LONG = "a" * 90


def chunks(rig: Rig) -> dict[int, int]:
    """What the next plan computes of each prompt: request ids → tokens. Its result is committed."""
    assert rig.schedule() is not None
    found = Counter[int]()
    for sequence, num_tokens in rig.scheduler.state.in_flight[-1].prefills.items():
        found[sequence.request.request_id] += num_tokens
    rig.commit()
    return dict(found)


def build(*requests: Request, num_usable_blocks: int = 400) -> Rig:
    return build_rig(*requests, max_num_batched_tokens=BUDGET, num_usable_blocks=num_usable_blocks)


def test_alone_it_has_the_whole_step() -> None:
    rig = build(make_request(1, LONG, 1))
    assert [chunks(rig) for _ in range(6)] == [{1: 16}] * 5 + [{1: 10}]


def test_short_ones_do_not_wait_for_it() -> None:
    rig = build(make_request(1, LONG, 1))
    chunks(rig)
    for request_id, prompt in enumerate(["bcd", "cde", "def", "efg", "fgh"], start=2):
        rig.add(make_request(request_id, prompt, 1))
        assert chunks(rig)[request_id] == 3, "it came in with the next plan"
    rig.run()


def test_it_has_what_they_leave_and_never_less_than_half() -> None:
    rig = build(make_request(1, LONG, 1))
    chunks(rig)
    rig.add(make_request(2, "xyz", 1))
    assert chunks(rig) == {1: 13, 2: 3}
    rig.add(make_request(3, "b" * 30, 1))
    assert chunks(rig) == {1: 8, 3: 8}
    assert chunks(rig) == {1: 16}, "the second long one has come in, and waits for the first"
    rig.add(make_request(4, "uvw", 1))
    assert chunks(rig) == {1: 13, 4: 3}, "not so a short one behind it"
    rig.run()
    assert rig.scheduler.state.counters.num_steps == -(-(90 + 3 + 30 + 3) // BUDGET), "all steps but the last are full"


def test_it_ends_after_twice_the_steps_whoever_comes() -> None:
    rig = build(make_request(1, LONG, 1))
    next_id = 2
    while rig.clients.open_keys(1):
        rig.add(make_request(next_id, "bcdefghijklm"[next_id % 12] * 50, 1))
        next_id += 1
        chunks(rig)
    assert rig.scheduler.state.counters.num_steps <= 2 * -(-90 // BUDGET)


def test_decodes_come_first_and_the_rest_is_shared() -> None:
    rig = build(make_request(1, "ab", 30), make_request(2, "cd", 30))
    chunks(rig)
    rig.add(make_request(3, LONG, 1))
    assert chunks(rig) == {3: 14}
    rig.add(make_request(4, "x" * 20, 1))
    assert chunks(rig) == {3: 7, 4: 7}
    rig.run()


def test_nobody_takes_the_blocks_that_it_still_lacks() -> None:
    """90 tokens and 20 do not fit into 100 blocks: the second waits, and neither is preempted."""
    rig = build(make_request(1, LONG, 1), num_usable_blocks=100)
    chunks(rig)
    rig.add(make_request(2, "x" * 20, 1))
    for _ in range(4):
        assert set(chunks(rig)) == {1}
    rig.run()
    assert rig.scheduler.state.counters.num_preemptions == 0
