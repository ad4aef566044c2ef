"""Fragmentation of KV memory: ten requests, one pool, four KV allocations, and every figure counted by hand.

The pool has 27 blocks of 4 token slots, 108 in all; max_model_len is 24. The KV of a request's last token is never
needed, so a prompt of p tokens and an output of o tokens take p + o - 1 token slots in the end.

    request          a   b   c   d   e   f   g   h   i   j
    prompt           5   3   6   2   7   4   1   9  10   3
    output           3   1   7   1  10   5  12   4  11   6
    token slots      7   3  12   2  16   8  12  12  20   8

All arrive at once. Step 1 computes the prompts of the admitted requests; then b and d have ended and released their
blocks. Step 2 is in flight: each of the others computes one more token, and newly admitted requests compute their
prompts. Then the pool looks like this:

    letter   the token slot holds a token of that request
    +        reserved: it will hold one later
    -        internal: it never will
    ·        free
"""

import pytest

from scheduler.core import (
    CONTIGUOUS,
    CONTIGUOUS_EXACT,
    CONTIGUOUS_POWER_OF_TWO,
    PAGED,
    KVAllocation,
    KVUsage,
    Scheduler,
    SchedulerLimits,
    kv_usage,
)
from tests.support.core.harness import Harness
from tests.support.core.letter_tokens import VOCAB_SIZE, make_request

PROMPTS = (5, 3, 6, 2, 7, 4, 1, 9, 10, 3)
OUTPUTS = (3, 1, 7, 1, 10, 5, 12, 4, 11, 6)
NUM_TOKEN_SLOTS = 108


def run_two_steps(kv_allocation: KVAllocation) -> Scheduler:
    """Runs until step 2 is in flight."""
    limits = SchedulerLimits(max_num_seqs=10, max_num_batched_tokens=64, max_model_len=24, max_in_flight=1)
    harness = Harness(limits, num_blocks=27 + 1, block_size=4, vocab_size=VOCAB_SIZE, kv_allocation=kv_allocation)
    harness.attach()
    for request_id, (num_prompt, num_output) in enumerate(zip(PROMPTS, OUTPUTS, strict=True)):
        harness.add(make_request(request_id, "abcdefghij"[request_id] * num_prompt, num_output))
    harness.schedule()
    harness.commit()
    harness.schedule()
    return harness.scheduler


def draw(scheduler: Scheduler) -> str:
    """Draws the pool from block 1 to the last, nine blocks a line."""
    size, pool = scheduler.state.cache.block_size, ["····"] * scheduler.state.cache.pool.num_usable_blocks
    for sequence in scheduler.state.batch.running:
        letter = "abcdefghij"[sequence.request.request_id]
        num_final = sequence.params.max_total_tokens - 1
        num_internal = len(sequence.block_table) * size - num_final
        token_slots = letter * sequence.num_planned_tokens + "+" * (num_final - sequence.num_planned_tokens)
        token_slots += "-" * num_internal
        for i, block in enumerate(sequence.block_table):
            pool[block - 1] = token_slots[i * size : (i + 1) * size]
    return "\n".join(" ".join(pool[i : i + 9]) for i in range(0, len(pool), 9))


def figures(usage: KVUsage) -> tuple[int, int, int, int]:
    return (
        usage.num_used_token_slots,
        usage.num_reserved_token_slots,
        usage.num_internal_token_slots,
        usage.num_external_token_slots,
    )


def check(kv_allocation: KVAllocation, drawing: str, **counted: int) -> None:
    scheduler = run_two_steps(kv_allocation)
    assert draw(scheduler) == drawing.strip()
    assert scheduler.num_waiting == counted["waiting"]
    usage = kv_usage(scheduler)
    assert figures(usage) == (counted["used"], counted["reserved"], counted["internal"], counted["external"])
    assert usage.num_wasted_token_slots == counted["reserved"] + counted["internal"], "of allocated blocks"
    assert counted["used"] == sum(letter.isalpha() for letter in drawing), "the drawing shows the same"
    assert counted["reserved"] == drawing.count("+")
    assert counted["internal"] == drawing.count("-")


def test_paged() -> None:
    """All ten are admitted. The blocks of b and d are free, and f has taken d's.

    used      a 6 + c 7 + e 8 + f 5 + g 2 + h 10 + i 11 + j 4         = 53
    blocks    a 2 + c 2 + e 2 + f 2 + g 1 + h  3 + i  3 + j 1         = 16, of 64 token slots: 11 hold no token
    internal  a's last block: 8 token slots, of which it will write 7       =  1
    reserved  the ends of the other last blocks: 1 + 1 + 3 + 2 + 2 + 1 = 10
    external  any block will do                                       =  0
    """
    drawing = """
aaaa aa+- ···· cccc ccc+ f+++ eeee eeee ffff
gg++ hhhh hhhh hh++ iiii iiii iii+ jjjj ····
···· ···· ···· ···· ···· ···· ···· ···· ····
"""
    check(PAGED, drawing, waiting=0, used=53, reserved=10, internal=1, external=0)


def test_contiguous() -> None:
    """Each request holds 24 token slots, 6 blocks. Four runs fit; e and f have taken those of b and d; g waits.

    used      a 6 + e 7 + c 7 + f 4                                   = 24, of 108
    in the end  7 +  16 +  12 +   8                                   = 43
    reserved  43 - 24                                                 = 19
    internal  4 runs of 24 slots, less 43                             = 53
    external  three blocks are free, a run takes six                  = 12
    """
    drawing = """
aaaa aa+- ---- ---- ---- ---- eeee eee+ ++++
++++ ---- ---- cccc ccc+ ++++ ---- ---- ----
ffff ++++ ---- ---- ---- ---- ···· ···· ····
"""
    check(CONTIGUOUS, drawing, waiting=4, used=24, reserved=19, internal=53, external=12)


def test_contiguous_power_of_two() -> None:
    """A run holds the prompt and the power of two that the output needs. In blocks:

              a 5 + 4: 3    b 3 + 1: 1    c 6 +  8: 4    d 2 + 1: 1    e 7 + 16: 6
              f 4 + 8: 3    g 1 + 16: 5   h 9 +  4: 4    i 10 + 16, no more than 24: 6

    a to h fill the pool. b and d have ended: two blocks are free, and i waits for six in a row.

    used      a 6 + c 7 + e 8 + f 5 + g 2 + h 10                      = 38
    in the end  7 +  12 +  16 +   8 +  12 +   12                      = 67
    reserved  67 - 38                                                 = 29
    internal  3 + 4 + 6 + 3 + 5 + 4 = 25 blocks, 100 slots, less 67   = 33
    external  two blocks                                              =  8
    """
    drawing = """
aaaa aa+- ---- ···· cccc ccc+ ++++ ---- ····
eeee eeee ++++ ++++ ---- ---- ffff f+++ ----
gg++ ++++ ++++ ---- ---- hhhh hhhh hh++ ----
"""
    check(CONTIGUOUS_POWER_OF_TWO, drawing, waiting=2, used=38, reserved=29, internal=33, external=8)


def test_contiguous_exact() -> None:
    """The oracle takes 2 + 1 + 3 + 1 + 4 + 2 + 3 + 3 + 5 + 2 = 26 blocks, so all ten are admitted.

    It wastes time instead: token slots are reserved long before they are written.

    used      as paged                                                = 53
    in the end  7 + 12 + 16 + 8 + 12 + 12 + 20 + 8                    = 95
    reserved  95 - 53                                                 = 42
    internal  24 blocks, 96 slots, less 95                            =  1
    external  no request waits                                        =  0
    """
    drawing = """
aaaa aa+- ···· cccc ccc+ ++++ ···· eeee eeee
++++ ++++ ffff f+++ gg++ ++++ ++++ hhhh hhhh
hh++ iiii iiii iii+ ++++ ++++ jjjj ++++ ····
"""
    check(CONTIGUOUS_EXACT, drawing, waiting=0, used=53, reserved=42, internal=1, external=0)


@pytest.mark.parametrize(
    ("kv_allocation", "num_running", "used_percent"),
    [(PAGED, 8, 83), (CONTIGUOUS, 4, 22), (CONTIGUOUS_POWER_OF_TWO, 6, 35), (CONTIGUOUS_EXACT, 8, 55)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_how_much_of_the_memory_in_use_holds_tokens(
    kv_allocation: KVAllocation, num_running: int, used_percent: int
) -> None:
    """Memory in use is allocated, or useless to the head of the queue: 53 / 64, 24 / 108, 38 / 108, 53 / 96."""
    scheduler = run_two_steps(kv_allocation)
    usage = kv_usage(scheduler)
    assert sum(1 for _ in scheduler.state.batch.running) == num_running
    num_in_use = usage.num_used_token_slots + usage.num_wasted_token_slots + usage.num_external_token_slots
    assert round(100 * usage.num_used_token_slots / num_in_use) == used_percent
    assert num_in_use <= NUM_TOKEN_SLOTS
