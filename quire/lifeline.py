"""Runs a command that dies with its parent: `python -I -S lifeline.py PARENT_PID COMMAND ARGUMENTS…`.

This file is executed, not imported. It becomes the command by exec, so the parent watches and signals the command
itself. The signal is set here and not between fork and exec, because no Python code should run in the forked copy of a
process that has threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>; kept over exec


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the line above
            sys.exit(1)
    try:
        os.getcwd()
    except FileNotFoundError:  # it was removed, and MKL cannot load its libraries there
        os.chdir("/")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
