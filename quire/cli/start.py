"""The entry of the command `quire`."""

import signal
import sys

_INTERRUPTED = 130


def main() -> None:
    """Runs the command. Ctrl-C ends it without a traceback, also while it is imported."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # otherwise this process has been told to ignore it
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # an exception could be hidden by a module that is imported
    from quire.cli.main import main as run

    signal.signal(signal.SIGINT, before)
    try:
        run()
    except KeyboardInterrupt:  # before the command itself handles it
        sys.exit(_INTERRUPTED)
