"""All settings of `quire rank`."""

from dataclasses import dataclass
from typing import Any

from executor.config import MAX_THREADS
from executor.errors import ConfigError
from quire import logs
from quire.addresses import AddressError, HostPort


@dataclass(frozen=True, slots=True)
class RankConfig:
    """The settings of the ranks of one machine. All others are those of the executor.

    join         address of the executor's --ranks-listen, "host:port"
    ranks_key    file with the secret that the executor has as well
    model        directory with the same files as the executor's, or the same hub id
    revision     branch, tag or commit of the hub id; None: the default branch
    num_ranks    number of ranks on this machine; they divide its threads and its memory
    num_threads  CPU threads of one step of all of them; None: all cores, but one less if there are three or more
    log_level    "debug", "info", "warning", "error"
    log_format   "console": for people; "json": one JSON object per line
    """

    join: str
    ranks_key: str
    model: str
    revision: str | None = None
    num_ranks: int = 1
    num_threads: int | None = None
    log_level: str = "info"
    log_format: str = "console"

    def __post_init__(self) -> None:
        for name in ("join", "ranks_key", "model"):
            if not getattr(self, name):
                raise ConfigError(f"{name}: must be given")
        try:
            HostPort.parse(self.join).host.encode("idna")
        except (AddressError, UnicodeError):
            raise ConfigError(f'join: expected "host:port", found {self.join!r}') from None
        for name in ("num_ranks", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: must be at least 1, is {value}")
        if self.num_threads is not None and self.num_threads > MAX_THREADS:
            raise ConfigError(f"num_threads: must be at most {MAX_THREADS}, is {self.num_threads}")
        for name, choices in (("log_level", logs.LEVELS), ("log_format", logs.FORMATS)):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}: must be one of {', '.join(choices)}, is {getattr(self, name)!r}")

    @property
    def settings(self) -> dict[str, Any]:
        """Returns what differs from the settings of the executor."""
        return {
            "model": self.model,
            "revision": self.revision,
            "num_threads": self.num_threads,
            "num_local_ranks": self.num_ranks,
        }
