"""`quire bench NAME …`: the measurements of `python -m bench`, which parses their flags itself."""

from collections.abc import Callable

import typer

from bench.command_line import BenchError
from bench.commands import COMMANDS, run
from quire.cli import exit_codes
from quire.cli.outcome import fail, reported

app = typer.Typer(help="Runs a measurement.", no_args_is_help=True)

# All flags, --help included, are passed on.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def _command(name: str) -> Callable[[typer.Context], None]:
    def command(context: typer.Context) -> None:
        with reported():
            try:
                status = run(name, context.args)
            except BenchError as error:
                fail(str(error), error.exit_code)
            except OSError as error:
                fail(str(error), exit_codes.FAILED)
        raise typer.Exit(status)

    return command


for _name, _entry in COMMANDS.items():
    app.command(_name, short_help=_entry.description, context_settings=_PASS_ON, add_help_option=False)(_command(_name))
