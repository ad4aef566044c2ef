"""The output of `quire serve`. A thread writes it, so that a stuck reader does not stop the supervisor."""

import io
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import TextIO

from rich.console import Console
from rich.text import Text

from quire.cli.child import LogSink
from quire.log_writer import LineWriter

_STYLES = {"gateway": "green", "scheduler": "cyan", "executor": "magenta", "supervisor": "yellow"}


@contextmanager
def lines_to(out: TextIO, err: TextIO, log_format: str) -> Iterator[tuple[Callable[[str], None], LogSink]]:
    """Yields `say` (writes to `out`) and `log` (writes to `err`) for `quire.cli.serve.serve`.

    A log line starts with the name of the child that wrote it. If the children log as JSON, it is JSON too.
    """
    render = _json_renderer() if log_format == "json" else _text_renderer(err)
    with (
        closing(LineWriter(out)) as said,
        closing(LineWriter(err, partial(render, "supervisor"))) as logged,
    ):
        yield said.put, lambda name, line: logged.put(render(name, line))


def _json_renderer() -> Callable[[str, str], str]:
    from quire.logs import as_json_line

    return as_json_line


def _text_renderer(err: TextIO) -> Callable[[str, str], str]:
    # A console writes to its file even while it captures, and fails when the terminal is closed.
    console = Console(file=io.StringIO(), force_terminal=Console(file=err).is_terminal, highlight=False)

    def render(name: str, line: str) -> str:
        with console.capture() as captured:
            console.print(
                Text.assemble((f"{name:>10} | ", _STYLES.get(name.partition("-")[0], "")), line), soft_wrap=True, end=""
            )
        return captured.get()

    return render
