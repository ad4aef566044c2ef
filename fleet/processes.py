"""The processes of one part on this machine: starts them, finds them again, and ends them.

Everything that is known of an incarnation is in files of its folder, so that a controller that was restarted finds the
processes that the last one has started. A process is recognized by its number and its start time, because the system
gives numbers away again. Each part leads a session of its own; it has ended when no process of the session is left.

    FOLDER/record.json   incarnation, command, addresses, and the process
    FOLDER/peers         addresses that it was told: an executor's for a scheduler, schedulers' for a gateway
    FOLDER/out, log      standard output and standard error of this incarnation; out.1, log.1: of the one before
"""

import json
import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from fleet.proc import boot_id, session_leaders, session_members, start_ticks
from quire.command import lifeline

_log = logging.getLogger(__name__)

_MAX_TAIL_BYTES = 4096
_MAX_LOG_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Record:
    """One incarnation, as its file describes it.

    pid, start_ticks  its first process and when that started, since boot; a pid of 0: none was started, or the
                      controller died before it noted it
    boot              identifies that boot of the system; empty: not known
    """

    incarnation: str
    command: tuple[str, ...]
    address: str
    http: str
    peers: tuple[str, ...]
    started_s: float
    pid: int = 0
    start_ticks: int = 0
    boot: str = ""
    is_draining: bool = False
    has_ended: bool = False
    exit_code: int | None = None


class PartProcesses:
    """The last incarnation of a part. Not safe for use by several threads at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        try:
            record = _read_record(folder / "record.json")
        except ValueError as error:
            _log.error("%s: what runs of this part is ended", error)
            self.record = _of_folder(folder)
            self.kill()
        else:
            self.record = record if record is None or record.pid or record.has_ended else _with_process(record)

    @property
    def peers_file(self) -> Path:
        return self.folder / "peers"

    @property
    def is_running(self) -> bool:
        """False if no process is left. Processes that outlive the first one are killed."""
        record = self.record
        if record is None or record.has_ended:
            return False
        if self._process is not None:
            if self._process.poll() is None:
                return True
            record = self.record = replace(record, exit_code=self._process.returncode)
        elif record.pid and _is_of_this_boot(record) and start_ticks(record.pid) == record.start_ticks:
            return True
        left = session_members(record.pid) if _could_have_members(record) else []
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if left:
            return True
        self._note(replace(record, has_ended=True))
        return False

    @property
    def has_said_ready(self) -> bool:
        """True if the incarnation has printed a line that begins with `ready`."""
        with suppress(OSError), open(self.folder / "out", "rb") as out:
            return any(line.startswith(b"ready ") for line in out)
        return False

    def start(
        self,
        record: Record,
        *,
        environment: Mapping[str, str] | None = None,
        dies_with_parent: bool,
    ) -> None:
        """Starts an incarnation. If the system cannot start a process, the incarnation has ended at once.

        environment       None: that of this process
        dies_with_parent  the kernel kills it when the thread that calls this has ended
        """
        if self.is_running:
            raise RuntimeError(f"{self.folder.name} is running")
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("out", "log"):
            with suppress(FileNotFoundError):
                os.replace(self.folder / name, self.folder / f"{name}.1")
        if record.peers:
            self._write_peers(record.peers)
        else:
            self.peers_file.unlink(missing_ok=True)
        self._process = None
        # It is written before there is a process: a controller that dies meanwhile, or a full disk, must leave none
        # that the next controller does not know.
        record = replace(record, boot=boot_id())
        self._write(record)
        behind = lifeline() if dies_with_parent else ()
        with open(self.folder / "out", "wb") as out, open(self.folder / "log", "ab") as log:
            try:
                self._process = subprocess.Popen(
                    (*behind, *record.command),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=log,
                    start_new_session=True,
                    env=None if environment is None else dict(environment),
                )
            except OSError as error:
                log.write(f"cannot start {record.command[0]}: {error.strerror}\n".encode())
        if self._process is not None:
            pid = self._process.pid
            self._note(replace(record, pid=pid, start_ticks=start_ticks(pid, with_zombies=True) or 0))

    def tell(self, peers: Sequence[str]) -> None:
        """Writes the addresses of the peers."""
        if self.record is not None:
            self._write_peers(peers)
            self._write(replace(self.record, peers=tuple(peers)))

    def drain(self, *, breaks_off: bool, pause_s: float = 0.5) -> None:
        """Sends SIGTERM; with `breaks_off` twice, so that it ends without waiting for its streams.

        Does nothing if the incarnation drains already: a further signal would break its streams off.
        """
        if self.record is None or self.record.is_draining or not self.is_running:
            return
        self._note(replace(self.record, is_draining=True))
        self._send(signal.SIGTERM)
        if breaks_off:
            # A signal that came at once could be merged with the first one. Other processes drain meanwhile.
            second = threading.Timer(pause_s, self._break_off)
            second.daemon = True
            second.start()

    def _break_off(self) -> None:
        if self.record is not None and self.record.is_draining:  # it may have been replaced meanwhile
            self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Kills the processes of the session. `is_running` says when they are gone."""
        record = self.record
        if record is None or not record.pid or not self.is_running:
            return
        for pid in {record.pid, *session_members(record.pid)}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def tail(self) -> str:
        """Returns the end of the log."""
        with suppress(OSError), open(self.folder / "log", "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _MAX_TAIL_BYTES))
            return log.read().decode(errors="replace")
        return ""

    def shorten_log(self) -> None:
        """Moves what is in the log to `log.1` if it is long. Lines that are written meanwhile can be lost."""
        log = self.folder / "log"
        with suppress(OSError):
            if log.stat().st_size > _MAX_LOG_BYTES:
                with suppress(OSError):  # on a full disk, the log is given up
                    shutil.copyfile(log, self.folder / "log.1")
                os.truncate(log, 0)  # the process appends to it

    def _send(self, number: signal.Signals) -> None:
        record = self.record
        if record is not None and record.pid and start_ticks(record.pid) == record.start_ticks:
            with suppress(ProcessLookupError):
                os.kill(record.pid, number)

    def _write_peers(self, peers: Sequence[str]) -> None:
        write_atomically(self.peers_file, "".join(f"{peer}\n" for peer in peers))

    def _note(self, record: Record) -> None:
        """Keeps a change; without the file, on a full disk. A controller that is restarted finds out most of it."""
        with suppress(OSError):
            self._write(record)

    def _write(self, record: Record) -> None:
        self.record = record
        write_atomically(self.folder / "record.json", json.dumps(asdict(record)))


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file, so that a reader sees the old text or the new one, also after a failure of power."""
    new = path.with_name(f"{path.name}.new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def _with_process(record: Record) -> Record:
    """Returns the record of a controller that died while it started a process, with that process if it is there.

    It has the recorded command, whose paths no other part has, and leads a session.
    """
    command = b"".join(os.fsencode(word) + b"\0" for word in record.command)
    if command and _is_of_this_boot(record):
        for pid, ticks in session_leaders(lambda line: line == command):
            return replace(record, pid=pid, start_ticks=ticks)
    return record


def _of_folder(folder: Path) -> Record | None:
    """Returns a record of the process whose command names files in the folder of a part; None if there is none."""
    service, path = folder.name.rpartition("-")[0].encode(), os.fsencode(folder) + b"/"
    for pid, ticks in session_leaders(lambda line: service in line.split(b"\0") and path in line):
        return Record(f"process-{pid}", (), "", "", (), time.time(), pid, ticks, boot_id())
    return None


def _could_have_members(record: Record) -> bool:
    """Returns whether processes of the record's session can be left.

    The system gives no number away that a session has: if its leader's number belongs to another process, none is left.
    """
    if not record.pid or not _is_of_this_boot(record):
        return False
    return start_ticks(record.pid, with_zombies=True) in (None, record.start_ticks)


def _is_of_this_boot(record: Record) -> bool:
    return record.boot in ("", boot_id())


def _read_record(path: Path) -> Record | None:
    """Leaves out fields that another version has. Raises ValueError for a file that is no record."""
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = {each.name: value[each.name] for each in fields(Record) if each.name in value}
        return Record(**known | {"command": tuple(value["command"]), "peers": tuple(value["peers"])})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} cannot be used: {error}") from None
