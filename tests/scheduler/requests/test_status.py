"""Errors become statuses with details for clients, which fit into a trailer."""

import base64
import math
from urllib.parse import quote

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, QuotaFailure, RetryInfo
from google.rpc.status_pb2 import Status

from quire.errors import QueueFullError
from quire.status import from_status
from quire.status_details import TRAILER
from scheduler import core
from scheduler.core import (
    CapacityExceeded,
    InvalidRequest,
    InvariantViolation,
    QueueFull,
    TenantLimitReached,
)
from scheduler.requests import status
from scheduler.requests.status import code_of, status_of


def details_of(error: Exception) -> Status:
    found = status_of(error)
    ((key, value),) = found.trailers
    assert key == TRAILER
    details = Status.FromString(value)
    assert details.code == found.code.value[0]
    assert details.message == found.message
    return details


def test_invalid_request_has_field_violations() -> None:
    details = details_of(InvalidRequest({"sampling.n": "too many", "prompt": "missing"}))
    bad_request = BadRequest()
    assert details.details[0].Unpack(bad_request)
    assert [(v.field, v.description) for v in bad_request.field_violations] == [
        ("sampling.n", "too many"),
        ("prompt", "missing"),
    ]


def test_full_queue_has_retry_info() -> None:
    retry = RetryInfo()
    assert details_of(QueueFull("full", retry_after_s=2.5)).details[0].Unpack(retry)
    assert retry.retry_delay.ToTimedelta().total_seconds() == 2.5


@pytest.mark.parametrize("retry_after_s", [1e6, 1e20, math.inf])
def test_no_client_is_told_to_try_again_after_more_than_a_day(retry_after_s: float) -> None:
    retry = RetryInfo()
    assert details_of(QueueFull("full", retry_after_s)).details[0].Unpack(retry)
    assert retry.retry_delay.ToTimedelta().total_seconds() == 86_400.0


def test_size_of_trailers_is_bounded() -> None:
    many = {f"field[{i}]": "é" * 500 for i in range(1000)}
    found = status_of(InvalidRequest(many))
    assert len(base64.b64encode(found.trailers[0][1])) + len(quote(found.message)) < 8000
    bad_request = BadRequest()
    details_of(InvalidRequest(many)).details[0].Unpack(bad_request)
    assert len(bad_request.field_violations) >= 3


def test_codes_of_errors() -> None:
    assert code_of(CapacityExceeded("")) is grpc.StatusCode.OUT_OF_RANGE
    assert code_of(ValueError("")) is grpc.StatusCode.INTERNAL


def test_every_core_error_that_clients_can_get_has_a_code() -> None:
    """Clients never get ExecutorLost: the engine connects again while they wait."""
    for name in core.__all__:
        error = getattr(core, name)
        if isinstance(error, type) and issubclass(error, Exception) and error is not core.QuireError:
            assert (error in status.CODES) is not issubclass(error, core.ExecutorLost), name


@pytest.mark.parametrize("error", [ValueError("prompt of another request"), InvariantViolation("request 5: secret")])
def test_messages_of_bugs_are_not_sent(error: Exception) -> None:
    found = status_of(error)
    assert found.message == "internal error; see the server's log"
    assert found.trailers == ()


def test_a_limit_of_a_tenant_has_a_quota_failure() -> None:
    details = details_of(TenantLimitReached("more than 5 requests a minute", retry_after_s=2.5))
    retry, quota = RetryInfo(), QuotaFailure()
    assert details.details[0].Unpack(retry)
    assert details.details[1].Unpack(quota)
    assert [(v.subject, v.description) for v in quota.violations] == [("tenant", "more than 5 requests a minute")]


@pytest.mark.parametrize(("error", "is_of_tenant"), [(QueueFull("full"), False), (TenantLimitReached("full"), True)])
def test_clients_tell_a_full_queue_from_a_limit_of_their_tenant(error: QueueFull, is_of_tenant: bool) -> None:
    found = status_of(error)
    known = from_status(found.code, found.message, found.trailers)
    assert isinstance(known, QueueFullError)
    assert (known.retry_after_s, known.is_of_tenant) == (1.0, is_of_tenant)
