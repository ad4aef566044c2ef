"""Follows what one scheduler reports to routers: its load, and the digests of the prompts that it has cached."""

from __future__ import annotations

import asyncio
import logging
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from gateway.routing.load import ReplicaLoad
from quire.errors import PermissionDeniedError, UnauthenticatedError
from quire.status import from_rpc_error
from quire.v1 import replica_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.routing.replica import ReplicaState
    from gateway.routing.replicas import Replicas

log = logging.getLogger(__name__)

RETRY_S = 0.2
REFUSED_RETRY_S = 30.0
"""Pause after a scheduler has refused the call: it does not offer it, or this gateway's key is not allowed to."""

DIGEST_BYTES = 8
_LONGEST_S = 1e6
_REFUSALS = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


@dataclass(frozen=True, slots=True)
class DigestScheme:
    """Says how a scheduler makes the digests of prompts."""

    name: str
    namespace: str
    block_size: int


class ReplicaWatch:
    """Calls Watch, again whenever it has ended, and applies the reports to `state`, which is one of `replicas`.

    is_live      reports come; otherwise the load is what was asked for once a second
    scheme       how the scheduler makes digests; None: it has not said so
    num_events   digests that were reported as published or forgotten
    num_resyncs  snapshots after the first one, because events were lost or came too fast
    """

    def __init__(
        self,
        state: ReplicaState,
        method: Any,
        arguments: dict[str, Any],
        replicas: Replicas,
        on_load: Callable[[pb.ReplicaLoad], None],
    ) -> None:
        self._state = state
        self._method = method
        self._arguments = arguments
        self._replicas = replicas
        self._on_load = on_load
        self.is_live = False
        self.scheme: DigestScheme | None = None
        self.num_events = 0
        self.num_resyncs = 0

    async def follow(self, router_id: str) -> None:
        """Runs until it is cancelled."""
        while True:
            pause_s = RETRY_S
            try:
                await self._follow_call(self._method(pb.WatchRequest(router_id=router_id), **self._arguments))
            except grpc.RpcError as rpc_error:
                error = from_rpc_error(rpc_error)
                if isinstance(error, UnauthenticatedError | PermissionDeniedError) or rpc_error.code() in _REFUSALS:
                    pause_s = REFUSED_RETRY_S
                    log.warning(
                        "scheduler %s does not tell this gateway its load and its cached prompts: %s",
                        self._state.name, error.message,
                    )  # fmt: skip
            except Exception:
                log.exception("following scheduler %s failed because of a bug", self._state.name)
            finally:
                if self.is_live:
                    self.is_live = False
                    self._state.lose_reports()
            await asyncio.sleep(pause_s)

    async def _follow_call(self, call: Any) -> None:
        num_snapshots = 0
        try:
            async for report in call:
                if not self.is_live:
                    self.is_live = True
                    self._state.reset()
                kind = report.WhichOneof("prefixes")
                if kind == "snapshot":
                    self._replace(report.snapshot)
                    num_snapshots += 1
                    self.num_resyncs += num_snapshots > 1
                elif kind == "events" and not self._apply(report.events):
                    self.num_resyncs += 1
                    return  # the next call begins with a snapshot
                self._replicas.report(self._state.name, _load(report.load), report.load.num_received)
                self._on_load(report.load)
        finally:
            call.cancel()

    def _replace(self, snapshot: pb.PrefixSnapshot) -> None:
        if snapshot.scheme:  # a scheduler that has not had an executor yet has no digests
            self.scheme = DigestScheme(snapshot.scheme, snapshot.namespace, snapshot.block_size)
        self._state.view.replace(snapshot.sequence_number, numbers(snapshot.digests))

    def _apply(self, events: pb.PrefixEvents) -> bool:
        published, forgotten = numbers(events.published), numbers(events.forgotten)
        self.num_events += len(published) + len(forgotten)
        return self._state.view.apply(events.first_sequence_number, published, forgotten)


def numbers(digests: bytes) -> tuple[int, ...]:
    """Returns digests of 8 bytes each as numbers. Bytes at the end that are no digest are left out."""
    count = len(digests) // DIGEST_BYTES
    return struct.unpack(f">{count}Q", digests[: count * DIGEST_BYTES])


def _load(load: pb.ReplicaLoad) -> ReplicaLoad:
    return ReplicaLoad(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        queued_tokens=load.queued_tokens,
        prefill_s_per_token=_plausible(load.prefill_s_per_token),
        decode_step_s=_plausible(load.decode_step_s),
    )


def _plausible(time_s: float) -> float:
    """Returns a time, or 0 for one that was not measured: costs that are not finite could not be compared."""
    return time_s if 0 <= time_s < _LONGEST_S else 0.0
