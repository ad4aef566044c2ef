"""All settings of an executor. It reads no others, neither from files nor from the environment."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Self, get_type_hints

from executor.errors import ConfigError
from quire import logs
from quire.addresses import UNIX, is_address, is_local, private_socket

DTYPES = ("auto", "float32", "bfloat16", "float16")
KERNELS = ("auto", "reference")
LOAD_FORMATS = ("safetensors", "random")


MAX_THREADS = 1024
"""Most CPU threads of one step. All are started, and a process crashes that cannot start one."""


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """The settings of one executor, which serves one model on one device, or divided among several ranks.

    model                   directory with config.json and safetensors, or a hub id `namespace/name`; default: the
                            embedded checkpoint
    revision                branch, tag or commit of the hub id; None: the default branch
    model_name              name of the model towards clients; None: the hub id or the directory's name
    dtype                   dtype of weights, activations and KV; "auto": the one the checkpoint names
    load_format             "safetensors"; "random": draws random weights for the shapes in config.json and reads no
                            other file but tokenizer.json, to measure a model without its weights
    device                  "cpu", "cuda", "cuda:1"; "auto": the first GPU if there is one, else the CPU
    kernels                 "auto": the fastest kernels for the device; "reference": plain torch
    block_size              tokens per KV block
    num_blocks              blocks of the KV pool, including the null block; None: as many as `memory_fraction` allows
    tensor_parallel_size    number of ranks that share the model: processes of this executor, each with its part of the
                            weights and of the KV. On the CPU, they divide its threads and its memory
    remote_ranks            number of these ranks that `quire rank` starts on other machines
    ranks_listen            address at which these join, "host:port"; it needs `remote_ranks` and `ranks_key`
    ranks_key               file with a secret of at least 32 bytes, the same on all machines
    memory_fraction         share of the memory that is left, for the KV pool: after loading the weights, and on a GPU
                            beside the largest step and the graphs; None: 0.9 on a GPU; 0.4 on the CPU, but at most
                            2 GiB
    max_num_seqs            number of slots; None: 256 on a GPU, 64 on the CPU
    max_num_batched_tokens  maximum number of tokens in one step; None: 8192 on a GPU, 512 on the CPU, where larger ones
                            are no faster
    max_model_len           maximum number of tokens of one sequence; None: what the checkpoint was made for
    listen_address          address of the gRPC server: "unix:/path", a socket file that only this user can use, or
                            "host:port" (port 0: any free one); default: a socket file in the user's private directory.
                            A host other than loopback needs TLS
    tls_certificate         PEM file with the certificate of the gRPC server; the four settings of TLS belong together
    tls_key                 PEM file with its private key
    tls_client_ca           PEM file with the authorities that sign the scheduler's certificate
    scheduler_name          subject alternative name of the scheduler: callers need a certificate with it
    metrics_address         address of the Prometheus endpoint, "host:port"; "": none
    num_threads             CPU threads of one step; None: all cores, but one less if there are three or more
    step_timeout_s          after this long without the end of a step, the executor reports NOT_SERVING; after twice as
                            long, it logs the stacks of its threads and exits, so that it can be restarted
    load_timeout_s          an executor that loads a model and prints no line of progress for this time logs the stacks
                            of its threads and exits; `quire serve` kills each service that starts and prints nothing
                            for so long
    log_level               "debug", "info", "warning", "error"
    log_format              "console": for people; "json": one JSON object per line
    """

    model: str
    revision: str | None = None
    model_name: str | None = None
    dtype: str = "auto"
    load_format: str = "safetensors"
    device: str = "auto"
    kernels: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    tensor_parallel_size: int = 1
    remote_ranks: int = 0
    ranks_listen: str | None = None
    ranks_key: str | None = None
    memory_fraction: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    listen_address: str = field(default_factory=partial(private_socket, "executor"))
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    scheduler_name: str | None = None
    metrics_address: str = "127.0.0.1:9102"
    num_threads: int | None = None
    step_timeout_s: float = 60.0
    load_timeout_s: float = 600.0
    log_level: str = "info"
    log_format: str = "console"

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model: must name a directory or a hub id")
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("kernels", self.kernels, KERNELS)
        _check_choice("load_format", self.load_format, LOAD_FORMATS)
        _check_choice("log_level", self.log_level, logs.LEVELS)
        _check_choice("log_format", self.log_format, logs.FORMATS)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name}: must be at least {least}, is {value}")
            most = MAX_THREADS if name == "num_threads" else _MAX_COUNT
            if value is not None and value > most:
                raise ConfigError(f"{name}: must be at most {most}, is {value}")
        if self.memory_fraction is not None and not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError(f"memory_fraction: must be in (0, 1], is {self.memory_fraction}")
        for name in ("step_timeout_s", "load_timeout_s"):
            if not 0.0 < getattr(self, name) <= _MAX_TIMEOUT_S:
                raise ConfigError(f"{name}: must be above 0 and at most {_MAX_TIMEOUT_S:g}, is {getattr(self, name)}")
        _check_address("listen_address", self.listen_address, '"host:port" or "unix:/path"')
        self._check_tls()
        self._check_remote_ranks()
        if self.metrics_address:
            _check_address("metrics_address", self.metrics_address, '"host:port"')

    def _check_tls(self) -> None:
        given = {name for name in _TLS if getattr(self, name)}
        if given and (missing := [name for name in _TLS if name not in given]):
            raise ConfigError(f"{missing[0]}: must be given together with {', '.join(sorted(given))}")
        if given and self.listen_address.startswith(UNIX):
            raise ConfigError("tls_certificate: a socket file needs no TLS; leave it out, or listen on a host and port")
        if not given and not is_local(self.listen_address):
            raise ConfigError(
                f"listen_address: every host that reaches {self.listen_address} could use this executor, and read the "
                "KV of all requests: listen on unix:/path, or give --tls-certificate, --tls-key, --tls-client-ca and "
                "--scheduler-name"
            )

    def _check_remote_ranks(self) -> None:
        if self.remote_ranks >= self.tensor_parallel_size > 1 or (self.remote_ranks and self.tensor_parallel_size == 1):
            most = self.tensor_parallel_size - 1
            raise ConfigError(f"remote_ranks: must be at most {most}, one less than all ranks, is {self.remote_ranks}")
        given = [name for name in ("remote_ranks", "ranks_listen", "ranks_key") if getattr(self, name)]
        if 0 < len(given) < 3:
            raise ConfigError(f"{given[0]}: remote_ranks, ranks_listen and ranks_key have to be given together")
        if self.ranks_listen:
            _check_address("ranks_listen", self.ranks_listen, '"host:port"')

    @property
    def num_local_ranks(self) -> int:
        """Returns the number of ranks that share the threads and the memory of this machine."""
        return self.tensor_parallel_size - self.remote_ranks

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Builds a configuration. Raises ConfigError for an unknown key and for a value of the wrong type."""
        types = get_type_hints(cls)
        unknown = sorted(set(values) - set(types))
        if unknown:
            raise ConfigError(f"unknown keys: {', '.join(unknown)}; known: {', '.join(types)}")
        if "model" not in values:
            raise ConfigError("model: must name a directory or a hub id")
        for each in fields(cls):
            if each.name in values:
                _check_type(each.name, values[each.name], types[each.name])
        return cls(**values)  # type: ignore[arg-type]  # types were checked field by field


_TLS = ("tls_certificate", "tls_key", "tls_client_ca", "scheduler_name")

_MAX_TIMEOUT_S = 1e6
"""About eleven days: timers take no infinity."""

_MAX_COUNT = (1 << 31) - 1
"""Blocks, slots and positions are int32 numbers."""

_LEAST = {
    "block_size": 1,
    "num_blocks": 2,
    "tensor_parallel_size": 1,
    "remote_ranks": 0,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_model_len": 2,
    "num_threads": 1,
}


def _check_type(name: str, value: object, expected: type) -> None:
    accepted = expected | int if isinstance(0.5, expected) else expected
    if isinstance(value, bool) or not isinstance(value, accepted):
        described = getattr(expected, "__name__", str(expected))
        raise ConfigError(f"{name}: expected {described}, found {value!r}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}: must be one of {', '.join(choices)}, is {value!r}")


def _check_address(name: str, address: str, expected: str) -> None:
    if not is_address(address) or (address.startswith(UNIX) and UNIX not in expected):
        raise ConfigError(f"{name}: expected {expected}, found {address!r}")
