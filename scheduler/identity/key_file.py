"""The file of keys: `quire keys` writes it, the scheduler reads it.

    {"keys":         [{"name": "ci", "tenant": "build", "roles": ["generate"], "sha256": "…"}],
     "certificates": [{"name": "billing", "tenant": "billing", "roles": ["generate"], "san": "billing.example"}]}

A key has 256 random bits, so SHA-256 is enough: trying all keys is impossible even with a fast hash. A slow hash with a
salt protects passwords, because people choose them, and it would slow every call. The file does not reveal the keys.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import stat
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scheduler.identity.identity import Identity, Role, is_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PREFIX = "qk_"
"""Begins each key, so that people and secret scanners recognise one."""

INDEX_BYTES = 16
"""Bytes of a digest by which a key is found. The rest is compared in constant time."""

_KEY_BYTES = 32
_ROOMS = {"keys": "sha256", "certificates": "san"}


class KeyFileError(ValueError):
    """The file cannot be used, or a change does not fit it. The message names the file and never contains a key."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The identities in a key file.

    by_digest       the SHA-256 digest of each key with its identity, found by the digest's first INDEX_BYTES
    by_certificate  identities by a name in the client's certificate
    """

    by_digest: Mapping[bytes, tuple[bytes, Identity]]
    by_certificate: Mapping[str, Identity]


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def read_keys(path: str) -> Keys:
    """Reads a key file. Raises KeyFileError."""
    entries = _read(path)
    digests = [(bytes.fromhex(entry["sha256"]), _identity(entry)) for entry in entries["keys"]]
    return Keys(
        {known[:INDEX_BYTES]: (known, identity) for known, identity in digests},
        {entry["san"]: _identity(entry) for entry in entries["certificates"]},
    )


def list_entries(path: str) -> list[dict[str, Any]]:
    """Returns the entries of all kinds, as in the file. Raises KeyFileError."""
    entries = _read(path)
    return [*entries["keys"], *entries["certificates"]]


def add_key(path: str, identity: Identity) -> str:
    """Adds a key to the file, which is created if it does not exist. Returns the key. Raises KeyFileError."""
    key = PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    _add(path, "keys", _entry(identity) | {"sha256": digest(key).hex()})
    return key


def add_certificate(path: str, identity: Identity, san: str) -> None:
    """Adds the identity of clients whose certificate has this subject alternative name. Raises KeyFileError."""
    _add(path, "certificates", _entry(identity) | {"san": san})


def revoke(path: str, name: str) -> None:
    """Removes the key or the certificate of this name. Raises KeyFileError."""
    with _changing(path) as entries:
        remaining = {room: [entry for entry in entries[room] if entry["name"] != name] for room in _ROOMS}
        if remaining == entries:
            raise KeyFileError(f"{path} has no key named {name!r}")
        entries.update(remaining)


def _add(path: str, room: str, entry: dict[str, Any]) -> None:
    with _changing(path, create=True) as entries:
        if any(entry["name"] == other["name"] for each in entries.values() for other in each):
            raise KeyFileError(f"{path} already has a key named {entry['name']!r}: revoke it first")
        entries[room].append(entry)
        _check(path, entries)


@contextmanager
def _changing(path: str, *, create: bool = False) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Yields the entries and then replaces the file by them. Other processes that change the file wait meanwhile."""
    try:
        target = Path(path).resolve()
        lock_file = target.with_name(f"{target.name}.lock")
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or a directory that has no name
        raise KeyFileError(f"cannot change {path}: {error}") from None
    try:
        with open(lock_file, "a", opener=_private) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            is_new = create and not target.exists()
            entries: dict[str, list[dict[str, Any]]] = {room: [] for room in _ROOMS} if is_new else _read(path)
            yield entries
            _replace(target, json.dumps(entries, indent=2) + "\n")
    except OSError as error:
        raise KeyFileError(f"cannot change {path}: {error.strerror or error}") from None


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _replace(target: Path, text: str) -> None:
    """Replaces the file at once: a reader sees all of the old one or all of the new one.

    Keeps the owner, the group and the mode, with which the scheduler can read it. A new file belongs to the user of
    this process, with the mode 0600. Raises KeyFileError if it may not keep the owner or the group.
    """
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            if target.exists():
                _keep_rights(file.fileno(), target)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _keep_rights(descriptor: int, target: Path) -> None:
    old, new = target.stat(), os.fstat(descriptor)
    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
        try:
            os.fchown(descriptor, old.st_uid, old.st_gid)
        except PermissionError:
            raise KeyFileError(f"cannot keep the owner and the group of {target}: run this as its owner") from None
    os.fchmod(descriptor, stat.S_IMODE(old.st_mode))


def _read(path: str) -> dict[str, list[dict[str, Any]]]:
    try:
        entries = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise KeyFileError(f"{path} is not JSON") from None
    if not isinstance(entries, dict) or set(entries) - set(_ROOMS):
        raise KeyFileError(f'{path} must be a JSON object with "keys" and "certificates"')
    entries = {room: entries.get(room, []) for room in _ROOMS}
    _check(path, entries)
    return entries


def _check(path: str, entries: Mapping[str, Any]) -> None:
    """Raises KeyFileError unless each entry is complete and each name, key and certificate occurs once."""
    names: set[str] = set()
    for room, secret in _ROOMS.items():
        if not isinstance(entries[room], list):
            raise KeyFileError(f'{path}: "{room}" must be a list')
        secrets_: set[str] = set()
        for number, entry in enumerate(entries[room]):
            where = f"{path}: {room}[{number}]"
            _check_entry(where, entry, secret)
            if entry["name"] in names or entry[secret] in secrets_:
                raise KeyFileError(f"{where} repeats the name or the {secret} of another entry")
            names.add(entry["name"])
            secrets_.add(entry[secret])


def _check_entry(where: str, entry: object, secret: str) -> None:
    if not isinstance(entry, dict) or set(entry) != {"name", "tenant", "roles", secret}:
        raise KeyFileError(f"{where} must have name, tenant, roles and {secret}")
    if not is_name(entry["name"]) or not is_name(entry["tenant"]):
        raise KeyFileError(f"{where}: a name or a tenant has at most 128 letters, digits and ._@:/-")
    known = {role.value for role in Role}
    roles = entry["roles"]
    if not isinstance(roles, list) or not roles or not all(isinstance(role, str) and role in known for role in roles):
        raise KeyFileError(f"{where}: roles must be a list of {', '.join(sorted(known))}")
    value = entry[secret]
    is_digest = isinstance(value, str) and len(value) == 64 and not set(value) - set("0123456789abcdef")
    if not (is_digest if secret == "sha256" else isinstance(value, str) and value):
        raise KeyFileError(f"{where}: {secret} is not valid")


def _entry(identity: Identity) -> dict[str, Any]:
    return {
        "name": identity.name,
        "tenant": identity.tenant,
        "roles": sorted(role.value for role in identity.roles),
    }


def _identity(entry: Mapping[str, Any]) -> Identity:
    return Identity(entry["name"], entry["tenant"], frozenset(Role(role) for role in entry["roles"]))
