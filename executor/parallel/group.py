"""The group of ranks as rank 0 sees it: the other ranks are its child processes, and receive launches from it.

Ranks of other machines join it instead (`joining.py`), and receive the same.

The group lives and dies as one. A rank whose channel closes has ended, and so has the group: this process ends, and the
scheduler recovers as from any lost executor. The other ranks die with this process, however it ends.
"""

import logging
import selectors
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

from executor import errors
from executor.checkpoints.model_config import ModelConfig
from executor.checkpoints.shares import Share, share_of
from executor.config import ExecutorConfig
from executor.errors import CheckpointError, ExecutorError, RankLost
from executor.models.communicator import Communicator
from executor.parallel.channel import Channel, ChannelBroken, ChannelClosed, FrameKind, values_of
from executor.parallel.gloo import LOOPBACK, GlooCommunicator
from executor.parallel.joining import RankListener, read_key
from executor.parallel.member import Member, set_up, start_member
from executor.parallel.rendezvous import Addresses, AddressStore, addresses_of

_log = logging.getLogger(__name__)

_REASON_S = 2.0
"""Time to wait for the process of a rank to end, so that its exit status can be told."""

_SAY_S = 30.0
"""While ranks of other machines are missing, a line says so in intervals of this length, or of half the time after
which an executor that says nothing is given up. A rank that is stopped for as long while it loads is lost, and others
that say nothing for as long are named."""

_LOOK_S = 1.0
"""Time between two looks at the ranks of this machine, while ranks of other machines or frames are missing."""

Say = Callable[[str], None]


class RankGroup:
    """All ranks but this one. Implements `executor.parallel.ranks.Ranks` for rank 0."""

    def __init__(self, config: ExecutorConfig, directory: Path, say: Say) -> None:
        """Starts a process for each of the other ranks of this machine, and waits for those of other machines.

        Each loads its share at once. The processes end when the thread that calls this ends. directory: that of the
        model. Raises ConfigError, AddressInUse and AddressUnusable.
        """
        self.size = config.tensor_parallel_size
        self._say = say
        self._timeout_s = config.step_timeout_s
        self._say_s = min(_SAY_S, config.load_timeout_s / 2)
        self._is_closing = self._is_lost = False
        listener: RankListener | None = None
        self._host = LOOPBACK
        if config.remote_ranks:
            listener = RankListener(config.ranks_listen or "", read_key(config.ranks_key or ""))
            self._host = listener.host
        setup = {"config": asdict(config), "directory": str(directory), "host": self._host}
        self.members = [start_member(rank, setup) for rank in range(1, config.num_local_ranks)]
        if listener is not None:
            try:
                self._let_in(listener, config.remote_ranks, setup)
            except BaseException:
                self.close(at_once=True)
                raise
            finally:
                listener.close()

    def share(self, model: ModelConfig) -> Share:
        return share_of(model, 0, self.size)

    def connect(self, share: Share, vocab_size: int, memory_bytes: dict[str, int]) -> Communicator:
        for member, values in self._collect(FrameKind.LOADED):
            member.memory_bytes = values
        self._tell(FrameKind.CONNECT)
        try:
            return GlooCommunicator(share, AddressStore(self._exchange), vocab_size, self._timeout_s, self._host)
        except RankLost as error:
            raise self.lost(error) from None

    def least(self, num_blocks: int) -> int:
        numbers = [int(values["num_blocks"]) for _, values in self._collect(FrameKind.FITTING_BLOCKS)]
        least = min(num_blocks, *numbers)
        self._tell(FrameKind.NUM_BLOCKS, {"num_blocks": least})
        return least

    def await_ready(self, weights_digest: str) -> None:
        """Waits until the others can compute a step. Raises RankLost, and errors of ranks that could not load.

        Ranks of other machines say which weights they have: CheckpointError if they have others than rank 0.
        """
        for member, values in self._collect(FrameKind.READY):
            if values.get("digest", weights_digest) != weights_digest:
                raise CheckpointError(f"{member} has other weights, or another config.json, than rank 0")
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
                member.kill()
        for member in self.members:
            member.end()

    def _let_in(self, listener: RankListener, num_ranks: int, setup: dict[str, Any]) -> None:
        """Waits until so many ranks have joined, and tells them the settings.

        Meanwhile it prints the progress of the ranks of this machine, and raises their errors as `connect` does.
        """
        joined: list[Channel] = []
        said_s = -inf
        while len(joined) < num_ranks:
            if time.monotonic() - said_s >= self._say_s:
                self._say(f"waiting at {listener.address} for {num_ranks - len(joined)} ranks of other machines")
                said_s = time.monotonic()
            if (channel := listener.next(min(_LOOK_S, self._say_s))) is not None:
                self._say(f"a rank has joined from {channel.peer}")
                joined.append(channel)
            joined = [channel for channel in joined if not channel.has_frame()]  # those that have not left again
            for member in self.members:
                # `connect` collects what a rank has loaded, unless the rank has ended: after its last frame this raises
                while member.is_gone or (member.channel.has_frame() and not member.channel.is_next(FrameKind.LOADED)):
                    self._take(member, FrameKind.LOADED)
        for channel in joined:
            self.members.append(Member(len(self.members) + 1, channel, None, channel.peer))
            set_up(self.members[-1], setup)

    def _exchange(self, own: Addresses) -> Addresses:
        addresses = dict(own)
        for _, values in self._collect(FrameKind.ADDRESS):
            addresses |= addresses_of(values)
        self._tell(FrameKind.ADDRESSES, addresses)
        return addresses

    def _tell(self, kind: FrameKind, values: dict[str, Any] | None = None) -> None:
        for member in self.members:
            with suppress(ChannelClosed):  # the next frame that is expected of it says why
                member.channel.send_values(kind, values or {})

    def _collect(self, expected: FrameKind) -> list[tuple[Member, dict[str, Any]]]:
        """Waits for this frame of each rank, and prints their progress meanwhile. Raises as `connect` does."""
        found: dict[int, dict[str, Any]] = {}
        silent_s = stopped_s = 0.0  # looks are counted, so that a whole group that was stopped goes on
        with selectors.DefaultSelector() as selector:
            for member in self.members:
                selector.register(member.channel, selectors.EVENT_READ, member)
            while len(found) < len(self.members):
                events = selector.select(_LOOK_S)
                if not events:
                    stopped = next((member for member in self.members if member.is_stopped), None)
                    stopped_s = 0.0 if stopped is None else stopped_s + _LOOK_S
                    if stopped_s > self._say_s:
                        raise RankLost(f"{stopped} is stopped")
                    silent_s += _LOOK_S
                    if self._say_s < silent_s <= self._say_s + _LOOK_S:
                        missing = [str(member) for member in self.members if member.rank not in found]
                        _log.warning("waiting for %s, without a line for %g s", ", ".join(missing), self._say_s)
                for key, _ in events:
                    silent_s, member = 0.0, key.data
                    if (values := self._take(member, expected)) is not None:
                        found[member.rank] = values
                        selector.unregister(member.channel)
        return [(member, found[member.rank]) for member in self.members]

    def _take(self, member: Member, expected: FrameKind) -> dict[str, Any] | None:
        """Receives a frame and returns its values, or prints the progress in it and returns None.

        Raises RankLost for any other frame, and as `_receive` does.
        """
        kind, values = self._receive(member)
        if kind is FrameKind.PROGRESS:
            self._say(f"rank {member.rank}: {values['line']}")
            return None
        if kind is not expected:
            raise RankLost(f"{member} sends {kind.name} in place of {expected.name}")
        return values

    def _receive(self, member: Member) -> tuple[FrameKind, dict[str, Any]]:
        """Returns a frame. Raises the error for which the rank has failed, and RankLost if it has ended."""
        try:
            kind, payload = member.channel.receive()
            values = values_of(payload)
        except ChannelClosed:
            raise RankLost(f"{member} {member.last_state()}") from None
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
            gone = [member for member in self.members if member.is_gone]
            stopped = [member for member in self.members if member.is_stopped]
            if gone or stopped or time.monotonic() > until_s:
                return ", ".join(f"{member} {member.state()}" for member in gone or stopped or self.members)
            time.sleep(0.05)


def _error_of(values: dict[str, Any], member: Member) -> ExecutorError:
    """Returns the error that a rank reports: of the same class, as far as the executor has it."""
    kind = getattr(errors, str(values.get("kind")), None)
    text = f"rank {member.rank}: {values.get('text')}"
    if isinstance(kind, type) and issubclass(kind, ExecutorError):
        return kind(text)
    return RankLost(text)
