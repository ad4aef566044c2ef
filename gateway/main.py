"""The gateway process: connects to the schedulers, serves, drains and stops.

Exit codes: 0 drained after a signal · 1 stopped with unfinished requests · 2 bad configuration · 3 an address is in
use.
"""

import asyncio
import logging
import ssl
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from gateway.config import GatewayConfig
from gateway.http import generation
from gateway.http.server import GatewayServer
from gateway.metrics import GatewayMetrics
from gateway.schedulers.schedulers import Schedulers
from gateway.schedulers.schedulers_file import SchedulersFile
from quire import logs, tries
from quire.addresses import AddressInUse, AddressUnusable, is_local
from quire.channel import Connection
from quire.descriptors import raise_descriptor_limit
from quire.garbage import collect_rarely
from quire.log_rate import RateLimit
from quire.log_writer import put_line
from quire.settings import ConfigError
from quire.signals import EndSignals
from quire.tls import TlsError, TlsFiles, ssl_context

if TYPE_CHECKING:
    from gateway.prompts.prompts import Prompts
    from gateway.rpc.server import RpcServer

SHARE_OF_DESCRIPTORS = 0.4
"""Share of the file descriptors for the connections of the HTTP server, and of the gRPC server. The rest is for
schedulers, files and logs."""

EXIT_DRAINED = 0
EXIT_UNFINISHED = 1
EXIT_BAD_CONFIG = 2
EXIT_ADDRESS_IN_USE = 3

log = logging.getLogger(__name__)


def run(config: GatewayConfig, api_key: str | None = None) -> int:
    """Serves until a signal, then drains; a second one stops it at once. Returns the exit code.

    Prints one line on standard output when it listens: `ready openai=…`. Everything else goes to the log, on standard
    error.

    api_key  the gateway's own key, with which it calls schedulers; clients' keys are passed on beside it
    """
    logs.configure("gateway", config.log_level, config.log_format)
    # Each stream writes these lines when its scheduler dies and comes back, or does not.
    for logger, message in (
        (tries.log, tries.BROKE_OFF),
        (tries.log, tries.CONTINUES),
        (generation.log, generation.STREAM_FAILED),
    ):
        logger.addFilter(RateLimit(message, per_second=5))
    most = int(raise_descriptor_limit() * SHARE_OF_DESCRIPTORS)
    config = replace(config, max_connections=max(1, min(config.max_connections, most)))
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(serve(config, api_key))
    except AddressInUse as error:
        return _give_up(config, error, EXIT_ADDRESS_IN_USE)
    except (ConfigError, AddressUnusable, TlsError) as error:
        return _give_up(config, error, EXIT_BAD_CONFIG)


async def serve(config: GatewayConfig, api_key: str | None) -> int:
    """Does what `run` does, on the main thread's event loop. Raises ConfigError, TlsError, AddressInUse and
    AddressUnusable."""
    signals = EndSignals()
    async with AsyncExitStack() as cleanup:
        prompts = _prompts(config)
        if prompts is not None:
            cleanup.push_async_callback(prompts.close)
            await prompts.start()
        file = None if config.schedulers_file is None else _schedulers_file(config.schedulers_file)

        def connections() -> list[Connection]:
            return config.connections(api_key, None if file is None else file.addresses)

        schedulers = Schedulers(
            connections(),
            config.resume_timeout_s,
            config.routing,
            config.max_waiting,
            config.max_wait_s,
            prompts,
            can_change=file is not None,
        )
        cleanup.push_async_callback(schedulers.close)
        await schedulers.start()
        if config.must_know_callers and not await _refuse_strangers(schedulers, signals):
            if signals.first.is_set():
                return EXIT_DRAINED
            raise ConfigError(_open_to_strangers(config))
        if file is not None:
            follow = schedulers.follow(connections, must_refuse_strangers=config.must_know_callers)
            cleanup.callback(asyncio.create_task(follow, name="schedulers file").cancel)
        tls = _tls(config)
        server = GatewayServer(schedulers, config, _ssl_context(tls))
        await server.start()
        rpc = None if config.grpc_listen is None else _rpc_server(schedulers, config, server.metrics, tls)
        if rpc is not None:
            cleanup.push_async_callback(rpc.stop)
            await rpc.start()
        collect_rarely()
        log.info("listening: %s, schedulers: %s", server.address, ", ".join(each.address for each in connections()))
        put_line(sys.stdout, f"ready openai={server.address}" + (f" grpc={rpc.address}" if rpc is not None else ""))
        await signals.first.wait()
        return await _drain(server, rpc, signals, config.drain_timeout_s)


def _prompts(config: GatewayConfig) -> "Prompts | None":
    """Imports and loads the tokenizer only if choices need it. Raises ConfigError."""
    if config.model is None or config.routing != "cost" or not config.has_several:
        return None
    from gateway.prompts.prompts import Prompts
    from scheduler.text.checkpoint import CheckpointError

    try:
        return Prompts.load(config.model, config.revision, config.template_arguments)
    except CheckpointError as error:
        raise ConfigError(f"model: {error}") from None


def _schedulers_file(path: str) -> SchedulersFile:
    """Raises ConfigError if the file cannot be used."""
    try:
        return SchedulersFile(path)
    except ValueError as error:
        raise ConfigError(f"schedulers_file: {error}") from None


def _rpc_server(
    schedulers: Schedulers, config: GatewayConfig, metrics: GatewayMetrics, tls: TlsFiles | None
) -> "RpcServer":
    """Imports what only a gRPC server needs. Raises AddressInUse, AddressUnusable and TlsError."""
    from gateway.rpc.server import RpcServer

    return RpcServer(schedulers, config, metrics, tls)


async def _drain(server: GatewayServer, rpc: "RpcServer | None", signals: EndSignals, drain_timeout_s: float) -> int:
    """Stops both servers when their open requests have ended, or at a second signal. Returns the exit code."""
    log.info("draining: new requests are refused, open ones continue; a second signal stops at once")
    stopping = asyncio.create_task(_stop(server, rpc, drain_timeout_s))
    second = asyncio.create_task(signals.second.wait())
    await asyncio.wait({stopping, second}, return_when=asyncio.FIRST_COMPLETED)
    has_drained = stopping.done() and stopping.result()
    stopping.cancel()
    second.cancel()
    if has_drained:
        return EXIT_DRAINED
    log.warning("stopped with unfinished requests")
    await server.stop()
    return EXIT_UNFINISHED


async def _stop(server: GatewayServer, rpc: "RpcServer | None", drain_timeout_s: float) -> bool:
    """Stops both servers. Returns False if requests had to be cancelled."""
    stops = [server.stop(drain_timeout_s), *([rpc.stop(drain_timeout_s)] if rpc is not None else [])]
    return all(await asyncio.gather(*stops))


async def _refuse_strangers(schedulers: Schedulers, signals: EndSignals) -> bool:
    """Returns whether all schedulers refuse strangers. A signal ends the wait for one that answers."""
    log.info("listening begins when a scheduler answers, and refuses a call without a key")
    asking = asyncio.create_task(schedulers.refuse_strangers())
    stopping = asyncio.create_task(signals.first.wait())
    await asyncio.wait({asking, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    asking.cancel()
    return asking.done() and not asking.cancelled() and asking.result()


def _open_to_strangers(config: GatewayConfig) -> str:
    """Returns the problem of a gateway that strangers could call."""
    public = " and ".join(each for each in (config.listen, config.grpc_listen) if each and not is_local(each))
    return (
        f"listen {public} can be reached from other machines, and everyone could call, because a scheduler accepts "
        "calls without a key: give the schedulers --api-keys, listen on loopback, or give --allow-anonymous"
    )


def _tls(config: GatewayConfig) -> TlsFiles | None:
    if config.tls_certificate is None or config.tls_key is None:
        if not (is_local(config.listen) and is_local(config.grpc_listen or config.listen)):
            log.warning("keys and prompts cross the network in clear text: give --tls-certificate and --tls-key")
        return None
    return TlsFiles(config.tls_certificate, config.tls_key, config.tls_client_ca)


def _ssl_context(files: TlsFiles | None) -> ssl.SSLContext | None:
    """Raises TlsError."""
    return None if files is None else ssl_context(files, files.ca is not None)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Returns the event loop of uvloop where it is installed, otherwise that of asyncio."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _give_up(config: GatewayConfig, error: Exception, exit_code: int) -> int:
    logs.put_last_line("gateway", error, config.log_format)
    return exit_code
