"""The runner of aiohttp that the HTTP servers of the scheduler and of the gateway share."""

import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

KEEPALIVE_S = 75.0
"""Time in which a connection has to send the header of a further request."""

_SHUTDOWN_TIMEOUT_S = 0.01
"""Time that open requests get when the grace period has ended. aiohttp takes 0 as no limit, so it cannot be 0."""


def http_runner(app: web.Application) -> web.AppRunner:
    """Returns the runner of an application whose middleware reads what is left of bodies, by `UnreadBodies`.

    Handlers of clients that disconnect are cancelled, so that nothing is computed without a reader.
    """
    logging.getLogger("aiohttp.server").addFilter(_is_no_bad_request)
    return web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=KEEPALIVE_S,
        lingering_time=0,
        shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
    )


def _is_no_bad_request(record: logging.LogRecord) -> bool:
    """Drops the errors about requests that aiohttp cannot parse: they quote bytes, which can be keys and prompts."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)
