"""The group of ranks as rank 0 sees it: the other ranks are its child processes, and receive launches from it.

The group lives and dies as one. A rank whose channel closes has ended, and so has the group: this process ends, and the
scheduler recovers as from any lost executor. The other ranks die with this process, however it ends.
"""

import logging
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

import quire
from executor import errors
from executor.checkpoints.model_config import ModelConfig
from executor.checkpoints.shares import Share, share_of
from executor.config import ExecutorConfig
from executor.errors import ExecutorError, RankLost
from executor.models.communicator import Communicator
from executor.parallel.channel import Channel, ChannelBroken, ChannelClosed, FrameKind, values_of
from executor.parallel.gloo import GlooCommunicator
from quire.command import interpreter

_log = logging.getLogger(__name__)

_LIFELINE = Path(quire.__file__).with_name("lifeline.py")
_MODULE = "executor.worker"
_REASON_S = 2.0
"""Time to wait for the process of a rank to end after its channel has closed, so that its exit status can be told."""

_END_S = 10.0
"""Time that a rank has to end after its channel was closed."""

Say = Callable[[str], None]


@dataclass(slots=True)
class Member:
    """One of the other ranks.

    memory_bytes  what it has loaded: "weights", and "kv_block" for one block of its pool
    """

    rank: int
    process: subprocess.Popen[bytes]
    channel: Channel
    memory_bytes: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process.pid})"

    def state(self) -> str:
        """Returns what the process does: "was killed by SIGKILL", "exited with status 1", "is stopped"."""
        code = self.process.poll()
        if code is None:
            with suppress(psutil.Error):
                return f"is {psutil.Process(self.process.pid).status()}"
            return "has ended"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"


class RankGroup:
    """All ranks but this one. Implements `executor.parallel.ranks.Ranks` for rank 0."""

    def __init__(self, config: ExecutorConfig, directory: Path, say: Say) -> None:
        """Starts a process for each of the other ranks, which load their shares at once.

        They end when the thread that calls this ends. directory: that of the model.
        """
        self.size = config.tensor_parallel_size
        self._say = say
        self._timeout_s = config.step_timeout_s
        self._files = Path(tempfile.mkdtemp(prefix="quire-ranks-"))
        self._is_closing = self._is_lost = False
        setup = {"config": asdict(config), "directory": str(directory), "store": str(self._store)}
        self.members = [_start(rank, setup) for rank in range(1, self.size)]

    @property
    def _store(self) -> Path:
        return self._files / "store"

    def share(self, model: ModelConfig) -> Share:
        return share_of(model, 0, self.size)

    def connect(self, share: Share, vocab_size: int, memory_bytes: dict[str, int]) -> Communicator:
        for member, values in self._collect(FrameKind.LOADED):
            member.memory_bytes = values
        self._tell(FrameKind.CONNECT)
        try:
            return GlooCommunicator(share, self._store, vocab_size, self._timeout_s)
        except RankLost as error:
            raise self.lost(error) from None

    def least(self, num_blocks: int) -> int:
        numbers = [int(values["num_blocks"]) for _, values in self._collect(FrameKind.FITTING_BLOCKS)]
        least = min(num_blocks, *numbers)
        self._tell(FrameKind.NUM_BLOCKS, {"num_blocks": least})
        return least

    def await_ready(self) -> None:
        """Waits until the others can compute a step. Raises RankLost, and errors of ranks that could not load."""
        self._collect(FrameKind.READY)
        shutil.rmtree(self._files, ignore_errors=True)  # not before all have connected: they read what the others write
        for member in self.members:
            member.channel.limit_waits(self._timeout_s)

    def send(self, kind: FrameKind, payload: bytes) -> None:
        """Sends a frame to all ranks. Raises RankLost."""
        for member in self.members:
            try:
                member.channel.send(kind, payload)
            except (ChannelClosed, ChannelBroken) as error:
                raise self.lost(error) from None

    def watch(self, lost: Callable[[], None]) -> None:
        """Calls `lost` once from another thread, after logging why, when one of the ranks ends."""
        threading.Thread(target=self._watch, args=(lost,), name="ranks", daemon=True).start()

    def lost(self, error: Exception) -> RankLost:
        """Returns the error that says what has become of the ranks. `error` is what this rank has noticed."""
        self._is_lost = True
        return RankLost(f"the ranks no longer compute together: {self._describe()} ({error})")

    def close(self, *, at_once: bool = False) -> None:
        """Ends the other ranks. Those of a lost group are killed at once, because they may hang."""
        self._is_closing = True
        for member in self.members:
            member.channel.close()
            if at_once or self._is_lost:
                member.process.kill()
        for member in self.members:
            with suppress(subprocess.TimeoutExpired):
                member.process.wait(_END_S)
            member.process.kill()
            member.process.wait()
        shutil.rmtree(self._files, ignore_errors=True)

    def _tell(self, kind: FrameKind, values: dict[str, Any] | None = None) -> None:
        for member in self.members:
            with suppress(ChannelClosed):  # the next frame that is expected of it says why
                member.channel.send_values(kind, values or {})

    def _collect(self, expected: FrameKind) -> list[tuple[Member, dict[str, Any]]]:
        """Waits for this frame of each rank, and prints their progress meanwhile. Raises as `connect` does."""
        found: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for member in self.members:
                selector.register(member.channel, selectors.EVENT_READ, member)
            while len(found) < len(self.members):
                for key, _ in selector.select():
                    member = key.data
                    kind, values = self._receive(member)
                    if kind is FrameKind.PROGRESS:
                        self._say(f"rank {member.rank}: {values['line']}")
                    elif kind is expected:
                        found[member.rank] = values
                        selector.unregister(member.channel)
                    else:
                        raise RankLost(f"{member} sends {kind.name} in place of {expected.name}")
        return [(member, found[member.rank]) for member in self.members]

    def _receive(self, member: Member) -> tuple[FrameKind, dict[str, Any]]:
        """Returns a frame. Raises the error for which the rank has failed, and RankLost if it has ended."""
        try:
            kind, payload = member.channel.receive()
            values = values_of(payload)
        except ChannelClosed:
            raise RankLost(f"{member} {_last_state(member)}") from None
        except ChannelBroken as error:
            raise RankLost(f"{member} {error}") from None
        if kind is FrameKind.FAILED:
            raise _error_of(values, member)
        return kind, values

    def _watch(self, lost: Callable[[], None]) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                for member in self.members:
                    selector.register(member.channel, selectors.EVENT_READ, member)
                member = selector.select()[0][0].data
            kind, _ = self._receive(member)
            problem = f"{member} sends {kind.name} while it serves"
        except (ExecutorError, OSError, ValueError) as error:
            problem = str(error)
        if not self._is_closing:
            self._is_lost = True
            _log.critical("%s: the group of %d ranks ends", problem, self.size)
            lost()

    def _describe(self) -> str:
        """Returns the states of ranks that do not run; waits for a moment, because a process takes time to end."""
        until_s = time.monotonic() + _REASON_S
        while True:
            gone = [member for member in self.members if member.process.poll() is not None]
            stopped = [member for member in self.members if member.state() == f"is {psutil.STATUS_STOPPED}"]
            if gone or stopped or time.monotonic() > until_s:
                return ", ".join(f"{member} {member.state()}" for member in gone or stopped or self.members)
            time.sleep(0.05)


def _start(rank: int, setup: dict[str, Any]) -> Member:
    own, other = socket.socketpair()
    with other:
        command = (*interpreter(), "-m", _MODULE, str(other.fileno()))
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_LIFELINE), str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # where this process prints `ready`
            pass_fds=[other.fileno()],
        )
    channel = Channel(own)
    with suppress(ChannelClosed):  # then the rank is found to have ended
        channel.send_values(FrameKind.SETUP, setup | {"rank": rank})
    return Member(rank, process, channel)


def _last_state(member: Member) -> str:
    with suppress(subprocess.TimeoutExpired):
        member.process.wait(_REASON_S)
    return member.state()


def _error_of(values: dict[str, Any], member: Member) -> ExecutorError:
    """Returns the error that a rank reports: of the same class, as far as the executor has it."""
    kind = getattr(errors, str(values.get("kind")), None)
    text = f"rank {member.rank}: {values.get('text')}"
    if isinstance(kind, type) and issubclass(kind, ExecutorError):
        return kind(text)
    return RankLost(text)
