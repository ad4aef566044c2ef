"""Each malformed plan is rejected with a message that names the mistake, and changes nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from executor.errors import PlanRejected
from executor.plans.plan import Admission, Fork
from tests.support.executor.checked_plans import (
    BEAM,
    PARAMS,
    admission,
    beams,
    busy_slots,
    floats,
    plan,
    state,
    with_params,
)
from tests.support.executor.plan_driver import ints, tuples

if TYPE_CHECKING:
    from executor.slots.slots import Slots


@pytest.fixture
def slots() -> Slots:
    return busy_slots()


BAD_PLANS = {
    "retire: out of range": (plan(retired_slots=ints(4)), "retired_slots: slot 4"),
    "retire: negative": (plan(retired_slots=ints(-1)), "retired_slots: slot -1"),
    "retire: empty": (plan(retired_slots=ints(2)), "retired_slots: slot 2 is empty"),
    "retire: twice": (plan(retired_slots=ints(0, 0)), "named twice"),
    "admit: out of range": (plan(admissions=(admission(4),)), "admission to slot 4: there are 4 slots"),
    "admit: taken": (plan(admissions=(admission(0),)), "admission to slot 0: the slot is taken"),
    "admit: twice": (plan(admissions=(admission(2), admission(2))), "the slot is taken"),
    "admit: no tokens": (plan(admissions=(admission(num_tokens=0),)), "no tokens"),
    "admit: all computed": (plan(admissions=(admission(computed=5),)), "5 of 5 tokens computed"),
    "admit: token too large": (
        plan(admissions=(Admission(2, ints(1, 100), 0, ints(5), PARAMS),)),
        "token id 100 is not in",
    ),
    "admit: token negative": (plan(admissions=(Admission(2, ints(-1), 0, ints(5), PARAMS),)), "token id -1"),
    "admit: null block": (plan(admissions=(admission(blocks=(5, 0)),)), "block 0 is not in [1, 10)"),
    "admit: block too large": (plan(admissions=(admission(blocks=(10,)),)), "block 10 is not in [1, 10)"),
    "admit: block negative": (plan(admissions=(admission(blocks=(-3,)),)), "block -3"),
    "admit: table too long": (
        plan(admissions=(admission(blocks=(1, 2, 3, 4, 5, 6)),)),
        "6 blocks, more than 5",
    ),
    "params: no room": (with_params(max_total_tokens=5), "max_total_tokens 5"),
    "params: beyond the model": (with_params(max_total_tokens=21), "max_total_tokens 21"),
    "params: temperature NaN": (with_params(temperature=math.nan), "temperature nan"),
    "params: temperature negative": (with_params(temperature=-0.1), "temperature -0.1"),
    "params: temperature infinite": (with_params(temperature=math.inf), "temperature inf"),
    "params: top_p 0": (with_params(top_p=0.0), "top_p 0.0"),
    "params: top_p NaN": (with_params(top_p=math.nan), "top_p nan"),
    "params: min_p above 1": (with_params(min_p=1.5), "min_p 1.5"),
    "params: min_p NaN": (with_params(min_p=math.nan), "min_p nan"),
    "params: top_k": (with_params(top_k=-1), "top_k -1"),
    "params: seed": (with_params(seed=1 << 64), "seed"),
    "params: eos": (with_params(eos_token_ids=ints(100)), "eos_token_ids: token id 100"),
    "params: stop": (with_params(stop_token_ids=ints(-1)), "stop_token_ids: token id -1"),
    "table: empty slot": (plan(table_updates=tuples(3, (3, 0, 5))), "table_updates: slot 3 is empty"),
    "table: slot": (plan(table_updates=tuples(3, (9, 0, 5))), "table_updates: slot 9"),
    "table: null block": (plan(table_updates=tuples(3, (0, 2, 0))), "block 0 is not in"),
    "table: block": (plan(table_updates=tuples(3, (0, 2, 10))), "block 10 is not in"),
    "table: logical": (plan(table_updates=tuples(3, (0, 5, 5))), "logical block outside [0, 5)"),
    "table: logical negative": (plan(table_updates=tuples(3, (0, -1, 5))), "logical block outside"),
    "table: hole": (plan(table_updates=tuples(3, (0, 3, 5))), "slot 0: the table would have a hole"),
    "table: hole among several": (plan(table_updates=tuples(3, (0, 4, 5), (0, 2, 6))), "would have a hole"),
    "table: twice": (plan(table_updates=tuples(3, (0, 2, 5), (0, 2, 6))), "named twice"),
    "copies: null block": (plan(block_copies=tuples(2, (0, 5))), "block_copies: block 0"),
    "copies: to the null block": (plan(block_copies=tuples(2, (5, 0))), "block_copies: block 0"),
    "copies: beyond": (plan(block_copies=tuples(2, (1, 10))), "block_copies: block 10"),
    "copies: one destination": (plan(block_copies=tuples(2, (1, 5), (2, 5))), "destination named twice"),
    "copies: chained": (plan(block_copies=tuples(2, (1, 5), (5, 6))), "block 5 is both a source and a dest"),
    "rows: empty slot": (plan(row_counts=tuples(2, (2, 1))), "row_counts: slot 2 is empty"),
    "rows: retired slot": (
        plan(retired_slots=ints(0), row_counts=tuples(2, (0, 1))),
        "row_counts: slot 0 is empty",
    ),
    "rows: twice": (plan(row_counts=tuples(2, (0, 1), (0, 1))), "named twice"),
    "rows: negative": (plan(row_counts=tuples(2, (0, -1))), "slot 0: -1 tokens per step"),
    "rows: unknown tokens": (plan(row_counts=tuples(2, (0, 2))), "2 tokens to compute after 6, but only 7"),
    "rows: ended": (plan(row_counts=tuples(2, (1, 2))), "slot 1: has ended"),
    "rows: huge": (plan(row_counts=tuples(2, (0, 2**31 - 1))), "tokens in one step, more than 12"),
    "rows: budget": (
        plan(admissions=(admission(num_tokens=12, blocks=(5, 6, 7)),), row_counts=tuples(2, (2, 12))),
        "14 tokens in one step, more than 12",
    ),
    "rows: table too short": (
        plan(admissions=(admission(blocks=(5,)),), row_counts=tuples(2, (2, 5))),
        "slot 2: a block table of 1 is too short for 5 tokens",
    ),
    "rows: prefix without blocks": (
        plan(admissions=(admission(computed=4, blocks=()),), row_counts=tuples(2, (2, 1))),
        "a block table of 0 is too short",
    ),
    "fork: empty parent": (plan(forks=(Fork(2, 3, 0),)), "fork of slot 2: the slot is empty"),
    "fork: parent out of range": (plan(forks=(Fork(4, 3, 0),)), "there are 4 slots"),
    "fork: child out of range": (plan(forks=(Fork(0, 4, 0),)), "there are 4 slots"),
    "fork: child taken": (plan(forks=(Fork(0, 1, 0),)), "slot 1 is taken"),
    "fork: child twice": (plan(forks=(Fork(0, 2, 0), Fork(0, 2, 1))), "slot 2 is taken"),
    "fork: parent idle": (
        plan(row_counts=tuples(2, (0, 0)), forks=(Fork(0, 2, 0),)),
        "fork of slot 0: it does not sample in this step",
    ),
    "fork: parent in mid-prefill": (
        plan(admissions=(admission(),), row_counts=tuples(2, (2, 3)), forks=(Fork(2, 3, 0),)),
        "fork of slot 2: it does not sample in this step",
    ),
    "fork: seed": (plan(forks=(Fork(0, 2, -1),)), "seed -1"),
    "params: allowed": (with_params(allowed_token_ids=ints(3, 100)), "allowed_token_ids: token id 100"),
    "params: bias": (with_params(bias_token_ids=ints(-1), bias_values=floats(1)), "bias_token_ids: token id -1"),
    "params: bias twice": (
        with_params(bias_token_ids=ints(4, 4), bias_values=floats(1, 1)),
        "bias_token_ids: token id named twice",
    ),
    "params: bias without values": (with_params(bias_token_ids=ints(4)), "0 bias_values for 1 tokens"),
    "params: bias infinite": (
        with_params(bias_token_ids=ints(4), bias_values=floats(math.inf)),
        "bias_values: not all are finite",
    ),
    "params: bias NaN": (with_params(bias_token_ids=ints(4), bias_values=floats(math.nan)), "not all are finite"),
    "params: repetition 0": (with_params(repetition_penalty=0.0), "repetition_penalty 0.0"),
    "params: repetition negative": (with_params(repetition_penalty=-1.0), "repetition_penalty -1.0"),
    "params: repetition NaN": (with_params(repetition_penalty=math.nan), "repetition_penalty nan"),
    "params: frequency": (with_params(frequency_penalty=math.inf), "frequency_penalty inf"),
    "params: presence": (with_params(presence_penalty=math.nan), "presence_penalty nan"),
    "params: prompt longer than all": (with_params(num_prompt_tokens=6), "num_prompt_tokens 6 of 5 tokens"),
    "params: prompt negative": (with_params(num_prompt_tokens=-1), "num_prompt_tokens -1"),
    "params: logprobs": (with_params(num_logprobs=102), "num_logprobs 102 is not in [0, 101]"),
    "params: prompt logprobs": (with_params(num_prompt_logprobs=-1), "num_prompt_logprobs -1"),
    "params: candidates": (with_params(num_candidates=101), "num_candidates 101 is not in [0, 100]"),
    "branch: no beam": (beams((2, 0, 5)), "branches: parent slot 0 is not a beam that has reported"),
    "branch: ended": (beams((2, 1, 5)), "branches: parent slot 1 is not a beam"),
    "branch: empty parent": (beams((2, 3, 5)), "branches: parent: slot 3 is empty"),
    "branch: parent out of range": (beams((2, 4, 5)), "branches: parent: slot 4: there are 4 slots"),
    "branch: slot out of range": (beams((-1, 0, 5)), "branches: slot -1: there are 4 slots"),
    "branch: not reported": (
        beams((3, 2, 5), admissions=(admission(params=BEAM),)),
        "branches: parent slot 2 is not a beam that has reported",
    ),
    "fork: beam": (
        plan(admissions=(admission(params=BEAM),), row_counts=tuples(2, (2, 5)), forks=(Fork(2, 3, 0),)),
        "fork of slot 2: it does not sample in this step",
    ),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_a_bad_plan_is_rejected_and_changes_nothing(name, slots) -> None:
    bad, message = BAD_PLANS[name]
    before = state(slots)
    with pytest.raises(PlanRejected) as rejection:
        slots.apply(bad)
    assert message in str(rejection.value)
    for key, value in state(slots).items():
        np.testing.assert_array_equal(value, before[key], err_msg=key)


GOOD_PLANS = {
    "nothing": plan(),
    "retire and take the slot": plan(retired_slots=ints(0), admissions=(admission(0),)),
    "extend and replace a table": plan(
        table_updates=tuples(3, (0, 3, 8), (0, 1, 9), (0, 2, 7)), block_copies=tuples(2, (2, 9))
    ),
    "admission whose table comes later": plan(
        admissions=(admission(blocks=()),),
        table_updates=tuples(3, (2, 0, 5), (2, 1, 6)),
        row_counts=tuples(2, (2, 5)),
    ),
    "a full step": plan(admissions=(admission(num_tokens=10, blocks=(5, 6, 7)),), row_counts=tuples(2, (2, 10))),
    "rows of an ended slot": plan(row_counts=tuples(2, (1, 1))),
    "one source, two destinations": plan(block_copies=tuples(2, (1, 5), (1, 6))),
    "two children": plan(forks=(Fork(0, 3, 0), Fork(0, 2, (1 << 64) - 1))),
    "a fork into a retired slot": plan(retired_slots=ints(1), forks=(Fork(0, 1, 0),)),
    "a child of a prompt's last chunk": plan(
        admissions=(admission(),), row_counts=tuples(2, (2, 5)), forks=(Fork(2, 3, 0),)
    ),
    "a beam": with_params(num_candidates=100),
    "every kind of report and change": with_params(
        allowed_token_ids=ints(99, 0, 0),
        bias_token_ids=ints(7, 8),
        bias_values=floats(-1e30, 1e30),
        repetition_penalty=1e-30,
        frequency_penalty=-1e30,
        presence_penalty=1e30,
        num_prompt_tokens=5,
        num_logprobs=101,
        num_prompt_logprobs=101,
    ),
    "extreme parameters": with_params(top_k=(1 << 32) - 1, temperature=1e-30, min_p=1.0, seed=(1 << 64) - 1),
}


@pytest.mark.parametrize("name", GOOD_PLANS)
def test_a_good_plan_is_accepted(name, slots) -> None:
    slots.apply(GOOD_PLANS[name])
