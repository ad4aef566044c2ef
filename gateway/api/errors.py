"""Errors in the form that OpenAI's clients expect: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.errors import (
    CapacityExceededError,
    DeadlineExceededError,
    InvalidRequestError,
    LimitExceededError,
    OtherModelError,
    PermissionDeniedError,
    QueueFullError,
    QuireError,
    UnauthenticatedError,
    UnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

INVALID = "invalid_request_error"
CONTEXT_LENGTH = "This model's maximum context length is"
"""These words of OpenAI's message make litellm raise ContextWindowExceededError; it does not look at the code."""


class ApiError(Exception):
    """A request fails with an HTTP status.

    kind           the field `type` of the error
    code           OpenAI's name for the problem; None if it has none
    param          the field of the request that has the problem
    retry_after_s  the delay before another try
    allow          the methods that the path has
    details        more about the problem, for programs; only errors of Anthropic's API have it
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = INVALID,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        allow: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.allow = allow
        self.details = details

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a response with this error."""
        if self.retry_after_s is not None:
            return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}
        if self.allow is not None:
            return {"Allow": self.allow}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


@dataclass(frozen=True, slots=True)
class _Form:
    status: int
    kind: str
    code: str | None = None


_FORMS: dict[type[QuireError], _Form] = {
    CapacityExceededError: _Form(400, INVALID, "context_length_exceeded"),
    LimitExceededError: _Form(413, INVALID),
    UnauthenticatedError: _Form(401, INVALID, "invalid_api_key"),
    PermissionDeniedError: _Form(403, "permission_error", "permission_denied"),
    UnavailableError: _Form(503, "service_unavailable_error", "service_unavailable"),
    DeadlineExceededError: _Form(504, "timeout_error", "timeout"),
}
_BUG = _Form(500, "server_error", "internal_error")


def unavailable(message: str) -> ApiError:
    """Returns the error of a request that cannot be served now, here or by a scheduler."""
    form = _FORMS[UnavailableError]
    return ApiError(message, status=form.status, kind=form.kind, code=form.code, retry_after_s=1)


def from_quire_error(error: QuireError, names: Mapping[str, str]) -> ApiError:
    """Returns the error of a request.

    names  the JSON field of each field of `quire.v1.GenerateRequest`, for messages about invalid fields
    """
    if isinstance(error, InvalidRequestError):
        return _invalid(error, names)
    if isinstance(error, QueueFullError):
        return ApiError(
            error.message,
            status=429,
            kind="rate_limit_error",
            code="rate_limit_exceeded",
            retry_after_s=error.retry_after_s,
        )
    if isinstance(error, UnavailableError | OtherModelError):  # a new request gets an answer of the other model
        return unavailable(error.message)
    form = _FORMS.get(type(error), _BUG)
    param = "messages" if form.code == "context_length_exceeded" and names.get("prompt") == "messages" else None
    message = error.message
    if form.code == "context_length_exceeded":
        message = f"{CONTEXT_LENGTH} exceeded: {message}"
    return ApiError(message, status=form.status, kind=form.kind, code=form.code, param=param)


def _invalid(error: InvalidRequestError, names: Mapping[str, str]) -> ApiError:
    if not error.violations:
        path, _, problem = error.message.partition(": ")
        if path in names:  # a field that turned out to be a problem after the request had been accepted
            return ApiError(f"{names[path]}: {problem}", param=names[path])
        return ApiError(error.message)
    problems = {_json_name(path, names): problem for path, problem in error.violations.items()}
    message = "; ".join(f"{name}: {problem}" if name else problem for name, problem in problems.items())
    return ApiError(message, param=next(iter(problems)) or None)


def _json_name(path: str, names: Mapping[str, str]) -> str:
    """Returns the JSON name of a path such as "sampling.logit_bias[7]"."""
    field, bracket, rest = path.partition("[")
    return names.get(field, field) + bracket + rest
