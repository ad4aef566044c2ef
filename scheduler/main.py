"""The scheduler process: starts everything, serves, drains and stops.

Exit codes: 0 drained after a signal · 1 stopped with unfinished requests, or because the engine failed · 2 bad
configuration or checkpoint · 3 an address is in use.
"""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from quire import logs
from quire.addresses import AddressInUse, AddressUnusable, is_local
from quire.descriptors import raise_descriptor_limit
from quire.garbage import collect_rarely
from quire.log_writer import put_line
from quire.settings import ConfigError
from quire.signals import EndSignals
from quire.tls import TlsError, TlsFiles
from scheduler.config import SchedulerConfig
from scheduler.core import Scheduler, StepPlan
from scheduler.engine.engine import Engine, ServerState
from scheduler.engine.executor_client import ExecutorClient
from scheduler.engine.options import EngineOptions, from_fields
from scheduler.identity.key_file import KeyFileError
from scheduler.identity.verifier import Verifier
from scheduler.live.feed import LiveFeed
from scheduler.live.page import LivePage
from scheduler.live.plan_log import PlanLog
from scheduler.requests.generation_defaults import GenerationDefaults
from scheduler.requests.intake import Intake, ServedModel
from scheduler.requests.limits import RequestLimits
from scheduler.servers.access import Access
from scheduler.servers.admin_server import AdminServer
from scheduler.servers.generation_server import GenerationServer
from scheduler.servers.grpc_server import GrpcServer
from scheduler.servers.http_server import HttpServer
from scheduler.servers.refusals import Refusals
from scheduler.servers.tokenization_server import TokenizationServer
from scheduler.telemetry.metrics import SchedulerMetrics
from scheduler.tenants.settings import Tenants, TenantsError
from scheduler.text.chat import ChatRenderer, load_template
from scheduler.text.checkpoint import Checkpoint, CheckpointError
from scheduler.text.grammars import GrammarCompiler
from scheduler.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from scheduler.identity.tokens import TokenVerifier
    from scheduler.telemetry.tracing import OtlpTracer

EXIT_DRAINED = 0
EXIT_UNFINISHED = 1
EXIT_BAD_CONFIG = 2
EXIT_ADDRESS_IN_USE = 3

GRACE_S = 5.0
"""Time that readers have to take the rest of their streams after the last request has ended."""

log = logging.getLogger(__name__)


def run(config: SchedulerConfig) -> int:
    """Serves until a signal, then drains; a second one stops it at once. Returns the exit code.

    Prints one line on standard output when it is ready for the first time: `ready grpc=… http=… model=…`. Everything
    else goes to the log, on standard error.
    """
    logs.configure("scheduler", config.log_level, config.log_format)
    raise_descriptor_limit()
    try:
        model = load_model(config)
        return asyncio.run(serve(config, model))
    except AddressInUse as error:
        return _give_up(config, error, EXIT_ADDRESS_IN_USE)
    except (ConfigError, CheckpointError, AddressUnusable, KeyFileError, TlsError, TenantsError) as error:
        return _give_up(config, error, EXIT_BAD_CONFIG)


def load_model(config: SchedulerConfig) -> ServedModel:
    """Loads the parts of a checkpoint that requests need. Raises CheckpointError."""
    checkpoint = Checkpoint.find(config.model, config.revision)
    tokenizer = Tokenizer.load(checkpoint)
    template = load_template(checkpoint)
    variables, tokens = tokenizer.special_tokens, tokenizer.control_tokens
    defaults = GenerationDefaults.load(checkpoint, tokenizer.eos_token_id)
    return ServedModel(
        tokenizer=tokenizer,
        chat=None if template is None else ChatRenderer(template, variables, tokens=tokens),
        defaults=defaults,
        grammars=GrammarCompiler(checkpoint.directory / "tokenizer.json", defaults.eos_token_ids),
    )


async def serve(config: SchedulerConfig, model: ServedModel) -> int:
    """Does what `run` does, on the main thread's event loop. Raises AddressInUse, AddressUnusable."""
    signals = EndSignals()
    async with AsyncExitStack() as cleanup:
        cleanup.callback(model.tokenizer.close)
        if model.chat is not None:
            cleanup.push_async_callback(model.chat.close)
            await model.chat.start()
        if model.grammars is not None:
            cleanup.push_async_callback(model.grammars.close)
        client = _executor_client(config)
        cleanup.push_async_callback(client.close)
        metrics = SchedulerMetrics()
        plans = PlanLog()

        def on_plan(core: Scheduler, plan: StepPlan, duration_s: float) -> None:
            metrics.planned(plan, duration_s)
            plans.planned(core, plan)

        tenants = Tenants.load(config.tenants)
        engine = Engine(client, from_fields(EngineOptions, config, tenants), on_plan)
        metrics.engine = engine
        tracer = None if config.otlp_endpoint is None else _tracer(config.otlp_endpoint)
        if tracer is not None:
            cleanup.push_async_callback(asyncio.to_thread, tracer.close)
        limits = RequestLimits(template_arguments=config.template_arguments)
        intake = Intake(engine, model, metrics, limits, max_streams=config.max_streams, tracer=tracer, tenants=tenants)
        access = _access(config, metrics)
        grpc_server = GrpcServer(
            engine,
            GenerationServer(engine, intake, config.policy, config.stalled_reader_timeout_s, access),
            TokenizationServer(intake),
            AdminServer(engine, intake),
            config.listen,
            config.admin_listen,
            access,
            config.local_listen,
            tenants.terms_of,
        )
        cleanup.push_async_callback(grpc_server.stop, 0)
        feed = LiveFeed(engine, plans, intake.client_request_id)
        reader_timeout_s = config.stalled_reader_timeout_s
        page = LivePage(feed, intake, reader_timeout_s)
        http_server = HttpServer(engine, metrics, page, config.allowed_hosts, access, reader_timeout_s)
        cleanup.push_async_callback(http_server.stop)
        await http_server.start(config.http_listen)
        await grpc_server.start()
        _shorten_pauses()
        log.info("admin: %s", grpc_server.admin_address)
        _announce(engine, grpc_server.address, http_server.address)

        running = asyncio.create_task(engine.run(), name="engine")
        cleanup.push_async_callback(_cancel, running)
        move = grpc_server.move_streams if config.move_streams else lambda: None
        exit_code = await _until_done(engine, running, signals, config.drain_timeout_s, move)
        grace_s = GRACE_S if exit_code == EXIT_DRAINED else 0
        await asyncio.gather(grpc_server.stop(grace_s), http_server.stop(grace_s))
    return exit_code


def _shorten_pauses() -> None:
    """Shortens the times for which the event loop cannot run. Called when everything that stays exists."""
    sys.setswitchinterval(0.001)  # the loop waits so long for a thread that computes; Python's default is 5 ms
    collect_rarely()


async def _until_done(
    engine: Engine,
    running: asyncio.Task[None],
    signals: EndSignals,
    drain_timeout_s: float,
    on_signal: Callable[[], None],
) -> int:
    """Waits until the engine has drained after a signal, or has to stop. Returns the exit code."""
    first = asyncio.create_task(signals.first.wait())
    await asyncio.wait({running, first}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        log.critical("the engine has failed", exc_info=None if running.cancelled() else running.exception())
        return EXIT_UNFINISHED
    log.info("draining: new requests are refused, running ones continue; a second signal stops at once")
    on_signal()
    drained = asyncio.create_task(engine.drain(is_final=True))
    second = asyncio.create_task(signals.second.wait())
    await asyncio.wait({running, drained, second}, timeout=drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if drained.done():
        return EXIT_DRAINED
    drained.cancel()
    log.warning("stopped with unfinished requests")
    return EXIT_UNFINISHED


def _announce(engine: Engine, grpc_address: str, http_address: str) -> None:
    """Prints the `ready` line once, when the engine first serves."""
    has_announced = False

    def announce(state: ServerState) -> None:
        nonlocal has_announced
        if state is ServerState.SERVING and not has_announced:
            has_announced = True
            name = engine.description.model_name
            put_line(sys.stdout, f"ready grpc={grpc_address} http={http_address} model={name}")

    log.info("listening: grpc=%s http=%s", grpc_address, http_address)
    engine.on_state_change(announce)


def _access(config: SchedulerConfig, metrics: SchedulerMetrics) -> Access:
    """Reads the keys and the certificate. Raises ConfigError, KeyFileError, TlsError."""
    tls = None
    if config.tls_certificate is not None and config.tls_key is not None:
        tls = TlsFiles(config.tls_certificate, config.tls_key, config.tls_client_ca)
    elif config.has_identity and not (is_local(config.listen) and is_local(config.http_listen)):
        log.warning("keys and prompts cross the network in clear text: give --tls-certificate and --tls-key")
    tokens = None if config.jwt_keys is None else _token_verifier(config)
    return Access(Verifier(config.api_keys, tokens), Refusals(metrics.refused_call), tls)


def _token_verifier(config: SchedulerConfig) -> "TokenVerifier":
    """Imports PyJWT only if tokens are wanted. Raises ConfigError if it is not installed, or for unusable keys."""
    try:
        from scheduler.identity.tokens import TokenSettings, TokenVerifier
    except ImportError as error:
        raise ConfigError(f"jwt_keys needs the extra `jwt`, as in pip install 'quire[jwt]': {error}") from None

    settings = TokenSettings(
        keys=config.jwt_keys or "",
        issuer=config.jwt_issuer or "",
        audience=config.jwt_audience or "",
        algorithms=config.algorithms,
        tenant_claim=config.jwt_tenant_claim,
        role_claim=config.jwt_role_claim,
    )
    try:
        return TokenVerifier(settings)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _executor_client(config: SchedulerConfig) -> ExecutorClient:
    """Raises ConfigError if the TLS files cannot be used."""
    tls = None
    if config.executor_tls_certificate and config.executor_tls_key:
        tls = TlsFiles(config.executor_tls_certificate, config.executor_tls_key, config.executor_tls_ca)
    try:
        return ExecutorClient(
            config.executor,
            holder=f"{socket.gethostname()}, process {os.getpid()}, serving {config.listen}",
            takes_over=config.takeover,
            tls=tls,
            executor_name=config.executor_name or "",
        )
    except TlsError as error:
        raise ConfigError(f"executor_tls_certificate: {error}") from None


def _tracer(endpoint: str) -> "OtlpTracer":
    """Imports OpenTelemetry only if traces are wanted. Raises ConfigError if it is not installed."""
    try:
        from scheduler.telemetry.tracing import OtlpTracer
    except ImportError as error:
        raise ConfigError(str(error)) from None

    return OtlpTracer(endpoint)


async def _cancel(task: asyncio.Task[None]) -> None:
    """Cancels a task and waits until it has ended, whatever its result."""
    task.cancel()
    await asyncio.wait({task})


def _give_up(config: SchedulerConfig, error: Exception, exit_code: int) -> int:
    logs.put_last_line("scheduler", error, config.log_format)
    return exit_code
