"""The executor process: loads a model, prints `ready`, and serves until a signal ends it.

Exit codes: 0 stopped by a signal · 1 the device or a rank is lost or hangs, loading hangs, or a bug · 2 wrong
configuration or model, or too little memory · 3 an address is in use.
"""

import asyncio
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

import numpy.ma  # noqa: F401  # numpy would import it in the first step, when descriptors may be short

from executor.config import ExecutorConfig
from executor.errors import CheckpointError, ConfigError, OutOfMemory, RankLost
from executor.loading import load_model
from executor.server import serve
from executor.share_loading import Say
from quire import logs
from quire.addresses import AddressInUse, AddressUnusable, check_apart, check_free
from quire.descriptors import raise_descriptor_limit
from quire.log_writer import put_line
from quire.signals import end_signals

EXIT_OK = 0
EXIT_DEVICE_LOST = 1
EXIT_CONFIG = 2
EXIT_ADDRESS_IN_USE = 3


def run(config: ExecutorConfig) -> int:
    """Runs the executor. Prints progress to standard output, errors to standard error.

    Returns the exit code of an executor that could not serve; one that has served ends the process itself.
    """
    logs.configure("executor", config.log_level, config.log_format)
    raise_descriptor_limit()
    try:
        with _interrupted_by_signals():
            ended_well = _load_and_serve(config)
    except KeyboardInterrupt:
        return EXIT_OK
    except (ConfigError, CheckpointError, OutOfMemory, AddressUnusable) as error:
        logs.put_last_line("executor", error, config.log_format)
        return EXIT_CONFIG
    except AddressInUse as error:
        logs.put_last_line("executor", error, config.log_format)
        return EXIT_ADDRESS_IN_USE
    except RankLost as error:
        logs.put_last_line("executor", error, config.log_format)
        return EXIT_DEVICE_LOST
    return _leave(EXIT_OK if ended_well else EXIT_DEVICE_LOST)


def _leave(exit_code: int) -> NoReturn:
    """Exits at once, after flushing the logs.

    Threads that are stuck in the device cannot be joined, and Python takes about a second to clear torch's modules.
    """
    with suppress(Exception):  # the logs may be closed
        logging.shutdown()
    os._exit(exit_code)


def _load_and_serve(config: ExecutorConfig) -> bool:
    """Loads and serves. Returns False if the device was lost or hangs. Checks addresses before the slow loading."""
    addresses = {"listen_address": config.listen_address, "metrics_address": config.metrics_address}
    addresses = {setting: address for setting, address in addresses.items() if address}
    for address in addresses.values():
        check_free(address)
    check_apart(addresses)
    with _ended_if_silent(config.load_timeout_s) as say:
        model = load_model(config, say)
    try:
        return asyncio.run(serve(config, model, _say))
    finally:
        model.close()


@contextmanager
def _ended_if_silent(timeout_s: float) -> Iterator[Say]:
    """Yields a function that prints a line. If it is not called for this time, the process prints stacks and exits.

    A thread of faulthandler does this, which needs no Python. Without a standard error there is no limit.
    """

    def wait_again() -> None:
        with suppress(RuntimeError, OSError, ValueError):
            faulthandler.dump_traceback_later(timeout_s, exit=True)

    def say(line: str) -> None:
        wait_again()
        _say(line)

    wait_again()
    try:
        yield say
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Lets the other signals that end this process raise KeyboardInterrupt, as SIGINT does, until the server handles
    them.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    others = [number for number in end_signals() if number is not signal.SIGINT]
    previous = {number: signal.signal(number, interrupt) for number in others}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _say(line: str) -> None:
    put_line(sys.stdout, line)
