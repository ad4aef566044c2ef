"""The codec between plans and messages."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.errors import PlanRejected
from executor.plans.plan import Admission, Fork, Logprobs, Reports, SequenceParams, StepOutput, StepPlan, StepTimings
from executor.plans.plan_wire import output_to_message, plan_from_message
from quire.executor.v1 import executor_pb2 as pb
from tests.support.executor.messages import plan_message

int32s = st.integers(-(2**31), 2**31 - 1)
uint32s = st.integers(0, 2**32 - 1)
uint64s = st.integers(0, 2**64 - 1)
floats = st.floats(width=32, allow_nan=False)


def arrays(width: int = 0) -> st.SearchStrategy[np.ndarray]:
    if not width:
        return st.lists(int32s, max_size=5).map(lambda values: np.array(values, dtype=np.int32))
    rows = st.lists(st.tuples(*[int32s] * width), max_size=4)
    return rows.map(lambda values: np.array(values, dtype=np.int32).reshape(-1, width))


float_arrays = st.lists(floats, max_size=5).map(lambda values: np.array(values, dtype=np.float32))
params = st.builds(
    SequenceParams,
    uint32s,
    uint32s,
    floats,
    uint32s,
    floats,
    floats,
    uint64s,
    arrays(),
    arrays(),
    arrays(),
    arrays(),
    float_arrays,
    floats.filter(bool),
    floats,
    floats,
    uint32s,
    uint32s,
    uint32s,
    uint32s,
    st.text(max_size=5),
)
admissions = st.builds(Admission, uint32s, arrays(), uint32s, arrays(), params)
plans = st.builds(
    StepPlan,
    uint64s,
    uint64s,
    arrays(),
    st.lists(admissions, max_size=3).map(tuple),
    arrays(3),
    arrays(2),
    arrays(2),
    st.lists(st.builds(Fork, uint32s, uint32s, uint64s), max_size=3).map(tuple),
    arrays(3),
)


@given(plans)
def test_plans_are_decoded_as_they_were_encoded(plan: StepPlan) -> None:
    sent = pb.StepPlan.FromString(plan_message(plan).SerializeToString())
    assert_equal(plan_from_message(sent), plan)


def assert_equal(found: object, expected: object) -> None:
    if dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_equal(getattr(found, field.name), getattr(expected, field.name))
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (pb.StepPlan(retired_slots=b"\0\0\0"), "retired_slots: 3 bytes"),
        (pb.StepPlan(table_updates=b"\0" * 16), "table_updates: 4 integers are not a whole number of 3-tuples"),
        (pb.StepPlan(block_copies=b"\0" * 4), "block_copies: 1 integers"),
        (pb.StepPlan(row_counts=b"\0" * 12), "row_counts: 3 integers"),
        (pb.StepPlan(admissions=[pb.Admission(token_ids=b"\0")]), "admissions.token_ids: 1 bytes"),
        (pb.StepPlan(branches=b"\0" * 8), "branches: 2 integers"),
        (
            pb.StepPlan(admissions=[pb.Admission(params=pb.SequenceParams(bias_values=b"\0" * 5))]),
            "params.bias_values: 5 bytes are not a whole number of float32",
        ),
    ],
)
def test_truncated_integers_are_rejected(message, complaint) -> None:
    with pytest.raises(PlanRejected, match=complaint):
        plan_from_message(message)


def test_results_are_encoded() -> None:
    output = StepOutput(
        epoch=3,
        step_id=4,
        token_ids=np.array([7, 70000], dtype=np.int32),
        end_reasons=np.array([0, 0], dtype=np.uint8),
        timings=StepTimings(prepare_ns=1, forward_ns=2, sample_ns=3, queue_ns=4, idle_ns=5, prepare_overlaps=True),
    )
    message = output_to_message(output)
    assert (message.epoch, message.step_id) == (3, 4)
    assert message.token_ids == bytes.fromhex("0700000070110100")
    assert message.end_reasons == b"", "absent if all continue"
    timings = message.timings
    assert [timings.prepare_ns, timings.forward_ns, timings.sample_ns] == [1, 2, 3]
    assert [timings.queue_ns, timings.idle_ns, timings.prepare_overlaps] == [4, 5, True]
    ended = dataclasses.replace(output, end_reasons=np.array([0, 2], dtype=np.uint8))
    assert output_to_message(ended).end_reasons == b"\0\2"


def test_an_absent_repetition_penalty_decodes_as_none() -> None:
    plan = plan_from_message(pb.StepPlan(admissions=[pb.Admission()]))
    assert plan.admissions[0].params.repetition_penalty == 1.0
    assert not plan.admissions[0].params.has_penalties


def test_reports_are_encoded() -> None:
    def logprobs(first: int, ranks: list[int] | None) -> Logprobs:
        ids = np.arange(first, first + 3, dtype=np.int32)
        return Logprobs(ids, -0.5 * ids.astype(np.float32), ranks and np.array(ranks, dtype=np.int32))

    reports = Reports(logprobs(1, [2, 1, 2]), logprobs(70000, [7, 1, 2]), logprobs(9, None))
    nothing = np.empty(0, dtype=np.int32)
    output = StepOutput(1, 2, nothing, nothing.astype(np.uint8), StepTimings(1, 2, 3), reports)
    message = pb.StepResult.FromString(output_to_message(output).SerializeToString())
    for field in ("logprobs", "prompt_logprobs", "candidates"):
        sent, expected = getattr(message, field), getattr(reports, field)
        assert np.frombuffer(sent.token_ids, "<i4").tolist() == expected.token_ids.tolist()
        assert np.frombuffer(sent.values, "<f4").tolist() == expected.values.tolist()
        assert np.frombuffer(sent.ranks, "<i4").tolist() == ([] if expected.ranks is None else expected.ranks.tolist())
    plain = output_to_message(dataclasses.replace(output, reports=Reports(candidates=reports.candidates)))
    assert not plain.HasField("logprobs")
    assert not plain.HasField("prompt_logprobs")
    assert plain.HasField("candidates")
