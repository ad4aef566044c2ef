"""Requests carry the tenant of their caller, its salt, and the operator's defaults for it."""

from scheduler.core import Request
from scheduler.requests.generation_defaults import GenerationDefaults
from scheduler.requests.limits import ModelBounds, RequestLimits
from scheduler.requests.request_fields import RequestFields
from scheduler.requests.validation import RequestChecker


def completed(tenant: str, defaults: GenerationDefaults, **values: object) -> Request:
    fields = RequestFields({"token_ids.ids": [1, 2, 3], **values})
    bounds = ModelBounds(vocab_size=100, max_num_seqs=8, max_tokens_per_sequence=50)
    checker = RequestChecker(fields, RequestLimits(), bounds, defaults, drawn_seed=0)
    return checker.complete([1, 2, 3], bounds, tenant, request_id=1, deadline_s=None)


def test_the_operators_defaults_apply_to_requests_that_set_none() -> None:
    request = completed("a", GenerationDefaults(max_tokens=10, num_samples=2))
    assert (request.params.max_total_tokens, request.num_sequences) == (13, 2)
    request = completed(
        "a", GenerationDefaults(max_tokens=10, num_samples=2), **{"stopping.max_tokens": 20, "sampling.n": 3}
    )
    assert (request.params.max_total_tokens, request.num_sequences) == (23, 3)


def test_a_default_of_max_tokens_that_does_not_fit_is_lowered() -> None:
    assert completed("a", GenerationDefaults(max_tokens=1000)).params.max_total_tokens == 50


def test_min_tokens_beyond_the_default_raise_it() -> None:
    request = completed("a", GenerationDefaults(max_tokens=10), **{"stopping.min_tokens": 20})
    assert request.params.max_total_tokens == 23


def test_tenant_and_salt_reach_the_core() -> None:
    request = completed("a", GenerationDefaults(), cache_salt="x")
    assert (request.tenant, request.cache_salt) == ("a", b"\xffa\xffx")
