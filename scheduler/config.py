"""The scheduler's configuration: one frozen value, which is complete when the process starts.

Each setting is declared here, with its help text and its default. `quire.cli.config_flags` makes the flags from this
declaration, and `scheduler.engine.options` copies the values that the engine and the core use by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from quire import logs
from quire.addresses import FILE, UNIX, is_address, is_local, private_socket
from quire.settings import ConfigError, check_address, check_choice, check_keys, check_types, is_url, names
from scheduler.core import BATCHING, KV_ALLOCATIONS, POLICIES
from scheduler.core.timing.step_budget import MAX_PROMPT_TIME

SIGNATURE_ALGORITHMS = frozenset(
    {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"}
)
"""Algorithms of tokens. Those with a shared secret are left out: a server that can check one could also sign it."""

MIN_TARGET_MS = 1.0
"""Smallest target for a step. Below it, steps would hardly take more than one prompt token."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The settings of one scheduler process:

    model                      local directory, or hub id, with tokenizer.json; default: the embedded checkpoint
    revision                   branch, tag or commit of the hub id, as for the executor; None: the default branch
    listen                     address of the gRPC server: host:port, or unix:path. Port 0: any free one
    http_listen                host:port of metrics, readiness, and the live page
    http_allowed_hosts         names, separated by commas, under which browsers may request the live page in addition to
                               that of `http_listen`, localhost and addresses; for a reverse proxy. "*": any. Under
                               `quire serve`, those of its gateway too
    admin_listen               address of the admin service: host:port, or unix:path. Default: a Unix socket for this
                               user only, which `quire kv` and `quire drain` find by the port of `listen`
    local_listen               unix:path of a further gRPC server, for a gateway of this user on this machine. It needs
                               neither a key nor TLS; its clients need what they need elsewhere; None: no such address
    api_keys                   file of keys (`quire keys`), which callers have to send; changes take effect within a
                               second
    jwt_keys                   file or https URL of the JWKS whose signatures on tokens count. Needs the extra `jwt`
    jwt_issuer                 issuer of the tokens (`iss`)
    jwt_audience               audience of the tokens (`aud`)
    jwt_algorithms             allowed signature algorithms, separated by commas
    jwt_tenant_claim           claim of the tokens that holds the tenant
    jwt_role_claim             claim of the tokens that holds a role, or a list of them: generate, observe, admin
    allow_anonymous            listen at addresses that are not loopback also without keys and tokens: a proxy or a
                               network must keep strangers away. Every caller may then generate and observe
    tls_certificate            PEM file of the certificate of all TCP addresses. It is read again when it changes
    tls_key                    PEM file of its private key
    tls_client_ca              PEM file of authorities. Clients then need a certificate signed by them, which can stand
                               for an identity (`quire keys add`)
    executor                   address of the executor: unix:path, host:port, or file:path of a file with the address,
                               which is read each time that the scheduler connects. Default: the executor's default, a
                               socket file in the user's private directory
    executor_tls_ca            PEM file with the authorities that sign the executor's certificate; None: no TLS. The
                               four settings of TLS belong together
    executor_tls_certificate   PEM file with the certificate that this scheduler shows the executor
    executor_tls_key           PEM file with its private key
    executor_name              subject alternative name that the executor's certificate must have
    takeover                   take the executor from the scheduler that holds it, once, at the start
    tenants                    file of tenants in TOML, read at start: weight, priority, caps and defaults of each;
                               None: all tenants are equal
    chat_template_arguments    variables that clients may give the chat template, separated by commas
    policy                     order of the queue: "fcfs", "priority"
    batching                   "continuous"; for measurement only: "static", "dynamic"
    batch_timeout_s            maximum wait for a full batch, under dynamic batching
    memory                     "paged"; for measurement only: "contiguous", "contiguous-power-of-two",
                               "contiguous-exact"
    max_num_seqs               sequences that run at once; None: as many as the executor has slots
    max_num_batched_tokens     tokens of one step; None: the executor's
    target_inter_token_latency_ms  time that a step with decodes should take at most: it bounds the prompt tokens of the
                               step, by what steps have cost; others take ten times as long at most; None: 100 on a CPU,
                               25 on a GPU
    max_in_flight              plans sent and not yet answered; 2 hides the round trip
    max_waiting_requests       bound of the queue, in requests
    max_waiting_prompt_tokens  bound of the queue, in prompt tokens
    enable_prefix_caching      keep and find the KV of earlier prompts
    max_streams                streams open at once, including those of slow readers; more are refused
    stalled_reader_timeout_s   a reader that accepts nothing for this time loses its stream
    step_timeout_s             an executor that returns no result for this time, or answers no probe while idle, is
                               disconnected; must be longer than the longest step
    drain_timeout_s            time that running requests get to end after SIGTERM
    move_streams               after SIGTERM, ask gateways to continue their streams at other schedulers at once
    log_level                  "debug", "info", "warning", "error"
    log_format                 "console": for people; "json": one JSON object on each line
    otlp_endpoint              collector of traces, as http://127.0.0.1:4318; None: no traces. Needs the extra `otel`
    """

    model: str
    revision: str | None = None
    listen: str = "127.0.0.1:50051"
    http_listen: str = "127.0.0.1:8080"
    http_allowed_hosts: str = ""
    admin_listen: str | None = None
    local_listen: str | None = None
    api_keys: str | None = None
    jwt_keys: str | None = None
    jwt_issuer: str | None = None
    jwt_audience: str | None = None
    jwt_algorithms: str = "RS256,ES256"
    jwt_tenant_claim: str = "tenant"
    jwt_role_claim: str = "role"
    allow_anonymous: bool = False
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    executor: str = field(default_factory=partial(private_socket, "executor"))
    executor_tls_ca: str | None = None
    executor_tls_certificate: str | None = None
    executor_tls_key: str | None = None
    executor_name: str | None = None
    takeover: bool = False
    tenants: str | None = None
    chat_template_arguments: str = "add_generation_prompt,enable_thinking,reasoning_effort,thinking"
    policy: str = "fcfs"
    batching: str = "continuous"
    batch_timeout_s: float = 0.05
    memory: str = "paged"
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    target_inter_token_latency_ms: float | None = None
    max_in_flight: int = 2
    max_waiting_requests: int = 4096
    max_waiting_prompt_tokens: int = 4_000_000
    enable_prefix_caching: bool = True
    max_streams: int = 8192
    stalled_reader_timeout_s: float = 120.0
    step_timeout_s: float = 60.0
    drain_timeout_s: float = 600.0
    move_streams: bool = False
    log_level: str = "info"
    log_format: str = "console"
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        """Checks every field. Raises ConfigError."""
        check_types(self)
        if not self.model:
            raise ConfigError("model must be given")
        check_choice("policy", self.policy, POLICIES)
        check_choice("batching", self.batching, BATCHING)
        check_choice("memory", self.memory, KV_ALLOCATIONS)
        check_choice("log_level", self.log_level, logs.LEVELS)
        check_choice("log_format", self.log_format, logs.FORMATS)
        if self.otlp_endpoint is not None and not is_url(self.otlp_endpoint):
            raise ConfigError(f"otlp_endpoint must be http://host:port or https://…, not {self.otlp_endpoint!r}")
        check_address("listen", self.listen, "host:port or unix:path")
        check_address("http_listen", self.http_listen, "host:port")
        if self.admin_listen is not None:
            check_address("admin_listen", self.admin_listen, "host:port or unix:path")
        if self.local_listen is not None and not (self.local_listen.startswith(UNIX) and is_address(self.local_listen)):
            raise ConfigError(f"local_listen must be unix:path, not {self.local_listen!r}")
        if not self.executor.startswith(FILE):
            check_address("executor", self.executor, "host:port, unix:path or file:path")
        self._check_target()
        self._check_identity()
        self._check_strangers()
        tls = {name: getattr(self, name) for name in _EXECUTOR_TLS}
        if any(tls.values()) and not all(tls.values()):
            missing = next(name for name, value in tls.items() if not value)
            raise ConfigError(f"{missing} must be given too: {', '.join(_EXECUTOR_TLS)} belong together")

    def _check_target(self) -> None:
        """Raises ConfigError if no step could keep to the target, or if steps could take longer than step_timeout_s."""
        target_ms, most_ms = self.target_inter_token_latency_ms, 1e3 * self.step_timeout_s / MAX_PROMPT_TIME
        if target_ms is not None and not MIN_TARGET_MS <= target_ms <= most_ms:
            raise ConfigError(
                f"target_inter_token_latency_ms must be from {MIN_TARGET_MS:g} to {most_ms:g}, not {target_ms:g}: a "
                f"step without decodes takes up to {MAX_PROMPT_TIME:g} targets, and must end within step_timeout_s"
            )

    def _check_identity(self) -> None:
        """Raises ConfigError if settings of TLS or of tokens do not fit together."""
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("tls_certificate and tls_key must be given together")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ConfigError("tls_client_ca needs tls_certificate and tls_key")
        if self.jwt_keys is not None and (self.jwt_issuer is None or self.jwt_audience is None):
            raise ConfigError("jwt_keys needs jwt_issuer and jwt_audience: tokens for other services must not count")
        if self.jwt_keys is not None and self.jwt_keys.startswith("http:"):
            raise ConfigError(
                "jwt_keys must be a file or an https URL: anyone who can change the answer can make tokens"
            )
        if not self.algorithms or set(self.algorithms) - SIGNATURE_ALGORITHMS:
            expected = ", ".join(sorted(SIGNATURE_ALGORITHMS))
            raise ConfigError(f"jwt_algorithms must be some of {expected}, not {self.jwt_algorithms!r}")

    def _check_strangers(self) -> None:
        """Raises ConfigError if others than this machine could call without an identity."""
        if self.has_identity:
            return
        for name in ("listen", "http_listen", "admin_listen"):
            address = getattr(self, name)
            if address is None or is_local(address) or (self.allow_anonymous and name != "admin_listen"):
                continue
            raise ConfigError(
                f"{name} {address} can be reached from other machines, and everyone could call: create a key with "
                "`quire keys add` and give its file as --api-keys, or configure --jwt-keys"
                + ("" if name == "admin_listen" else "; or listen on loopback")
            )

    @property
    def has_identity(self) -> bool:
        """True if callers have to send a key, a token or a certificate."""
        return self.api_keys is not None or self.jwt_keys is not None

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The names in `jwt_algorithms`."""
        return tuple(names(self.jwt_algorithms))

    @property
    def template_arguments(self) -> frozenset[str]:
        """The names in `chat_template_arguments`."""
        return frozenset(names(self.chat_template_arguments))

    @property
    def allowed_hosts(self) -> list[str]:
        """The names in `http_allowed_hosts`."""
        return names(self.http_allowed_hosts)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SchedulerConfig":
        """Makes a configuration from plain values. Raises ConfigError for unknown keys and for bad values."""
        check_keys(values, cls)
        if "model" not in values:
            raise ConfigError("model must be given")
        return cls(**values)


_EXECUTOR_TLS = ("executor_tls_ca", "executor_tls_certificate", "executor_tls_key", "executor_name")
