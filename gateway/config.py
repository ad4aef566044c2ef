"""The gateway's configuration: one frozen value, which is complete when the process starts.

`quire.cli.config_flags` makes the flags from this declaration.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.routing.choice import POLICIES
from gateway.schedulers.schedulers import DEFAULT_MAX_WAIT_S, DEFAULT_MAX_WAITING, DEFAULT_POLICY
from gateway.tools.formats import FORMATS
from quire import logs
from quire.addresses import is_local
from quire.channel import DEFAULT_ADDRESS, Connection
from quire.settings import ConfigError, addresses, check_address, check_choice, check_keys, check_types, is_url, names
from quire.tls import TlsFiles
from quire.tries import DEFAULT_RESUME_TIMEOUT_S

MAX_BODY_BYTES = 3 * 2**20
"""Upper bound of max_body_bytes: a scheduler accepts messages of 4 MiB."""


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """The settings of one gateway process:

    scheduler                  address of a scheduler: host:port, or unix:path. Several serve the same model: separate
                               them by commas, or repeat the flag
    schedulers_file            file with these addresses, one on each line, instead of `scheduler`. Changes take
                               effect within a second; streams of a scheduler that is gone from the file continue
    listen                     host:port of the HTTP server. Port 0: any free one
    grpc_listen                address of a gRPC server, host:port or unix:path: clients of quire.v1 call it as
                               they call a scheduler, to generate and to tokenize; None: no such address
    routing                    choice among several schedulers: "cost": the one that is expected to answer first, by its
                               queue and by what it has cached of the prompt; "ring": by the beginning of the prompt;
                               "least-loaded"; "round-robin"
    model                      local directory, or hub id, with tokenizer.json: routing by cost then knows what each
                               scheduler has cached of a prompt; None: it chooses as "ring" does
    revision                   branch, tag or commit of the hub id; None: the default branch
    chat_template_arguments    variables that clients may give the chat template, separated by commas, as for schedulers
    allow_anonymous            listen at addresses that are not loopback also if schedulers accept calls without a key:
                               a proxy or a network must keep strangers away
    served_model_name          names of the model for clients, separated by commas; None: the one that schedulers report
    tool_format                how the model writes calls of tools: hermes, llama3, mistral, harmony or json; None: as
                               its chat template shows
    allowed_hosts              names, separated by commas, under which browsers may use the API in addition to localhost
                               and addresses; for a reverse proxy. "*": any
    live_page                  URL of a scheduler's live page, to which the chat page links; None: no link
    tls_certificate            PEM file of the certificate of the HTTP server. It is read again when it changes
    tls_key                    PEM file of its private key
    tls_client_ca              PEM file of authorities. Clients then need a certificate signed by them
    scheduler_tls              connect to schedulers with TLS
    scheduler_ca               PEM file of the authorities that sign their certificates; implies `scheduler_tls`
    scheduler_tls_certificate  PEM file with the certificate that this gateway shows schedulers
    scheduler_tls_key          PEM file with its private key
    max_body_bytes             size of a request's body, at most 3 MiB
    max_connections            connections open at once; more are closed
    max_requests               requests that generate text at once; more are refused
    max_waiting                requests that wait here while all of several schedulers have full queues; tenants take
                               turns. More are refused, except of tenants with less than an equal part of these
    max_wait_s                 time for which such a request waits before it is refused
    stalled_reader_timeout_s   a client that reads nothing for this time, while output waits for it, is dropped
    resume_timeout_s           time for which the gateway tries to continue a stream after its scheduler was lost
    drain_timeout_s            time that open requests get to end after SIGTERM
    log_level                  "debug", "info", "warning", "error"
    log_format                 "console": for people; "json": one JSON object on each line
    """

    scheduler: str = DEFAULT_ADDRESS
    schedulers_file: str | None = None
    listen: str = "127.0.0.1:8000"
    grpc_listen: str | None = None
    routing: str = DEFAULT_POLICY
    model: str | None = None
    revision: str | None = None
    chat_template_arguments: str = "add_generation_prompt,enable_thinking,reasoning_effort,thinking"
    allow_anonymous: bool = False
    served_model_name: str | None = None
    tool_format: str | None = None
    allowed_hosts: str = ""
    live_page: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    scheduler_tls: bool = False
    scheduler_ca: str | None = None
    scheduler_tls_certificate: str | None = None
    scheduler_tls_key: str | None = None
    max_body_bytes: int = 2**20
    max_connections: int = 4096
    max_requests: int = 4096
    max_waiting: int = DEFAULT_MAX_WAITING
    max_wait_s: float = DEFAULT_MAX_WAIT_S
    stalled_reader_timeout_s: float = 60.0
    resume_timeout_s: float = DEFAULT_RESUME_TIMEOUT_S
    drain_timeout_s: float = 600.0
    log_level: str = "info"
    log_format: str = "console"

    def __post_init__(self) -> None:
        """Checks every field. Raises ConfigError."""
        check_types(self)
        for name, choices in (("log_level", logs.LEVELS), ("log_format", logs.FORMATS), ("routing", POLICIES)):
            check_choice(name, getattr(self, name), choices)
        if self.tool_format is not None:
            check_choice("tool_format", self.tool_format, FORMATS)
        check_address("listen", self.listen, "host:port")
        if self.grpc_listen is not None:
            check_address("grpc_listen", self.grpc_listen, "host:port or unix:path")
        for address in self.schedulers:
            check_address("scheduler", address, "host:port or unix:path")
        if not self.schedulers or len(set(self.schedulers)) < len(self.schedulers):
            raise ConfigError("scheduler must be different addresses, at least one")
        if self.schedulers_file is not None and self.scheduler != DEFAULT_ADDRESS:
            raise ConfigError("scheduler and schedulers_file cannot be given together")
        for first, second in (("tls_certificate", "tls_key"), ("scheduler_tls_certificate", "scheduler_tls_key")):
            if (getattr(self, first) is None) != (getattr(self, second) is None):
                raise ConfigError(f"{first} and {second} must be given together")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ConfigError("tls_client_ca needs tls_certificate and tls_key")
        if self.live_page is not None and not is_url(self.live_page):
            raise ConfigError(f"live_page must be a URL with http or https, not {self.live_page!r}")
        if self.max_body_bytes > MAX_BODY_BYTES:
            raise ConfigError(f"max_body_bytes must be at most {MAX_BODY_BYTES}, not {self.max_body_bytes}")

    @property
    def has_several(self) -> bool:
        """True if there are several schedulers, or can be."""
        return self.schedulers_file is not None or len(self.schedulers) > 1

    @property
    def schedulers(self) -> list[str]:
        """The addresses in `scheduler`."""
        return addresses(self.scheduler)

    @property
    def model_names(self) -> list[str]:
        """The names in `served_model_name`."""
        return names(self.served_model_name or "")

    @property
    def template_arguments(self) -> frozenset[str]:
        """The names in `chat_template_arguments`."""
        return frozenset(names(self.chat_template_arguments))

    @property
    def hosts(self) -> list[str]:
        """The names in `allowed_hosts`."""
        return names(self.allowed_hosts)

    @property
    def must_know_callers(self) -> bool:
        """True if other machines can reach this gateway, so that schedulers have to ask callers for a key."""
        listens = [self.listen, *([self.grpc_listen] if self.grpc_listen is not None else [])]
        return not (self.allow_anonymous or all(map(is_local, listens)) or self.tls_client_ca is not None)

    def connections(self, api_key: str | None, addresses: Sequence[str] | None = None) -> list[Connection]:
        """Returns how to reach each scheduler. `api_key` is that of this gateway. Raises ConfigError.

        addresses  None: those in `scheduler`
        """
        tls: bool | TlsFiles = self.scheduler_tls
        if self.scheduler_tls_certificate is not None and self.scheduler_tls_key is not None:
            tls = TlsFiles(self.scheduler_tls_certificate, self.scheduler_tls_key, self.scheduler_ca)
        try:
            return [
                Connection(each, api_key, tls, self.scheduler_ca, None, is_direct=True)
                for each in addresses or self.schedulers
            ]
        except ValueError as error:
            raise ConfigError(str(error)) from None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "GatewayConfig":
        """Makes a configuration from plain values. Raises ConfigError for unknown keys and for bad values."""
        check_keys(values, cls)
        return cls(**values)
