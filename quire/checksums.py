"""Checks the files of a model against digests that came with them, so that no damaged file is served.

There are two sources. A manifest is a file SHA256SUMS in the model's directory, as `sha256sum` writes and checks it. A
snapshot in the cache of the Hugging Face hub consists of links to files that are named by their digests. Without
either, nothing is known and nothing is refused.

The check finds damage and mix-ups. It is no proof against a writer of the directory: it can change the manifest too,
or a file after the check.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

MANIFEST = "SHA256SUMS"
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
"""The only file of a model that is in a folder. Transformers keeps named chat templates there."""

TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    TOOL_TEMPLATE,
    "generation_config.json",
    "config.json",
)
"""The files of a model that the scheduler reads."""

WEIGHT_FILES = ("config.json", "model.safetensors.index.json", "*.safetensors")
"""Patterns of the files that the executor reads."""

_MAX_MANIFEST_BYTES = 1 << 20
_MAX_LINE = 512
_PIECE_BYTES = 1 << 20
_LINE = re.compile(r"(?P<digest>[0-9a-fA-F]{64}) [ *](?P<name>.+)")
_DIGEST_BITS = {64: "sha256", 40: "git"}
"""The hub names a file by a digest of this many hexadecimal digits: large files by SHA-256, others by git's SHA-1."""


class ChecksumError(Exception):
    """A file differs from its digest, is missing or is not listed, or a manifest is malformed. Names the file."""


@dataclass(frozen=True, slots=True)
class KnownFile:
    """A file, the digest that it must have, and the source that says so. kind: "sha256" or "git"."""

    path: Path
    kind: str
    digest: str
    source: str

    def check(self, found: str | None = None, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Raises ChecksumError if the contents differ. found: their SHA-256, if it is known already."""
        if self.kind == "git" or found is None:
            found = file_digest(self.path, self.kind, goes_on)
        if found != self.digest:
            raise ChecksumError(
                f"{self.path}: the file is damaged or was changed: its digest is {found[:16]}…, "
                f"but {self.source} says {self.digest[:16]}…"
            )


def verify(directory: Path, patterns: Sequence[str]) -> None:
    """Checks all files with a known digest whose names match. Raises ChecksumError."""
    for known in known_files(directory, patterns):
        known.check()


def known_files(directory: Path, patterns: Sequence[str]) -> list[KnownFile]:
    """Returns the files with a known digest whose names match, in the order of their names.

    With a manifest, raises ChecksumError for a listed file that is missing, a file that is not listed, and a link.
    """
    present = [path for path in _matching(directory, patterns) if path.exists() or path.is_symlink()]
    listed = read_manifest(directory)
    if listed is None:
        return [known for path in present if (known := _hub_file(path)) is not None]
    for name in sorted(listed):
        if any(fnmatchcase(name, pattern) for pattern in patterns) and directory / name not in present:
            raise ChecksumError(f"{directory / name}: missing, but {MANIFEST} lists it")
    digests: list[KnownFile] = []
    for path in present:
        name = path.relative_to(directory).as_posix()
        if name not in listed:
            raise ChecksumError(f"{path}: {MANIFEST} does not list it (`quire checksum {directory}` writes it again)")
        _check_regular(path)
        digests.append(KnownFile(path, "sha256", listed[name], MANIFEST))
    return digests


def read_manifest(directory: Path) -> dict[str, str] | None:
    """Returns the SHA-256 of each file that the manifest lists; None without a manifest. Raises ChecksumError."""
    path = directory / MANIFEST
    if not path.exists() and not path.is_symlink():
        return None
    _check_regular(path)
    with _readable(path), path.open("rb") as file:
        content = file.read(_MAX_MANIFEST_BYTES + 1)
    if len(content) > _MAX_MANIFEST_BYTES:
        raise ChecksumError(f"{path}: larger than {_MAX_MANIFEST_BYTES:,} bytes")
    try:
        lines = content.decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ChecksumError(f"{path}: not UTF-8: {error}") from None
    listed: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.startswith("#"):
            name, digest = _entry(line, f"{path}, line {number}")
            if name in listed:
                raise ChecksumError(f"{path}, line {number}: {name!r} is listed twice")
            listed[name] = digest
    return listed


def write_manifest(directory: Path) -> list[str]:
    """Writes the manifest of all files that the services read; returns their names. Raises ChecksumError."""
    names: list[str] = []
    lines: list[str] = []
    for path in _matching(directory, (*TEXT_FILES, *WEIGHT_FILES)):
        _check_regular(path)
        names.append(path.relative_to(directory).as_posix())
        lines.append(f"{file_digest(path)}  {names[-1]}\n")
    if "config.json" not in names:
        raise ChecksumError(f"{directory}: not the directory of a model: it has no config.json")
    unfinished = directory / f".{MANIFEST}.{os.getpid()}"
    with _readable(directory / MANIFEST):
        unfinished.write_text("".join(lines), encoding="utf-8")
        unfinished.replace(directory / MANIFEST)
    return names


def file_digest(path: Path, kind: str = "sha256", goes_on: Callable[[], bool] = lambda: True) -> str:
    """Returns the digest of a file's contents, "" if `goes_on` has said no. Other threads run meanwhile."""
    with _readable(path), path.open("rb", buffering=0) as file:
        digest = hashlib.sha256()
        if kind == "git":
            digest = hashlib.sha1(b"blob %d\0" % os.fstat(file.fileno()).st_size, usedforsecurity=False)
        piece = memoryview(bytearray(_PIECE_BYTES))
        while num_bytes := file.readinto(piece):
            if not goes_on():
                return ""
            digest.update(piece[:num_bytes])
    return digest.hexdigest()


def _entry(line: str, where: str) -> tuple[str, str]:
    if len(line) > _MAX_LINE:
        raise ChecksumError(f"{where}: longer than {_MAX_LINE} characters")
    if (match := _LINE.fullmatch(line)) is None:
        raise ChecksumError(f"{where}: expected 64 hexadecimal digits, two spaces and a file name, as sha256sum writes")
    name = match["name"]
    if name == TOOL_TEMPLATE:
        return name, match["digest"].lower()
    if "/" in name or "\\" in name or name in (".", "..") or not name.isprintable():
        raise ChecksumError(f"{where}: {name!r} is not the name of a file in the manifest's directory")
    return name, match["digest"].lower()


def _matching(directory: Path, patterns: Sequence[str]) -> list[Path]:
    with _readable(directory):
        names = sorted(os.listdir(directory))
        if os.path.lexists(directory / TOOL_TEMPLATE):
            names.append(TOOL_TEMPLATE)
    return [directory / name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _hub_file(path: Path) -> KnownFile | None:
    """Returns a file of the hub's cache with the digest in its name: `snapshots/…/name` links to `blobs/digest`."""
    if not path.is_symlink():
        return None
    blob = Path(os.readlink(path))
    kind = _DIGEST_BITS.get(len(blob.name)) if re.fullmatch("[0-9a-f]+", blob.name) else None
    if blob.parent.name != "blobs" or kind is None:
        return None
    return KnownFile(path, kind, blob.name, "the hub")


def _check_regular(path: Path) -> None:
    if path.is_symlink() and _hub_file(path) is None:
        raise ChecksumError(f"{path}: a link; a manifest and the files that it lists have to be regular files")
    if not path.is_file():
        raise ChecksumError(f"{path}: not a regular file")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ChecksumError(f"{path}: {error.strerror or error}") from None
