"""Serves grpc.health.v1 on grpc.aio.

The servicer of grpc_health holds a lock while it writes to a client that watches. One client that accepts no message
would keep the status of its service as it is for all others, and the server from stopping.
"""

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_Response = health_pb2.HealthCheckResponse


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    """The status of each service. A client of Watch loses its call if one write takes longer than `write_timeout_s`."""

    def __init__(self, write_timeout_s: float = 120.0) -> None:
        self._write_timeout_s = write_timeout_s
        self._statuses: dict[str, Any] = {"": _Response.SERVING}
        self._changed = asyncio.Event()  # each change has a new one
        self._is_closed = False

    def set(self, service: str, status: Any) -> None:
        """Sets the status of a service. Has no effect after `close`."""
        if self._is_closed or self._statuses.get(service) == status:
            return
        self._statuses[service] = status
        self._tell()

    def close(self) -> None:
        """Sets the status of all services to NOT_SERVING for good."""
        self._statuses = dict.fromkeys(self._statuses, _Response.NOT_SERVING)
        self._is_closed = True
        self._tell()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> Any:  # noqa: N802
        """Fails with NOT_FOUND for an unknown service."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "the service is not known")
        return _Response(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:  # noqa: N802
        """Writes the status, and each that it changes to. A client that reads slowly misses some, but not the last."""
        written = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, _Response.SERVICE_UNKNOWN)
            if status != written:
                await self._write(_Response(status=status), context)
                written = status
            await changed.wait()

    async def _write(self, response: Any, context: Any) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await context.write(response)
        except TimeoutError:
            why = f"the client accepted no message for {self._write_timeout_s} s"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
