"""Tests that plans and results carry everything that sampling, beams and log-probabilities need."""

from array import array

import pytest

from quire.executor.v1 import executor_pb2 as pb
from scheduler.core import Admission, FinishReason, ResultMismatch, SequenceParams, StepPlan
from scheduler.engine.plan_wire import decode_result, encode_plan, pack, pack_floats, unpack

PARAMS = SequenceParams(
    max_total_tokens=30,
    allowed_token_ids=(4, 5),
    bias_token_ids=(7, 8),
    bias_values=(-1.5, 100.0),
    repetition_penalty=1.25,
    frequency_penalty=0.5,
    presence_penalty=-0.5,
    num_logprobs=3,
    num_prompt_logprobs=2,
    num_candidates=8,
    grammar='{"grammars": []}',
)


def test_an_admission_carries_every_parameter() -> None:
    (admission,) = encode_plan(
        StepPlan(1, 1, admissions=[Admission(2, [1, 2, 3], 2, 0, [1], PARAMS)]), lease=7
    ).admissions
    params = admission.params
    assert params.num_prompt_tokens == 2
    assert (unpack(params.allowed_token_ids), unpack(params.bias_token_ids)) == ([4, 5], [7, 8])
    assert array("f", params.bias_values).tolist() == [-1.5, 100.0]
    assert (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) == (1.25, 0.5, -0.5)
    assert params.grammar == '{"grammars": []}'
    assert (params.num_logprobs, params.num_prompt_logprobs, params.num_candidates) == (3, 2, 8)


def test_branches_are_packed() -> None:
    assert unpack(encode_plan(StepPlan(1, 1, branches=[0, 1, 7, 1, 1, 8]), lease=7).branches) == [0, 1, 7, 1, 1, 8]


def test_published_and_withdrawn_blocks_are_packed() -> None:
    message = encode_plan(StepPlan(1, 1, published={4: b"a" * 32, 2: b"b" * 32}, withdrawn_blocks=[7]), lease=7)
    assert (unpack(message.published_blocks), message.published_digests) == ([4, 2], b"a" * 32 + b"b" * 32)
    assert unpack(message.withdrawn_blocks) == [7]
    assert not encode_plan(StepPlan(1, 1), lease=7).published_digests


def test_log_probabilities_are_arrays_or_absent() -> None:
    candidates = pb.Logprobs(token_ids=pack([5, 6]), values=pack_floats([-0.5, float("-inf")]))
    result = decode_result(pb.StepResult(epoch=1, step_id=1, candidates=candidates), epoch=1)
    assert (result.logprobs, result.prompt_logprobs) == (None, None)
    assert result.candidates is not None
    assert (list(result.candidates.token_ids), list(result.candidates.values)) == ([5, 6], [-0.5, float("-inf")])
    logprobs = pb.Logprobs(token_ids=pack([5]), values=pack_floats([-0.5]), ranks=pack([9]))
    decoded = decode_result(pb.StepResult(epoch=1, step_id=1, logprobs=logprobs), epoch=1).logprobs
    assert decoded is not None
    assert list(decoded.ranks) == [9]


def test_deferred_sequences_are_told_from_ended_ones() -> None:
    message = pb.StepResult(epoch=1, step_id=1, token_ids=pack([5, 0, 0]), end_reasons=bytes([1, 6, 0]))
    result = decode_result(message, epoch=1)
    assert result.end_reasons == [FinishReason.EOS, None, None]
    assert result.deferred == [1]


@pytest.mark.parametrize("part", ["token_ids", "values", "ranks"])
def test_log_probabilities_with_half_a_number_are_refused(part: str) -> None:
    with pytest.raises(ResultMismatch, match=rf"logprobs\.{part}"):
        decode_result(pb.StepResult(logprobs=pb.Logprobs(**{part: b"\0\0\0"})), epoch=1)
