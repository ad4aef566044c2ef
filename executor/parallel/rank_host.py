"""`quire rank`: ranks of this machine, which join an executor on another one (`joining.py`).

Each rank is a process that lives as long as its group. When the group has ended, this process joins the next one, which
the same executor makes when it is started again.

Exit codes: 0 stopped by a signal · 1 a bug · 2 wrong configuration or model, or too little memory.
"""

import logging
import select
import signal
import socket
import subprocess
import threading
import time
from math import inf
from queue import SimpleQueue
from types import FrameType

from executor.errors import ConfigError
from executor.parallel.joining import NotARank, join, read_key
from executor.parallel.member import start_worker
from executor.parallel.rank_config import RankConfig
from quire import logs
from quire.signals import end_signals

_log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_BUG = 1
EXIT_CONFIG = 2

END_S = 5.0
"""Time that a rank has to end after its group. One that hangs is killed."""

_LOOK_MS = 50
_HANGS_UP = getattr(select, "POLLRDHUP", 0)  # elsewhere than on Linux, only the end of the whole connection is seen

RETRY_S = 1.0
"""Time between two attempts to join."""


def run(config: RankConfig) -> int:
    """Keeps the ranks until a signal ends this process. Returns the exit code."""
    logs.configure("rank", config.log_level, config.log_format)
    try:
        key = read_key(config.ranks_key)
    except ConfigError as error:
        logs.put_last_line("rank", error, config.log_format)
        return EXIT_CONFIG
    codes: SimpleQueue[int] = SimpleQueue()

    def stop(number: int, frame: FrameType | None) -> None:
        codes.put(EXIT_OK)

    for number in end_signals():
        signal.signal(number, stop)
    for _ in range(config.num_ranks):
        threading.Thread(target=_keep, args=(config, key, codes), daemon=True).start()
    return codes.get()  # the processes of the ranks end with this one


def _keep(config: RankConfig, key: bytes, codes: SimpleQueue[int]) -> None:
    """Keeps one rank, and gives the exit code if that cannot go on."""
    try:
        _keep_rank(config, key)
        codes.put(EXIT_CONFIG)
    except Exception:  # noqa: BLE001  # nothing would keep the rank, and this process would wait for ever
        _log.exception("a rank cannot be kept")
        codes.put(EXIT_BUG)


def _keep_rank(config: RankConfig, key: bytes) -> None:
    """Joins one group after the other, until a rank cannot load its share."""
    last_problem = ""
    while True:
        try:
            connection = join(config.join, key)
        except (OSError, NotARank) as error:
            if str(error) != last_problem:
                _log.info("cannot join %s yet: %s", config.join, error)
                last_problem = str(error)
            time.sleep(RETRY_S)
            continue
        last_problem = ""
        _log.info("joined %s", config.join)
        with connection:
            try:
                process = start_worker(connection, config.settings)
            except OSError as error:  # this machine has no memory or process number left
                _log.warning("a rank cannot be started yet: %s", error)
                time.sleep(RETRY_S)
                continue
            code = _ended(process, connection)
        if code == EXIT_CONFIG:
            _log.error("a rank cannot load its share; the executor says why")
            return
        _log.info("the group has ended (exit status %d)", code)
        time.sleep(RETRY_S)


def _ended(process: subprocess.Popen[bytes], connection: socket.socket) -> int:
    """Waits until the process of a rank has ended, and kills one that outlives its group. Returns its exit status."""
    group = select.poll()
    group.register(connection, _HANGS_UP)
    ends_s = inf
    while (code := process.poll()) is None:
        if ends_s == inf and group.poll(_LOOK_MS):
            ends_s = time.monotonic() + END_S
        elif ends_s != inf:
            time.sleep(_LOOK_MS / 1e3)
        if time.monotonic() > ends_s:
            _log.warning("a rank is killed, because its group has ended and it has not")
            process.kill()
    return code
