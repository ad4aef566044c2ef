"""Ends a command: an expected error becomes a line on standard error and an exit code, a bug shows its traceback."""

import errno
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


@contextmanager
def reported() -> Iterator[None]:
    """Turns an expected error into an exit code and a line on standard error, or one line for each invalid field."""
    try:
        yield
    except InvalidRequestError as error:
        listed = "".join(f"\n  {field}: {problem}" for field, problem in error.violations.items())
        fail(f"the request was refused{listed}" if listed else str(error), exit_codes.exit_code(error))
    except QuireError as error:
        fail(str(error), exit_codes.exit_code(error))
    except (ConfigError, ChecksumError, ModelNotFound, PlanningError, TlsError, KeyFileError) as error:
        fail(str(error), exit_codes.USAGE)
    except AddressInUse as error:
        fail(str(error), exit_codes.ADDRESS_IN_USE)
    except (ChildFailed, FleetError) as failure:
        fail(str(failure), failure.exit_code)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        fail(f"cannot write: {error.strerror}", exit_codes.FAILED)
    except KeyboardInterrupt:
        raise typer.Exit(exit_codes.INTERRUPTED) from None


def fail(message: str, code: int) -> NoReturn:
    put_line(sys.stderr, f"quire: {message}")
    raise typer.Exit(code)
