"""The id of the request that a task answers, under which the answer and the log name it."""

from __future__ import annotations

import uuid
from contextvars import ContextVar

_id: ContextVar[str] = ContextVar("request_id")


def new_id(prefix: str = "req_") -> str:
    """Makes the id of a request, in place of the one that it had before its endpoint was known."""
    _id.set(f"{prefix}{uuid.uuid4().hex}")
    return _id.get()


def request_id() -> str:
    """Returns the id that `new_id` has made."""
    return _id.get()


def id_headers() -> dict[str, str]:
    """Returns the id of a request as OpenAI's clients read it, and as Anthropic's do."""
    return {"X-Request-Id": _id.get(), "Request-Id": _id.get()}
