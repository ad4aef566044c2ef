"""The gRPC server around the device thread, with the services Executor, health and reflection."""

import asyncio
import contextlib
import faulthandler
import logging
import threading
import uuid
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_reflection.v1alpha import reflection

from executor.config import ExecutorConfig
from executor.device.device import device_is_sane, prepare_compute_thread, resolve_num_threads
from executor.device.device_thread import DeviceThread
from executor.errors import ConfigError
from executor.loading import LoadedModel
from executor.metrics import Metrics
from executor.plans import plan_wire
from executor.plans.plan_size import max_message_bytes
from executor.stream.peers import PeerCheck
from executor.stream.servicer import ExecutorServicer
from quire.addresses import UNIX, AddressInUse, at_port, private_files
from quire.executor.v1 import executor_pb2 as pb
from quire.executor.v1 import executor_pb2_grpc
from quire.health_service import HealthService
from quire.loop_heartbeat import LoopHeartbeat
from quire.signals import end_signals
from quire.tls import TlsError, TlsFiles, server_credentials

_log = logging.getLogger(__name__)

_EXECUTOR_SERVICE = pb.DESCRIPTOR.services_by_name["Executor"].full_name
_WATCH_INTERVAL_S = 1.0
_STOP_GRACE_S = 2.0
_STOP_INTERVAL_S = 0.02
_MOST_MESSAGE_BYTES = (1 << 31) - 1  # gRPC takes no larger number, and protobuf reads no larger message
_OPTIONS: list[tuple[str, Any]] = [
    # Two executors that share a port would each get some of the plans.
    ("grpc.so_reuseport", 0),
    # A scheduler needs one stream for its plans and one for each probe.
    ("grpc.max_concurrent_streams", 16),
    # A scheduler that is stopped, or vanished without closing its connection, loses its lease within ten seconds.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # gRPC waits this long for the acknowledgement of data as well; the default is a minute.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A scheduler may send keepalive pings every few seconds, with or without plans in flight.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
]


class Server:
    """Everything that serves one loaded model. Call `start`, then `wait`, then `stop`."""

    def __init__(self, config: ExecutorConfig, model: LoadedModel) -> None:
        self._config = config
        self._ended = asyncio.Event()
        self.device_lost = False
        loop = asyncio.get_running_loop()
        num_threads = resolve_num_threads(config.num_threads, config.num_local_ranks)
        self._device = DeviceThread(
            model.runner,
            prepare=lambda: prepare_compute_thread(model.device, num_threads),
            device_is_sane=lambda: device_is_sane(model.device),
            device_lost=lambda: _call_soon(loop, self._lose_device),
            idle_work=model.idle_work,
        )
        if model.group is not None:
            model.group.watch(lambda: _call_soon(loop, self._lose_device))
        self.metrics = _metrics(model, config.listen_address, self._device.busy_since_s)
        limits = model.runner.limits
        # The grammars of a plan are compiled while it waits for the device.
        expect = (lambda _: None) if model.grammars is None else model.grammars.expect
        self._servicer = ExecutorServicer(self._device, limits, _description(model), self.metrics.observe, expect)
        self._health = HealthService()
        self._heartbeat = LoopHeartbeat()
        self._server = grpc.aio.server(
            interceptors=[PeerCheck(config.scheduler_name)] if config.scheduler_name else [],
            options=[
                *_OPTIONS,
                ("grpc.max_receive_message_length", min(max_message_bytes(limits), _MOST_MESSAGE_BYTES)),
                ("grpc.max_send_message_length", -1),
            ],
        )

    async def start(self) -> str:
        """Starts to serve, and returns the address. Raises AddressInUse, AddressUnusable, ConfigError."""
        executor_pb2_grpc.add_ExecutorServicer_to_server(self._servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        services = (_EXECUTOR_SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(services, self._server)
        address = _bind(self._server, self._config)
        self.metrics.listens_on(address)
        self._heartbeat.start()
        if self._config.metrics_address:
            self.metrics.serve(self._config.metrics_address, self._heartbeat.silent_s)
        await self._server.start()
        self._set_health(is_serving=True)
        return address

    async def wait(self) -> bool:
        """Waits until `end` is called, or the device is lost or hangs, and keeps the health status up to date.

        Returns False if the device is lost or hangs.
        """
        timeout_s = self._config.step_timeout_s
        interval_s = min(_WATCH_INTERVAL_S, timeout_s / 4)
        stalled_s = 0.0
        while not self._ended.is_set():
            self._device.probe()
            is_serving = self._device.is_alive and self._device.silent_s() < timeout_s
            # Counts checks. A clock would also advance while the process or the machine is suspended.
            stalled_s = 0.0 if is_serving else stalled_s + interval_s
            self._set_health(is_serving)
            if stalled_s > timeout_s:
                self._device_hangs()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._ended.wait()
        return not self.device_lost

    def end(self) -> None:
        """Makes `wait` return."""
        self._ended.set()

    async def stop(self) -> None:
        """Ends all streams, waits for the running step, and closes the address."""
        self._set_health(is_serving=False)
        self._servicer.shut_down()
        await self._server.stop(_STOP_GRACE_S)
        self.metrics.close()
        self._heartbeat.stop()
        if not self.device_lost:
            await self._end_device()

    async def _end_device(self) -> None:
        """Waits for the running step as long as `wait` does. A daemon thread joins: the loop would wait for its own."""
        ends = threading.Thread(target=self._device.stop, name="stop", daemon=True)
        ends.start()
        left_s = 2 * self._config.step_timeout_s
        while ends.is_alive() and left_s > 0:
            await asyncio.sleep(_STOP_INTERVAL_S)
            left_s -= _STOP_INTERVAL_S
        if ends.is_alive():
            self._device_hangs()

    def _device_hangs(self) -> None:
        _log.critical("no step has ended for %g s: this executor hangs and exits", self._device.silent_s())
        self._lose_device()
        with contextlib.suppress(RuntimeError, OSError, ValueError):  # without a standard error
            faulthandler.dump_traceback()

    def _lose_device(self) -> None:
        self.device_lost = True
        self._ended.set()

    def _set_health(self, is_serving: bool) -> None:
        kind = health_pb2.HealthCheckResponse
        status = kind.SERVING if is_serving else kind.NOT_SERVING
        for service in ("", _EXECUTOR_SERVICE):
            self._health.set(service, status)


async def serve(config: ExecutorConfig, model: LoadedModel, say: Callable[[str], None]) -> bool:
    """Serves until a signal ends it. Returns False if the device was lost or hangs. Raises AddressInUse."""
    server = Server(config, model)
    loop = asyncio.get_running_loop()
    for number in end_signals():
        loop.add_signal_handler(number, server.end)
    try:
        address = await server.start()
        say(f"ready {address}")
        await server.wait()
    finally:
        await server.stop()
    return not server.device_lost


def _bind(server: grpc.aio.Server, config: ExecutorConfig) -> str:
    """Binds the server, and returns the address with its real port."""
    address = config.listen_address
    try:
        with private_files(address):
            if (credentials := _credentials(config)) is not None:
                port = server.add_secure_port(address, credentials)
            else:
                port = server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    if not port:
        raise AddressInUse(f"cannot listen on {address}: in use, or not permitted")
    if credentials is None and not address.startswith(UNIX):
        _log.warning("every user of this machine can use the executor at %s: prefer a socket file, unix:/path", address)
    return at_port(address, port)


def _credentials(config: ExecutorConfig) -> grpc.ServerCredentials | None:
    """Returns credentials that require a certificate of the scheduler's authorities; None without TLS."""
    if config.tls_certificate is None or config.tls_key is None:
        return None
    try:
        files = TlsFiles(config.tls_certificate, config.tls_key, config.tls_client_ca)
        return server_credentials(files, require_client=True)
    except TlsError as error:
        raise ConfigError(f"tls_certificate: {error}") from None


def _description(model: LoadedModel) -> pb.DescribeResponse:
    return plan_wire.description_to_message(
        model.runner.limits,
        incarnation=uuid.uuid4().hex,
        model_name=model.model_name,
        weights_digest=model.weights_digest,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        follows_grammars=model.grammars is not None,
    )


def _metrics(model: LoadedModel, address: str, busy_since_s: Callable[[], float | None]) -> Metrics:
    grammars = None if model.grammars is None else model.grammars.counts
    metrics = Metrics(model.model_name, address, grammars, busy_since_s)
    for kind, num_bytes in model.memory_bytes.items():
        metrics.set_memory(kind, num_bytes)
    for state, count in model.graphs.items():
        metrics.set_graphs(state, count)
    for phase, duration_s in model.startup_s.items():
        metrics.set_startup(phase, duration_s)
    return metrics


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    loop.call_soon_threadsafe(callback)
