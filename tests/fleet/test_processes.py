"""The processes of one part: found again, told apart from others, and ended with all that they have started."""

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from fleet import processes
from fleet.proc import session_members, start_ticks
from fleet.processes import PartProcesses, Record
from tests.support.waiting import until

RECORD = Record("first", (), "unix:/a", "127.0.0.1:1", (), time.time())


def started(folder: Path, script: str, **fields: object) -> PartProcesses:
    processes = PartProcesses(folder)
    record = replace(RECORD, **{"command": (sys.executable, "-c", script)} | fields)  # type: ignore[arg-type]
    processes.start(record, dies_with_parent=False)
    return processes


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder of a part. What still runs there after the test is killed."""
    folder = tmp_path / "executor-0"
    yield folder
    PartProcesses(folder).kill()


async def test_a_new_controller_finds_the_process_and_ends_it(folder: Path) -> None:
    first = started(folder, "print('ready x', flush=True); import time; time.sleep(600)", peers=("a:1", "b:2"))
    await until(lambda: first.has_said_ready)
    again = PartProcesses(folder)
    assert again.record == first.record
    assert again.is_running
    assert again.has_said_ready
    assert again.peers_file.read_text() == "a:1\nb:2\n"
    again.tell(("c:3",))
    assert again.peers_file.read_text() == "c:3\n"
    again.kill()
    await until(lambda: not again.is_running)
    assert not again.has_said_ready or again.record is not None
    assert again.record is not None
    assert again.record.has_ended


async def test_the_exit_code_and_the_log_are_kept(folder: Path) -> None:
    processes = started(folder, "import sys; print('no', file=sys.stderr); sys.exit(7)")
    await until(lambda: not processes.is_running)
    assert processes.record is not None
    assert processes.record.exit_code == 7
    assert processes.tail() == "no\n"
    processes.start(replace(RECORD, incarnation="second", command=(sys.executable, "-c", "")), dies_with_parent=False)
    await until(lambda: not processes.is_running)
    assert (folder / "log.1").read_text() == "no\n"


async def test_a_process_that_ends_while_it_is_looked_at_keeps_its_exit_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no moment between two looks in which it has ended and its exit code is unknown."""
    processes = started(folder, "import time; time.sleep(600)")
    process = processes._process
    assert process is not None
    poll = process.poll

    def poll_then_end() -> int | None:
        found = poll()
        os.kill(process.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return found

    monkeypatch.setattr(process, "poll", poll_then_end)
    first = processes.is_running
    monkeypatch.undo()
    assert first
    await until(lambda: not processes.is_running)
    assert processes.record is not None
    assert processes.record.exit_code == -signal.SIGKILL


async def test_a_part_has_ended_when_its_whole_session_has(folder: Path) -> None:
    """A rank that outlives the first process of its gang is killed, before the place is given away."""
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    processes = started(folder, f"{child}; print('ready', flush=True); import time; time.sleep(600)")
    await until(lambda: len(session_members(processes.record.pid if processes.record else 0)) == 2)
    assert processes.record is not None
    session = processes.record.pid
    os.kill(session, signal.SIGKILL)
    await until(lambda: start_ticks(session) is None)
    assert processes.is_running, "the second process holds the place"
    await until(lambda: not processes.is_running)
    assert session_members(session) == []


async def test_a_process_is_found_whose_controller_died_before_it_was_noted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = []

    def dies(pid: int, **_: bool) -> int:
        pids.append(pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "start_ticks", dies)
    with pytest.raises(KeyboardInterrupt):
        started(folder, f"{str(folder)!r}; print('ready x', flush=True); import time; time.sleep(600)")
    monkeypatch.undo()
    # The kernel shows a command shortly after the process has begun. The next controller takes half a second.
    await until(lambda: Path(f"/proc/{pids[0]}/cmdline").read_bytes())
    again = PartProcesses(folder)
    assert again.is_running
    await until(lambda: again.has_said_ready)
    with pytest.raises(RuntimeError, match="is running"):
        again.start(RECORD, dies_with_parent=False)
    again.kill()
    await until(lambda: not again.is_running)


@pytest.mark.parametrize("num_writes", [0, 1])
async def test_no_process_is_forgotten_that_starts_while_the_disk_fills_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_writes: int
) -> None:
    """It is started when its record is kept, or not at all."""
    write, written = processes.write_atomically, []

    def fills_up(path: Path, text: str) -> None:
        if len(written) == num_writes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, text)
        written.append(path)

    monkeypatch.setattr(processes, "write_atomically", fills_up)
    script = f"{str(folder)!r}; import time; time.sleep(600)"
    with suppress(OSError):
        assert started(folder, script).is_running
    assert PartProcesses(folder).is_running is bool(num_writes)
    assert len(processes_of(script)) == num_writes


def processes_of(script: str) -> list[int]:
    """Returns the processes that run a script."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if process.joinpath("cmdline").read_bytes().endswith(f"-c\0{script}\0".encode()):
                found.append(int(process.name))
    return found


@pytest.mark.parametrize("leads_a_session", [False, True])
def test_a_number_that_another_process_has_now_is_left_alone(folder: Path, leads_a_session: bool) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    other = subprocess.Popen(command, start_new_session=leads_a_session)
    try:
        ticks = start_ticks(other.pid)
        assert ticks is not None
        folder.mkdir()
        stale = replace(RECORD, pid=other.pid, start_ticks=ticks - 1)
        (folder / "record.json").write_text(json.dumps({**_as_dict(stale)}))
        processes = PartProcesses(folder)
        assert not processes.is_running
        processes.kill()
        processes.drain(breaks_off=True, pause_s=0.0)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


async def test_a_session_of_another_boot_is_left_alone(folder: Path) -> None:
    """Numbers begin anew with a boot, so that a session of the same number can be of others."""
    processes = started(folder, "import time; time.sleep(600)")
    assert processes.record is not None
    (folder / "record.json").write_text(json.dumps(_as_dict(replace(processes.record, boot="another"))))
    after = PartProcesses(folder)
    assert not after.is_running
    after.kill()
    assert processes.is_running
    processes.kill()


async def test_a_second_signal_breaks_streams_off(folder: Path) -> None:
    script = (
        "import signal, sys, time\ncount = []\n"
        "def end(*_):\n    count.append(1)\n    print('told', flush=True)\n    len(count) == 2 and sys.exit(9)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('ready x', flush=True)\n"
        "while True: time.sleep(0.01)"
    )
    processes = started(folder, script)
    await until(lambda: processes.has_said_ready)
    processes.drain(breaks_off=False)
    await until(lambda: "told" in (folder / "out").read_text())
    assert processes.is_running
    assert processes.record is not None
    assert processes.record.is_draining
    processes.drain(breaks_off=False)
    await asyncio.sleep(0.1)
    assert (folder / "out").read_text().count("told") == 1, "it drains already"
    os.kill(processes.record.pid, signal.SIGTERM)
    await until(lambda: not processes.is_running)
    assert processes.record.exit_code == 9
    processes.start(replace(processes.record, is_draining=False, has_ended=False), dies_with_parent=False)
    await until(lambda: processes.has_said_ready)
    processes.drain(breaks_off=True, pause_s=0.2)
    await until(lambda: not processes.is_running)
    assert processes.record.exit_code == 9


def test_a_command_that_cannot_be_started_has_ended(folder: Path) -> None:
    processes = PartProcesses(folder)
    processes.start(replace(RECORD, command=("/nowhere/quire",)), dies_with_parent=False)
    assert not processes.is_running
    assert "/nowhere/quire" in processes.tail()


def test_a_part_that_runs_is_not_started_twice(folder: Path) -> None:
    processes = started(folder, "import time; time.sleep(600)")
    try:
        with pytest.raises(RuntimeError, match="executor-0"):
            processes.start(RECORD, dies_with_parent=False)
    finally:
        processes.kill()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"command": 7, "peers": []}', "[" * 100_000])
async def test_a_damaged_record_ends_its_part_and_no_other(
    folder: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The part is then started anew. Its processes are told from others by the paths in their command."""
    scripts = [f"'{path}/socket'; import time; time.sleep(600)" for path in (folder, f"{folder}1", folder)]
    part = started(folder, scripts[0], command=(sys.executable, "-c", scripts[0], "executor"))
    other, reader = alone(scripts[1], "executor"), alone(scripts[2], "executor.log")
    try:
        assert part.record is not None
        await until(lambda: b"socket" in Path(f"/proc/{reader.pid}/cmdline").read_bytes())
        (folder / "record.json").write_text(text)
        again = PartProcesses(folder)
        assert again.record is not None
        assert again.record.pid == part.record.pid
        await until(lambda: not again.is_running)
        assert "record.json cannot be used" in caplog.text
        assert PartProcesses(folder).record == again.record
        assert (other.poll(), reader.poll()) == (None, None)
    finally:
        for process in (other, reader):
            process.kill()
            process.wait()


def alone(script: str, word: str) -> subprocess.Popen[bytes]:
    """Starts a process of no part."""
    return subprocess.Popen([sys.executable, "-c", script, word], start_new_session=True)


def test_a_record_of_another_version_is_read(folder: Path) -> None:
    folder.mkdir()
    (folder / "record.json").write_text(json.dumps({**_as_dict(replace(RECORD, has_ended=True)), "new": 1}))
    assert PartProcesses(folder).record == replace(RECORD, has_ended=True)


def _as_dict(record: Record) -> dict[str, object]:
    return {name: getattr(record, name) for name in record.__slots__}


async def test_a_process_is_ended_while_the_disk_is_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    part = started(folder, "print('ready x', flush=True); import time; time.sleep(600)")
    await until(lambda: part.has_said_ready)
    monkeypatch.setattr(processes, "write_atomically", full)
    with pytest.raises(OSError, match="No space"):
        part.tell(("a:1",))
    part.drain(breaks_off=False)
    await until(lambda: not part.is_running)
    assert part.record is not None
    assert part.record.exit_code == -signal.SIGTERM
    assert PartProcesses(folder).is_running is False  # the file says that it runs


def test_a_file_is_on_the_disk_before_it_replaces_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that, a failure of power can leave an empty record, with which the fleet can no longer be controlled."""
    path, on_disk = tmp_path / "record.json", []
    path.write_text("old")

    def fsync(descriptor: int) -> None:
        on_disk.append((path.read_text(), Path(f"/proc/self/fd/{descriptor}").read_text()))

    monkeypatch.setattr(os, "fsync", fsync)
    processes.write_atomically(path, "new")
    assert on_disk == [("old", "new")]
    assert path.read_text() == "new"


async def test_a_log_does_not_fill_the_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_MAX_LOG_BYTES", 1000)
    script = (
        "import sys, time; write = lambda text: print(text, file=sys.stderr, flush=True)\n"
        f"write('a' * 2000)\nwhile not __import__('os').path.exists({str(folder / 'log.1')!r}): time.sleep(0.01)\n"
        "time.sleep(0.2); write('b' * 500); time.sleep(600)"
    )
    part = started(folder, script)
    await until(lambda: part.tail().endswith("a\n"))
    assert not (folder / "log.1").exists()
    part.shorten_log()
    assert (folder / "log.1").read_text() == "a" * 2000 + "\n"
    await until(lambda: (folder / "log").read_text() == "b" * 500 + "\n")
    part.shorten_log()
    assert part.tail() == "b" * 500 + "\n"
