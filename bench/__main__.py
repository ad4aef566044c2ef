"""`python -m bench NAME [flags]` runs a measurement; without a name it lists all of them."""

import sys

from bench.command_line import BenchError
from bench.commands import COMMANDS, listing, run


def main(words: list[str]) -> int:
    """Returns the exit status: that of the measurement, 2 for an unknown name, 1 for a failure."""
    if not words or words[0] in ("-h", "--help"):
        print(f"Usage: python -m bench NAME [flags]\n\n{listing()}")
        return 0
    name, *arguments = words
    if name not in COMMANDS:
        print(f"bench: no measurement is called {name!r}; there are:\n\n{listing()}", file=sys.stderr)
        return 2
    try:
        return run(name, arguments)
    except KeyboardInterrupt:
        return 130
    except _failures() as error:
        print(f"bench {name}: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, BenchError) else 1


def _failures() -> tuple[type[Exception], ...]:
    """Returns the errors that a measurement reports. Without its generated stubs quire cannot be imported: then none of
    its errors was raised."""
    try:
        from quire.errors import QuireError
        from quire.model_path import ModelNotFound
    except ImportError:
        return BenchError, OSError
    return BenchError, QuireError, ModelNotFound, OSError


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
