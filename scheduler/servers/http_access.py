"""Decides about each HTTP request before its body is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from quire.http.static_files import HEADERS
from quire.tls import certificate_names
from scheduler.identity.identity import CALLER, PERMISSION_DENIED, UNAUTHENTICATED, UNAVAILABLE, Unauthenticated
from scheduler.identity.permissions import OPEN, ROUTES

if TYPE_CHECKING:
    from scheduler.identity.identity import Identity
    from scheduler.servers.access import Access

CHALLENGE = 'Basic realm="quire: any name, and a key as the password", charset="UTF-8", Bearer realm="quire"'
"""Browsers ask for a name and a password, and send them with each request of the page, also those of its scripts."""


async def refusal(request: web.Request, access: Access) -> web.Response | None:
    """Returns the response to a request that its caller may not make; None if it may, or if the route is missing.

    A missing route is answered like any other to callers without an identity, so that they learn no paths.
    """
    route = request.match_info.route
    method = "GET" if request.method == "HEAD" else request.method
    allowed = None if route.resource is None else ROUTES.get((method, route.resource.canonical))
    if allowed is OPEN:
        return None
    try:
        identity = await _identity(request, access)
    except Unauthenticated as error:
        return _refused(request, access, error.reason, str(error))
    if route.resource is not None and (allowed is None or not identity.may(allowed)):
        return _refused(request, access, PERMISSION_DENIED, f"{identity.name} may not make this request")
    CALLER.set(identity)
    return None


async def may_observe(request: web.Request, access: Access) -> bool:
    """Returns whether the caller of an open route may know more than a state. It is not refused otherwise."""
    try:
        return (await _identity(request, access)).may(ROUTES["GET", "/metrics"])
    except Unauthenticated:
        return False


async def _identity(request: web.Request, access: Access) -> Identity:
    """Raises Unauthenticated."""
    identity = await access.verifier.identify(request.headers.get("Authorization"))
    if identity is None:
        identity = access.verifier.by_certificate(_certificate_names(request)) or access.verifier.stranger
    if identity is None:
        raise Unauthenticated("the request has no credentials")
    return identity


def _certificate_names(request: web.Request) -> list[str]:
    connection = None if request.transport is None else request.transport.get_extra_info("ssl_object")
    return [] if connection is None else certificate_names(connection.getpeercert())


def _refused(request: web.Request, access: Access, reason: str, why: str) -> web.Response:
    access.refusals.refused(reason, f"{request.method} {request.path}", request.remote or "", why)
    # The same form as the errors of the prompt box, whose script shows them.
    body = {"error": {"code": reason.upper(), "message": why, "violations": []}}
    if reason == UNAUTHENTICATED:
        return web.json_response(body, status=401, headers=HEADERS | {"WWW-Authenticate": CHALLENGE})
    if reason == UNAVAILABLE:
        return web.json_response(body, status=503, headers=HEADERS | {"Retry-After": "1"})
    return web.json_response(body, status=403, headers=HEADERS)
