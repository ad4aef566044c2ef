"""Reads all files of a model's weights beside their loading: checks them, and makes the digest that identifies them.

The digest covers config.json and the contents of each safetensors file that is loaded, so a scheduler notices when
other weights have the same name, even if a single number differs. Files whose digests are known (`quire.checksums`) are
compared, also those that are not loaded.
"""

import hashlib
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from executor.checkpoints.checkpoint import weight_files
from executor.errors import CheckpointError
from quire.checksums import WEIGHT_FILES, ChecksumError, KnownFile, file_digest, known_files

MAX_THREADS = 4
"""Files that are read at once. A thread reads about 1.5 GB/s from memory, and a disk is rarely faster than four."""


class WeightsCheck:
    """A check that begins at once, in threads; a context in which the weights are loaded.

    If loading fails with a CheckpointError, the context waits for the check, whose error names the damaged file.
    """

    def __init__(self, directory: Path, *, is_random: bool) -> None:
        """Checks small files before it returns. Random weights have no others: they depend on config.json alone.

        Raises CheckpointError.
        """
        self._directory, self._is_random = directory, is_random
        self._is_stopped = threading.Event()
        self._known: dict[Path, KnownFile] = {}
        self._digests: dict[Path, Future[str]] = {}
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="checksum")
        try:
            patterns = WEIGHT_FILES[:1] if is_random else WEIGHT_FILES
            for known in known_files(directory, patterns):
                self._known[known.path] = known
                if known.path.suffix != ".safetensors":
                    known.check()
        except ChecksumError as error:
            raise CheckpointError(str(error)) from None
        if not (directory / "config.json").is_file():
            raise CheckpointError(f"{directory}: no config.json")
        large = [path for path in self._known if path.suffix == ".safetensors"]
        self._loaded = frozenset[Path]() if is_random else frozenset(weight_files(directory))
        for path in [] if is_random else sorted({*large, *self._loaded}):
            self._digests[path] = self._threads.submit(self._read, path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, CheckpointError):
                self._results()
        finally:
            self._is_stopped.set()
            self._threads.shutdown(cancel_futures=True)

    def digest(self) -> str:
        """Waits for the check. Returns the digest of the weights as 64 hexadecimal digits. Raises CheckpointError."""
        whole = hashlib.sha256(b"random" if self._is_random else b"safetensors")
        _add(whole, (self._directory / "config.json").read_bytes())
        for path, found in self._results():
            if path in self._loaded:
                _add(whole, path.name.encode())
                _add(whole, found.encode())
        return whole.hexdigest()

    def _results(self) -> list[tuple[Path, str]]:
        """Waits for the check. Returns the digest of each file. Raises CheckpointError."""
        try:
            return [(path, digest.result()) for path, digest in self._digests.items()]
        except ChecksumError as error:
            raise CheckpointError(str(error)) from None

    def _read(self, path: Path) -> str:
        """Returns the SHA-256 of a file. Raises ChecksumError."""
        found = file_digest(path, goes_on=lambda: not self._is_stopped.is_set())
        if path in self._known and not self._is_stopped.is_set():
            self._known[path].check(found)
        return found


def _add(digest: "hashlib._Hash", data: bytes) -> None:
    """Adds a field with its length, so that no two lists of fields give the same bytes."""
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)
