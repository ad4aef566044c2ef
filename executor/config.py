"""What can be set on an executor. All of it is here; nothing else is read from anywhere."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Self, get_type_hints

from executor.errors import ConfigError
from quire import logs
from quire.addresses import UNIX, AddressError, HostPort

DTYPES = ("auto", "float32", "bfloat16", "float16")
KERNELS = ("auto", "reference")
LOAD_FORMATS = ("safetensors", "random")


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """One executor: one model on one device.

    model                   directory with config.json and safetensors, or a hub id `namespace/name`
    revision                of the hub id: branch, tag or commit; None: the default branch
    model_name              what the model is called towards clients; None: the hub id or the directory's name
    dtype                   of weights, activations and KV; "auto": as the checkpoint says
    load_format             "safetensors"; "random": weights drawn at random for the shapes of config.json, which is all
                            that is read, to measure a model without having it
    device                  "cpu", "cuda", "cuda:1"; "auto": the first GPU, else the CPU
    kernels                 "auto": the fastest home for the device; "reference": plain torch
    block_size              tokens a KV block
    num_blocks              blocks of the KV pool, null block included; None: as many as the memory share holds
    memory_fraction         share of the memory that is free once the weights are loaded, for the KV pool;
                            None: 0.9 on a GPU; on the CPU 0.4, but at most 2 GiB
    max_num_seqs            slots; None: 256 on a GPU, 64 on the CPU
    max_num_batched_tokens  most tokens of one step; None: 8192 on a GPU, 512 on the CPU (short steps keep
                            decodes smooth while long prompts are computed)
    max_model_len           most tokens of one sequence; None: what the checkpoint was made for
    listen_address          of the gRPC server: "host:port" (port 0: any free one) or "unix:/path"
    metrics_address         of the Prometheus endpoint, "host:port"; "": none
    num_threads             CPU threads of one step; None: all cores, but one from three on
    step_timeout_s          without so much as a step's end for so long, this executor says NOT_SERVING; for twice as
                            long, it ends, with the traces of its threads, to be started anew
    log_level               "debug", "info", "warning", "error"
    log_format              "console", for people; "json", a line of JSON each
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
    memory_fraction: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    listen_address: str = "127.0.0.1:50052"
    metrics_address: str = "127.0.0.1:9102"
    num_threads: int | None = None
    step_timeout_s: float = 60.0
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
        if self.memory_fraction is not None and not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError(f"memory_fraction: must be in (0, 1], is {self.memory_fraction}")
        if not self.step_timeout_s > 0.0:
            raise ConfigError(f"step_timeout_s: must be above 0, is {self.step_timeout_s}")
        if not self.listen_address.startswith(UNIX):
            _check_address("listen_address", self.listen_address, '"host:port" or "unix:/path"')
        if self.metrics_address:
            _check_address("metrics_address", self.metrics_address, '"host:port"')

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Raises ConfigError on a key that is not a field and on a value of the wrong type."""
        types = get_type_hints(cls)
        unknown = sorted(set(values) - set(types))
        if unknown:
            raise ConfigError(f"unknown keys: {', '.join(unknown)}; known: {', '.join(types)}")
        if "model" not in values:
            raise ConfigError("model: must name a directory or a hub id")
        for field in fields(cls):
            if field.name in values:
                _check_type(field.name, values[field.name], types[field.name])
        return cls(**values)  # type: ignore[arg-type]  # types were checked field by field


_LEAST = {
    "block_size": 1,
    "num_blocks": 2,
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
    try:
        HostPort.parse(address)
    except AddressError:
        raise ConfigError(f"{name}: expected {expected}, found {address!r}") from None
