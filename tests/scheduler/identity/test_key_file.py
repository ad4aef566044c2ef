"""Tests the file of keys: its content, its mode, and changes by several processes at once."""

import hashlib
import json
import multiprocessing
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.identity.identity import Identity, Role
from scheduler.identity.key_file import INDEX_BYTES, KeyFileError, add_certificate, add_key, digest, read_keys, revoke

CI = Identity("ci", "build", frozenset({Role.GENERATE}))
DIGEST = "0" * 64


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "keys.json")


def identity_of(path: str, key: str) -> Identity | None:
    found = read_keys(path).by_digest.get(digest(key)[:INDEX_BYTES])
    return found[1] if found is not None and found[0] == hashlib.sha256(key.encode()).digest() else None


def test_a_key_is_found_by_its_digest_and_the_file_does_not_hold_it(path: str) -> None:
    key, other = add_key(path, CI), add_key(path, Identity("b", "t", frozenset({Role.ADMIN, Role.OBSERVE})))
    assert key.startswith("qk_")
    assert len(key) == 46
    assert key != other
    assert identity_of(path, key) == CI
    assert identity_of(path, key + "x") is None
    assert key not in Path(path).read_text()
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600


def test_a_revoked_key_and_a_revoked_certificate_are_gone(path: str) -> None:
    key = add_key(path, CI)
    add_certificate(path, Identity("billing", "money", CI.roles), "billing.example")
    assert read_keys(path).by_certificate == {"billing.example": Identity("billing", "money", CI.roles)}
    revoke(path, "ci")
    revoke(path, "billing")
    assert identity_of(path, key) is None
    assert not read_keys(path).by_certificate
    with pytest.raises(KeyFileError, match="has no key named 'ci'"):
        revoke(path, "ci")


def test_names_are_unique_also_among_kinds(path: str) -> None:
    add_key(path, CI)
    with pytest.raises(KeyFileError, match="already has a key named 'ci'"):
        add_certificate(path, CI, "x")


def test_a_change_keeps_the_mode_and_leaves_no_other_files(path: str) -> None:
    add_key(path, CI)
    with pytest.raises(KeyFileError):
        revoke(path, "absent")
    assert sorted(each.name for each in Path(path).parent.iterdir()) == ["keys.json", "keys.json.lock"]
    assert all(stat.S_IMODE(each.stat().st_mode) == 0o600 for each in Path(path).parent.iterdir())


@pytest.mark.parametrize("mode", [0o640, 0o400])
def test_a_change_keeps_the_rights_with_which_the_scheduler_reads_the_file(path: str, mode: int) -> None:
    """A file of root that the scheduler's group may read would otherwise become unreadable, and a revoked key valid."""
    add_key(path, CI)
    Path(path).chmod(mode)
    if os.getuid() == 0:
        os.chown(path, 0, 65534)
    before = Path(path).stat()
    add_key(path, Identity("other", "t", CI.roles))
    revoke(path, "other")
    after = Path(path).stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)


def test_a_change_that_would_take_the_file_from_its_owner_is_refused(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_key(path, CI)
    before = Path(path).read_bytes()
    owned_by_another = SimpleNamespace(st_uid=os.getuid() + 1, st_gid=os.getgid(), st_mode=0o100640)
    monkeypatch.setattr(Path, "stat", lambda self, **_: owned_by_another)
    monkeypatch.setattr(os, "fchown", refuse)
    with pytest.raises(KeyFileError, match="cannot keep the owner"):
        revoke(path, CI.name)
    monkeypatch.undo()
    assert Path(path).read_bytes() == before


def refuse(*_: int) -> None:
    raise PermissionError


def _add_some(path: str, prefix: str) -> None:
    for number in range(10):
        add_key(path, Identity(f"{prefix}{number}", "t", CI.roles))
        if number % 2:
            revoke(path, f"{prefix}{number}")


def test_processes_that_change_the_file_at_once_lose_nothing(path: str) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_add_some, args=(path, prefix)) for prefix in "abc"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    names = {identity.name for _, identity in read_keys(path).by_digest.values()}
    assert names == {f"{prefix}{number}" for prefix in "abc" for number in range(0, 10, 2)}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "must be a JSON object"),
        ({"kyes": []}, "must be a JSON object"),
        ({"keys": {}}, '"keys" must be a list'),
        ({"keys": [5]}, r"keys\[0\] must have name, tenant, roles and sha256"),
        ({"keys": [{"name": "a", "tenant": "t", "roles": ["generate"]}]}, r"keys\[0\] must have"),
        ({"keys": [{"name": "a b", "tenant": "t", "roles": ["generate"], "sha256": DIGEST}]}, "at most 128 letters"),
        ({"keys": [{"name": "a", "tenant": 5, "roles": ["generate"], "sha256": DIGEST}]}, "at most 128 letters"),
        ({"keys": [{"name": "a", "tenant": "t", "roles": [], "sha256": DIGEST}]}, "roles must be a list of admin"),
        ({"keys": [{"name": "a", "tenant": "t", "roles": ["root"], "sha256": DIGEST}]}, "roles must be a list of"),
        ({"keys": [{"name": "a", "tenant": "t", "roles": ["admin"], "sha256": "00"}]}, "sha256 is not valid"),
        ({"certificates": [{"name": "a", "tenant": "t", "roles": ["admin"], "san": ""}]}, "san is not valid"),
        (
            {"keys": [{"name": name, "tenant": "t", "roles": ["admin"], "sha256": DIGEST} for name in "ab"]},
            r"keys\[1\] repeats",
        ),
    ],
)
def test_a_bad_file_is_an_error_that_names_the_place(path: str, content: Any, words: str) -> None:
    Path(path).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(KeyFileError, match=words) as raised:
        read_keys(path)
    assert path in str(raised.value)


def test_a_missing_file_is_an_error(path: str) -> None:
    with pytest.raises(KeyFileError, match=r"cannot read .*No such file"):
        read_keys(path)
    with pytest.raises(KeyFileError, match=r"cannot read .*No such file"):
        revoke(path, "a")
