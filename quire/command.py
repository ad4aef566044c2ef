"""The commands that run this Quire in another process, and the variable that they read."""

import os
import sys
from pathlib import Path

API_KEY = "QUIRE_API_KEY"
"""The environment variable with the key of a client or a gateway. A flag would show it to every user of the machine."""

_LIFELINE = str(Path(__file__).with_name("lifeline.py"))


def interpreter() -> tuple[str, ...]:
    """Returns the command of a Python that imports this Quire, for use with `-m`.

    `-m` puts the working directory first on the path. A folder there named `quire` must not replace this one, unless
    this process was started that way too.
    """
    try:
        here = os.getcwd()
    except FileNotFoundError:  # it was removed
        here = ""
    isolation = () if {"", here} & set(sys.path) else ("-P",)
    # With faulthandler, a process that is ended because it hangs prints the stacks of its threads.
    return (sys.executable, *isolation, "-X", "faulthandler")


def quire_command() -> tuple[str, ...]:
    """Returns the command to which the name of a subcommand and its flags are added."""
    return (*interpreter(), "-m", "quire")


def lifeline() -> tuple[str, ...]:
    """Returns the beginning of a command whose process the kernel kills when the thread that starts it ends."""
    return (sys.executable, "-I", "-S", _LIFELINE, str(os.getpid()))
