"""The core's request that a valid request becomes: parameters, seeds and defaults."""

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.v1 import generation_pb2 as pb
from scheduler.core import Admission, BeamParams, CapacityExceeded, InvalidRequest, SequenceParams, StepPlan
from scheduler.engine.plan_wire import encode_plan
from scheduler.requests.generation_defaults import GenerationDefaults
from scheduler.requests.sampling_params import SAMPLING_PARAMS
from scheduler.requests.seeds import sample_seed
from tests.support.scheduler.validator_rig import BOUNDS, V, admit, check, request


def test_request_without_parameters_has_the_defaults() -> None:
    admitted = admit(request())
    params = admitted.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.min_total_tokens, params.max_total_tokens) == (0, 64)
    assert admitted.is_open_ended
    assert not admit(request(stopping={"max_tokens": 64 - 3})).is_open_ended
    assert (params.eos_token_ids, params.stop_token_ids) == ((2,), ())
    assert (admitted.seeds, params.seed, admitted.priority, admitted.cache_salt) == ((7,), 7, 0, b"")


def test_request_overrides_the_defaults_of_the_checkpoint() -> None:
    defaults = GenerationDefaults({"temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.1})
    params = admit(request(sampling={"top_p": 0.5}), defaults).params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.6, 0.5, 50, 0.1)
    params = admit(request(sampling={"temperature": 0, "top_k": 0, "min_p": 0.0, "top_p": 1}), defaults).params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)


def test_values_at_the_bounds_are_admitted() -> None:
    params = admit(
        request(sampling={"temperature": 1e-9, "top_k": 2**32 - 1, "min_p": 1.0, "seed": 2**64 - 1, "n": 8})
    ).params
    assert (params.temperature, params.top_k, params.seed) == (0.0, 0, 2**64 - 1)
    assert admit(request(sampling={"top_k": V - 1})).params.top_k == V - 1
    neutral = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "beam_width": 0}
    admit(request(sampling=neutral, token_ids=[0, V - 1]))


def test_sampling_parameters_reach_the_core() -> None:
    params = admit(
        request(
            {
                "repetition_penalty": 1.5,
                "frequency_penalty": -2.0,
                "presence_penalty": 2,
                "logit_bias": {V - 1: -100.0, 0: 100.0},
                "allowed_token_ids": [5, 0, 5, V - 1],
            },
            output={"logprobs": 0, "prompt_logprobs": 20},
        )
    ).params
    assert (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) == (1.5, -2.0, 2.0)
    assert dict(zip(params.bias_token_ids, params.bias_values, strict=True)) == {V - 1: -100.0, 0: 100.0}
    assert params.allowed_token_ids == (5, 0, V - 1)
    assert (params.num_logprobs, params.num_prompt_logprobs) == (1, 21)


def test_absent_parameters_are_neutral() -> None:
    params = admit(request()).params
    assert (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) == (1.0, 0.0, 0.0)
    assert params.bias_token_ids == params.bias_values == params.allowed_token_ids == ()
    assert (params.num_logprobs, params.num_prompt_logprobs) == (0, 0)
    assert admit(request(), GenerationDefaults({"repetition_penalty": 1.1})).params.repetition_penalty == 1.1


def test_beam_search_is_greedy_despite_the_checkpoint() -> None:
    defaults = GenerationDefaults(
        {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.1, "repetition_penalty": 1.1}
    )
    admitted = admit(request({"beam_width": 8}), defaults)
    assert (admitted.beam, admitted.seeds) == (BeamParams(8, 1), (0,))
    params = admitted.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.0, 1.0, 0, 0.0, 0)
    assert params.repetition_penalty == 1.1
    asked = {"beam_width": 4, "n": 4, "temperature": 0, "length_penalty": -0.5, "early_stopping": True}
    assert admit(request(asked)).beam == BeamParams(4, 4, -0.5, True)
    assert admit(request({"beam_width": 0, "n": 3})).beam is None


def test_eos_ids_are_those_of_the_model_unless_ignored() -> None:
    defaults = GenerationDefaults(eos_token_ids=(2, V, 3))
    assert admit(request(), defaults).params.eos_token_ids == (2, 3)  # an executor would refuse V
    assert admit(request(stopping={"ignore_eos": True}), defaults).params.eos_token_ids == ()


def test_repeated_stops_are_dropped() -> None:
    checker = check(request(stopping={"stop": ["b", "a", "b"], "stop_token_ids": [4, 4, 3]}))
    admitted = checker.complete([1], BOUNDS, request_id=1, deadline_s=None)
    assert checker.stream_settings(admitted, frozenset()).stop == ("b", "a")
    assert admitted.params.stop_token_ids == (4, 3)


@pytest.mark.parametrize("shows_names", [False, True])
def test_special_tokens_that_end_the_text_are_nameless_beside_names(shows_names: bool) -> None:
    checker = check(request(output={"special_tokens": shows_names}))
    admitted = checker.complete([1], BOUNDS, request_id=1, deadline_s=None)
    settings = checker.stream_settings(admitted, frozenset({2}))
    assert settings.nameless_token_ids == (frozenset({2}) if shows_names else frozenset())


def test_each_sequence_has_its_own_seed() -> None:
    admitted = admit(request(sampling={"seed": 123, "n": 8}))
    assert admitted.seeds[0] == admitted.params.seed == 123
    assert admitted.seeds == tuple(sample_seed(123, i) for i in range(8))
    assert len(set(admitted.seeds)) == 8


def test_the_seed_mix_is_splitmix64() -> None:
    # The published first outputs of the generator for seed 0.
    assert [sample_seed(0, i) for i in (1, 2, 3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


@given(seed=st.integers(0, 2**64 - 1), index=st.integers(0, 255))
def test_seeds_have_64_bits(seed: int, index: int) -> None:
    assert 0 <= sample_seed(seed, index) < 2**64


NUMBERS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
)  # fmt: skip


def is_sent_as_checked(params: SequenceParams) -> bool:
    """Returns True if the plan stream, which has float32, carries the parameters unchanged."""
    plan = StepPlan(1, 1, admissions=[Admission(2, [1, 2, 3], 2, 0, [1], params)])
    sent = encode_plan(plan, lease=1).admissions[0].params
    return all(getattr(sent, name) == getattr(params, name) for name in NUMBERS)


def test_numbers_are_rounded_to_float32() -> None:
    """A double just above 0 becomes 0 in the executor, so numbers are rounded before they are checked."""
    values = {"temperature": 0.7, "top_p": 1e-45, "min_p": 1e-50, "repetition_penalty": 1.1, "frequency_penalty": 0.1}
    params = admit(request(values)).params
    assert is_sent_as_checked(params)
    assert (params.min_p, params.temperature) == (0.0, pytest.approx(0.7))
    assert params.top_p > 0
    beam = admit(request({"beam_width": 2, "length_penalty": 0.1})).beam
    assert beam is not None
    assert beam.length_penalty == pytest.approx(0.1), "the float32 that a gRPC client would have sent"
    assert beam.length_penalty != 0.1


VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.floats(0, 1) | st.text(max_size=3)
    | st.lists(st.integers(), max_size=3)
    | st.integers(0, 4) | st.dictionaries(st.integers(0, V), st.floats(), max_size=2)
)  # fmt: skip
SAMPLING = sorted(pb.SamplingParams.DESCRIPTOR.fields_by_name)


@given(
    sampling=st.dictionaries(st.sampled_from(SAMPLING), VALUES),
    stopping=st.dictionaries(
        st.sampled_from(["max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos"]), VALUES
    ),
    output=st.dictionaries(st.sampled_from(["logprobs", "prompt_logprobs"]), VALUES),
    token_ids=VALUES,
    request_id=VALUES,
)
def test_any_values_are_admitted_or_refused(
    sampling: dict[str, Any], stopping: dict[str, Any], output: dict[str, Any], token_ids: Any, request_id: Any
) -> None:
    fields = request(sampling, stopping, output, token_ids=token_ids, request_id=request_id)
    try:
        admitted = admit(fields)
    except (InvalidRequest, CapacityExceeded):
        return
    params = admitted.params
    assert 0 <= params.temperature <= 100
    assert 0 < params.top_p <= 1
    assert is_sent_as_checked(params)
    assert 0 <= params.top_k < V
    assert 1 <= len(admitted.seeds) <= 8
    assert len(admitted.prompt_token_ids) < params.max_total_tokens <= 64
    assert params.min_total_tokens <= params.max_total_tokens
    ids = (*admitted.prompt_token_ids, *params.stop_token_ids, *params.allowed_token_ids, *params.bias_token_ids)
    assert all(0 <= i < V for i in ids)
    assert all(-100 <= value <= 100 for value in params.bias_values)
    assert 0 < params.repetition_penalty <= 10
    assert 0 <= params.num_logprobs <= 21
    if admitted.beam is not None:
        assert 1 <= admitted.beam.num_returned <= admitted.beam.width <= 8
        assert (admitted.seeds, params.temperature) == ((0,), 0)


def test_sampling_params_are_fields_of_the_request_and_of_the_core() -> None:
    names = {param.name for param in SAMPLING_PARAMS}
    assert names <= set(pb.SamplingParams.DESCRIPTOR.fields_by_name)
    assert names <= {field.name for field in fields(SequenceParams)}
