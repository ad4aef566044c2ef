"""Decides about each gRPC call before its request is read, and writes the audit lines of admin calls."""

from __future__ import annotations

import inspect
import logging
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc.aio

from quire.log_rate import RateLimit
from quire.tls import peer_names
from scheduler.identity.identity import CALLER, Identity, Unauthenticated
from scheduler.identity.permissions import METHODS, OPEN
from scheduler.servers.access import authorization_in
from scheduler.telemetry.limits import LOG_LINES, limited

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from scheduler.servers.access import Access

    Context = grpc.aio.ServicerContext[Any, Any]
    Around = Callable[[Context], AbstractAsyncContextManager[None]]

audit_log = logging.getLogger("scheduler.audit")
audit_log.setLevel(logging.INFO)  # also where the operator wants fewer lines of other kinds
# A refused call costs its client nothing.
audit_log.addFilter(RateLimit("admin call refused", per_second=10, on_left_out=partial(limited, LOG_LINES)))

_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Lets a call through if the table in `scheduler.identity.permissions` allows it to the caller.

    default   identity of callers that send no credentials; None: they have to
    is_audit  True: each call of a known caller is logged with the caller and the result, also if it is refused.
              Calls that are open to every caller are not logged

    A gateway calls on behalf of its clients. For one that has no credentials it sends an empty header: that client's
    call has the rights of a stranger, and never those of the gateway.
    """

    def __init__(self, access: Access, default: Identity | None, *, is_audit: bool = False) -> None:
        self._access = access
        self._default = default
        self._is_audit = is_audit

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """Returns the handler of the call, or one that refuses it. A refused call's request is not read."""
        method: str = details.method
        allowed = METHODS.get(method)
        if allowed is OPEN:
            return await continuation(details)
        authorization = authorization_in(details.invocation_metadata)
        is_for_stranger = authorization == ""
        try:
            identity = await self._access.verifier.identify(authorization or None)
        except Unauthenticated as error:
            return self._refusal(grpc.StatusCode[error.reason.upper()], method, str(error), None)
        identity = identity or (self._access.verifier.stranger if is_for_stranger else self._default)
        if identity is None and (is_for_stranger or not self._access.requires_client_certificate):
            return self._refusal(grpc.StatusCode.UNAUTHENTICATED, method, "the call has no credentials", None)
        handler = await continuation(details)
        if handler is None:  # the method does not exist
            return None
        if self._is_audit:
            handler = _around(handler, lambda context: _audited(method, context))
        if identity is None:
            return _around(handler, lambda context: self._with_certificate(method, context))
        if allowed is None or not identity.may(allowed):
            return self._refusal(grpc.StatusCode.PERMISSION_DENIED, method, _not_allowed(identity), identity)
        CALLER.set(identity)
        return handler

    def _refusal(self, code: grpc.StatusCode, method: str, why: str, caller: Identity | None) -> Any:
        async def refuse(_: object, context: Context) -> None:
            await self._refuse(code, method, why, caller, context)

        # A handler of a stream is called before the first message has arrived. Clients cannot tell the difference.
        return grpc.stream_stream_rpc_method_handler(refuse)

    async def _refuse(
        self, code: grpc.StatusCode, method: str, why: str, caller: Identity | None, context: Context
    ) -> None:
        if self._is_audit and caller is not None:
            _audit("admin call refused", caller, method, code.name, context)
        self._access.refusals.refused(code.name.lower(), method, context.peer(), why)
        await context.abort(code, why)

    @asynccontextmanager
    async def _with_certificate(self, method: str, context: Context) -> AsyncIterator[None]:
        """Checks a caller that sent no credentials but a certificate, which gRPC shows to the handler only."""
        identity = self._access.verifier.by_certificate(peer_names(context.auth_context()))
        allowed = METHODS.get(method)
        if identity is None:
            why = "the call has no credentials, and the certificate is not in the key file"
            await self._refuse(grpc.StatusCode.UNAUTHENTICATED, method, why, None, context)
        elif allowed is None or not identity.may(allowed):
            await self._refuse(grpc.StatusCode.PERMISSION_DENIED, method, _not_allowed(identity), identity, context)
        else:
            CALLER.set(identity)
        yield


@asynccontextmanager
async def _audited(method: str, context: Context) -> AsyncIterator[None]:
    """Logs the call when it has ended: one line with caller, method and status."""
    caller = CALLER.get()
    result = "CANCELLED"  # of a call whose client has disconnected
    try:
        yield
        result = "OK"
    except grpc.aio.AbortError:
        result = _code_name(context.code())
        raise
    except Exception:
        result = "UNKNOWN"
        raise
    finally:
        _audit("admin call", caller, method, result, context)


def _audit(message: str, caller: Identity, method: str, result: str, context: Context) -> None:
    fields = {"tenant": caller.tenant, "caller": caller.name, "call": method.rpartition("/")[2]}
    audit_log.info(message, extra=fields | {"result": result, "client": context.peer()})


def _code_name(code: Any) -> str:
    """Returns the name of a status, which grpc.aio gives as a number or as a StatusCode."""
    return next((each.name for each in grpc.StatusCode if code in (each, each.value[0])), str(code))


def _not_allowed(identity: Identity) -> str:
    roles = ", ".join(sorted(role.value for role in identity.roles))
    return f"{identity.name} ({roles}) may not make this call"


def _around(handler: Any, around: Around) -> Any:
    """Returns a handler that does the same inside `around`."""
    kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
    behaviour = getattr(handler, kind)

    async def call(request: Any, context: Context) -> Any:
        async with around(context):
            return await behaviour(request, context)

    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        async with around(context):
            async for response in behaviour(request, context):
                yield response

    return handler._replace(**{kind: stream if inspect.isasyncgenfunction(behaviour) else call})
