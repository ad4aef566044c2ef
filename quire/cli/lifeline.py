"""Runs a command that dies with its parent: `python -I -S lifeline.py PARENT_PID COMMAND ARGUMENTS…`.

A file to be executed, not imported: it becomes the command by exec, so the process that the parent watches and signals
is the command itself. Setting the signal here, rather than between fork and exec, keeps Python code out of the forked
copy of a process that has threads.
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
        if os.getppid() != parent:  # it died before the line above
            sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
