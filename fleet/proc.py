"""Reads from /proc which processes of this machine run (proc(5))."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path


def boot_id() -> str:
    """Returns what identifies this boot of the system; empty if it is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def start_ticks(pid: int, *, with_zombies: bool = False) -> int | None:
    """Returns when a process started, in clock ticks since boot; None if it does not run."""
    fields = _stat(pid)
    if fields is None or (fields[0] in ("Z", "X") and not with_zombies):
        return None
    return int(fields[19])


def session_members(session: int) -> list[int]:
    """Returns the processes of a session that run."""
    members = []
    for name in os.listdir("/proc"):
        fields = _stat(int(name)) if name.isdigit() else None
        if fields is not None and int(fields[3]) == session and fields[0] not in ("Z", "X"):
            members.append(int(name))
    return members


def session_leaders(is_it: Callable[[bytes], bool]) -> Iterator[tuple[int, int]]:
    """Yields number and start time of this user's processes that lead a session and whose command line is accepted.

    is_it  gets a command line, in which each word ends with a zero byte
    """
    for name in os.listdir("/proc"):
        with suppress(OSError):
            pid = int(name) if name.isdigit() else 0
            if not pid or os.getsid(pid) != pid or os.stat(f"/proc/{pid}").st_uid != os.geteuid():
                continue
            if is_it(Path(f"/proc/{pid}/cmdline").read_bytes()) and (ticks := start_ticks(pid)) is not None:
                yield pid, ticks


def _stat(pid: int) -> list[str] | None:
    """Returns the fields of /proc/PID/stat from the state on (proc(5)); None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    return text.rpartition(")")[2].split()  # the name before it may contain anything
