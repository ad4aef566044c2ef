"""The scheduler's configuration: one frozen value, which is complete when the process starts.

Each setting is declared here, with its help text and its default. `quire.cli.config_flags` makes the flags from this
declaration, and `scheduler.engine.options` copies the values that the engine and the core use by name.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, get_args, get_type_hints
from urllib.parse import urlsplit

from quire import logs
from quire.addresses import UNIX, AddressError, HostPort
from scheduler.core import BATCHING, KV_ALLOCATIONS, POLICIES, QuireError


class ConfigError(QuireError):
    """The configuration is contradictory or has a bad value. The message names the field."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The settings of one scheduler process:

    model                      local directory, or hub id, with tokenizer.json
    revision                   branch, tag or commit of the hub id, as for the executor; None: the default branch
    listen                     address of the gRPC server: host:port, or unix:path. Port 0: any free one
    http_listen                host:port of metrics, readiness, and the live page, whose prompt box generates for
                               every user who reaches it: like the gRPC port, this port does not authenticate
    http_allowed_hosts         names, separated by commas, under which browsers may request the live page in addition to
                               that of http_listen, localhost and addresses; for a reverse proxy. "*": any
    executor                   address of the executor: host:port, or unix:path
    tenants                    file of tenants in TOML, read at start: weight, priority, caps and defaults of each;
                               None: all tenants are equal
    policy                     order of the queue: "fcfs", "priority"
    batching                   "continuous"; for measurement only: "static", "dynamic"
    batch_timeout_s            maximum wait for a full batch, under dynamic batching
    memory                     "paged"; for measurement only: "contiguous", "contiguous-power-of-two",
                               "contiguous-exact"
    max_num_seqs               sequences that run at once; None: as many as the executor has slots
    max_num_batched_tokens     tokens of one step; None: the executor's
    max_in_flight              plans sent and not yet answered; 2 hides the round trip
    max_waiting_requests       bound of the queue, in requests
    max_waiting_prompt_tokens  bound of the queue, in prompt tokens
    enable_prefix_caching      keep and find the KV of earlier prompts
    max_streams                streams open at once, including those of slow readers; more are refused
    stalled_reader_timeout_s   a reader that accepts nothing for this time loses its stream
    step_timeout_s             an executor that returns no result for this time, or answers no probe while idle, is
                               disconnected; must be longer than the longest step
    drain_timeout_s            time that running requests get to end after SIGTERM
    log_level                  "debug", "info", "warning", "error"
    log_format                 "console": for people; "json": one JSON object on each line
    otlp_endpoint              collector of traces, as http://127.0.0.1:4318; None: no traces. Needs the extra `otel`
    """

    model: str
    revision: str | None = None
    listen: str = "127.0.0.1:50051"
    http_listen: str = "127.0.0.1:8080"
    http_allowed_hosts: str = ""
    executor: str = "127.0.0.1:50052"
    tenants: str | None = None
    policy: str = "fcfs"
    batching: str = "continuous"
    batch_timeout_s: float = 0.05
    memory: str = "paged"
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_in_flight: int = 2
    max_waiting_requests: int = 4096
    max_waiting_prompt_tokens: int = 4_000_000
    enable_prefix_caching: bool = True
    max_streams: int = 8192
    stalled_reader_timeout_s: float = 120.0
    step_timeout_s: float = 60.0
    drain_timeout_s: float = 600.0
    log_level: str = "info"
    log_format: str = "console"
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        """Checks every field. Raises ConfigError."""
        types = get_type_hints(type(self))
        for field in fields(self):
            _check_type(field.name, getattr(self, field.name), get_args(types[field.name]) or (types[field.name],))
        if not self.model:
            raise ConfigError("model must be given")
        _check_choice("policy", self.policy, POLICIES)
        _check_choice("batching", self.batching, BATCHING)
        _check_choice("memory", self.memory, KV_ALLOCATIONS)
        _check_choice("log_level", self.log_level, logs.LEVELS)
        _check_choice("log_format", self.log_format, logs.FORMATS)
        if self.otlp_endpoint is not None and not _is_url(self.otlp_endpoint):
            raise ConfigError(f"otlp_endpoint must be http://host:port or https://…, not {self.otlp_endpoint!r}")
        if not self.listen.startswith(UNIX):
            _check_address("listen", self.listen, "host:port or unix:path")
        _check_address("http_listen", self.http_listen, "host:port")

    @property
    def allowed_hosts(self) -> list[str]:
        """The names in `http_allowed_hosts`."""
        return [name for name in self.http_allowed_hosts.replace(",", " ").split() if name]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SchedulerConfig":
        """Makes a configuration from plain values. Raises ConfigError for unknown keys and for bad values."""
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise ConfigError(f"unknown keys: {', '.join(unknown)}")
        if "model" not in values:
            raise ConfigError("model must be given")
        return cls(**values)


def _check_address(name: str, address: str, expected: str) -> None:
    try:
        HostPort.parse(address)
    except AddressError:
        raise ConfigError(f"{name} must be {expected}, not {address!r}") from None


def _check_choice(name: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _check_type(name: str, value: object, types: tuple[type, ...]) -> None:
    """Raises ConfigError unless the value has one of `types`. An int is also a float; numbers must be positive."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_right = type(value) in types or (type(value) is int and float in types)
    if not is_right:
        words = " or ".join("absent" if kind is NoneType else kind.__name__ for kind in types)
        raise ConfigError(f"{name} must be {words}, not {value!r}")
    if is_number and not 0 < value < float("inf"):  # type: ignore[operator]  # narrowed by is_number
        raise ConfigError(f"{name} must be positive and finite, not {value!r}")
