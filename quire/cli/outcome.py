"""Ends a command: an expected error becomes a line on standard error and an exit code, a bug shows its traceback."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from fleet.wanted import FleetError
from planning.errors import PlanningError
from quire.addresses import AddressInUse
from quire.checksums import ChecksumError
from quire.cli import exit_codes
from quire.cli.supervisor import ChildFailed
from quire.errors import InvalidRequestError, QuireError
from quire.log_writer import put_line
from quire.model_path import ModelNotFound
from quire.settings import ConfigError
from quire.tls import TlsError
from scheduler.identity.key_file import KeyFileError

_CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EPIPE}


@contextmanager
def reported(service: str = "", log_format: str | None = None) -> Iterator[None]:
    """Turns an expected error into an exit code and a line on standard error, or one line for each invalid field.

    service, log_format  of a command that runs a service, whose last line is JSON if its log is
    """

    def end(message: str, code: int) -> NoReturn:
        if log_format == "json":
            from quire.logs import as_json_line  # loads structlog, which other commands do without

            put_line(sys.stderr, as_json_line(service, message, "critical"))
            raise typer.Exit(code)
        fail(message, code)

    try:
        yield
    except InvalidRequestError as error:
        listed = "".join(f"\n  {field}: {problem}" for field, problem in error.violations.items())
        end(f"the request was refused{listed}" if listed else str(error), exit_codes.exit_code(error))
    except QuireError as error:
        end(str(error), exit_codes.exit_code(error))
    except (ConfigError, ChecksumError, ModelNotFound, PlanningError, TlsError, KeyFileError) as error:
        end(str(error), exit_codes.USAGE)
    except AddressInUse as error:
        end(str(error), exit_codes.ADDRESS_IN_USE)
    except (ChildFailed, FleetError) as failure:
        end(str(failure), failure.exit_code)
    except KeyboardInterrupt:
        raise typer.Exit(exit_codes.INTERRUPTED) from None


@contextmanager
def flushed() -> Iterator[None]:
    """Flushes standard output at the end. If it cannot be written, ends the process with a line on standard error.

    Otherwise Python would flush it after the last handler, and print a traceback. A closed pipe needs no line.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # the old one still has its text
        if error.errno != errno.EPIPE:
            put_line(sys.stderr, f"quire: cannot write: {error.strerror}")
        sys.exit(exit_codes.FAILED)


def fail(message: str, code: int) -> NoReturn:
    put_line(sys.stderr, f"quire: {message}")
    raise typer.Exit(code)
