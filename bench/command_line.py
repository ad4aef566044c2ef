"""The parser and the error that all measurements share."""

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


class BenchError(Exception):
    """A measurement cannot be made, or it failed. `exit_code` is the exit status of the command."""

    exit_code = 1


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Writes `Usage:` as `quire` does, and keeps the lines of a description as they are."""

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None = None,
    ) -> None:
        super().add_usage(usage, actions, groups, "Usage: " if prefix is None else prefix)


class Parser(argparse.ArgumentParser):
    """The parser of one measurement. Flags cannot be abbreviated: most measurements pass unknown flags on."""

    def __init__(self, name: str, description: str | None) -> None:
        super().__init__(
            prog=f"python -m bench {name}", description=description, formatter_class=_Formatter, allow_abbrev=False
        )


SERVICE_FLAGS = "All other flags are those of `quire serve`, for the services that are started."


def open_console() -> "Console":
    """Returns a console for tables: as wide as the terminal, or 150 columns if the output goes elsewhere."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 150)


def parse_concurrencies(text: str) -> tuple[int, ...]:
    """Parses `1,4,16` into (1, 4, 16). Raises BenchError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise BenchError(f"concurrency: expected numbers above 0, with commas between them, not {text!r}")
    return tuple(dict.fromkeys(int(part) for part in parts))


def at_least(minimum: float, number: Callable[[str], Any] = int) -> Callable[[str], Any]:
    """Returns a type for argparse: a number that is not below `minimum`."""

    def parse(text: str) -> Any:
        value = number(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text} is below {minimum:g}")
        return value

    return parse
