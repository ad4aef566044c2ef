"""One of the other ranks, as rank 0 sees it: a child process, or a rank of another machine that has joined."""

import json
import signal
import socket
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from executor.parallel.channel import Channel, ChannelClosed, FrameKind
from quire.command import interpreter, lifeline
from quire.signals import end_signals

_MODULE = "executor.worker"

_REASON_S = 2.0
"""Time to wait for the process of a rank to end after its channel has closed, so that its exit status can be told."""

_END_S = 10.0
"""Time that a rank has to end after its channel was closed."""


@dataclass(slots=True)
class Member:
    """One of the other ranks.

    process       its process; None if it runs on another machine
    address       from where it has joined
    memory_bytes  what it has loaded: "weights", and "kv_block" for one block of its pool
    """

    rank: int
    channel: Channel
    process: subprocess.Popen[bytes] | None
    address: str = ""
    memory_bytes: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        where = f"at {self.address}" if self.process is None else f"process {self.process.pid}"
        return f"rank {self.rank} ({where})"

    @property
    def is_gone(self) -> bool:
        """True if it has ended, or its machine has closed the connection."""
        return self.channel.has_frame() if self.process is None else self.process.poll() is not None

    @property
    def is_stopped(self) -> bool:
        return self.process is not None and self.state() == f"is {psutil.STATUS_STOPPED}"

    def state(self) -> str:
        """Returns what the process does: "was killed by SIGKILL", "exited with status 1", "is stopped"."""
        if self.process is None:
            return "has closed its connection" if self.is_gone else "is connected"
        code = self.process.poll()
        if code is None:
            with suppress(psutil.Error):
                return f"is {psutil.Process(self.process.pid).status()}"
            return "has ended"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    def last_state(self) -> str:
        """Returns what has become of a rank whose channel is closed."""
        if self.process is None:
            return "has closed its connection"
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_REASON_S)
        return self.state()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def end(self) -> None:
        """Waits until the process has ended, and kills it if it does not. Its channel is closed."""
        if self.process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        self.process.kill()
        self.process.wait()


def start_member(rank: int, setup: dict[str, Any]) -> Member:
    """Starts a rank on this machine. It ends when the thread that calls this ends."""
    own, other = socket.socketpair()
    with other:
        process = start_worker(other)
    member = Member(rank, Channel(own), process)
    set_up(member, setup)
    return member


def start_worker(end: socket.socket, settings: dict[str, Any] | None = None) -> subprocess.Popen[bytes]:
    """Starts the process of a rank, which receives launches at this end. It ends when the calling thread ends.

    It starts with the signals blocked that end this process: a Ctrl-C in the terminal reaches both, and this process
    handles it. settings: those of a rank of another machine than rank 0, see `executor.worker`
    """
    own_settings = [] if settings is None else [json.dumps(settings)]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, end_signals())  # of this thread alone
    try:
        return subprocess.Popen(
            [*lifeline(), *interpreter(), "-m", _MODULE, str(end.fileno()), *own_settings],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # where this process prints `ready`
            pass_fds=[end.fileno()],
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def set_up(member: Member, setup: dict[str, Any]) -> None:
    """Tells a rank its number and the settings of the group."""
    with suppress(ChannelClosed):  # then the rank is found to have ended
        member.channel.send_values(FrameKind.SETUP, setup | {"rank": member.rank})
