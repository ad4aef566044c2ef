"""Tests `quire keys` and the flags and the variable that name a key and a certificate."""

import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.cli.main import app
from scheduler.identity.key_file import read_keys
from tests.support.certificates import Authority
from tests.support.client.scripted_server import ScriptedServer


def run(*words: str, **environment: str) -> Any:
    return CliRunner().invoke(app, words, env=environment)


def test_a_key_is_printed_once_listed_without_its_secret_and_revoked(tmp_path: Path) -> None:
    file = str(tmp_path / "keys.json")
    added = run("keys", "add", "ci", "--file", file, "--tenant", "build", "--role", "generate", "--role", "observe")
    assert added.exit_code == 0, added.output
    key = added.stdout.strip()
    assert key.startswith("qk_")
    assert stat.S_IMODE(Path(file).stat().st_mode) == 0o600
    words = ("keys", "add", "bill", "--file", file, "--role", "admin", "--certificate", "bill.example")
    assert run(*words).exit_code == 0
    listed = run("keys", "list", "--file", file)
    assert listed.stdout == "ci\tbuild\tgenerate,observe\tkey\nbill\tdefault\tadmin\tcertificate bill.example\n"
    assert run("keys", "revoke", "ci", "--file", file).exit_code == 0
    assert "ci" not in run("keys", "list", "--file", file).stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("revoke", "absent"), "cannot read"),
        (("list",), "cannot read"),
        (("add", "a b", "--role", "generate"), "at most 128 letters"),
        (("add", "a", "--role", "root"), "is not one of"),
        (("add", "a"), "--role"),
    ],
)
def test_mistakes_end_with_status_2(words: tuple[str, ...], told: str, tmp_path: Path) -> None:
    result = run("keys", *words, "--file", str(tmp_path / "keys.json"))
    assert result.exit_code == 2
    assert told in result.output


@pytest.mark.parametrize("command", ["scheduler", "serve"])
@pytest.mark.parametrize("flag", ["--listen", "--http-listen", "--admin-listen"])
def test_services_do_not_listen_for_strangers(command: str, flag: str) -> None:
    result = run(command, flag, "0.0.0.0:17")
    assert result.exit_code == 2
    assert "create a key with `quire keys add` and give its file as --api-keys" in result.output


def test_the_key_in_the_environment_is_sent(server: ScriptedServer) -> None:
    run("generate", "p", "--address", server.address)
    run("generate", "p", "--address", server.address, QUIRE_API_KEY="qk_secret")
    assert [metadata.get("authorization") for metadata in server.metadata] == [None, "Bearer qk_secret"]


def test_a_key_that_cannot_be_sent_is_refused_without_showing_it(server: ScriptedServer) -> None:
    result = run("generate", "p", "--address", server.address, QUIRE_API_KEY="qk_\n5")
    assert result.exit_code == 2
    assert "QUIRE_API_KEY" in result.output
    assert "qk_" not in result.output


def test_drain_and_its_undoing_reach_the_admin_service(server: ScriptedServer) -> None:
    assert run("drain", "--address", server.address).exit_code == 0
    assert (server.num_drains, server.num_resumes) == (1, 0)
    assert run("drain", "--undo", "--address", server.address).exit_code == 0
    assert (server.num_drains, server.num_resumes) == (1, 1)


def test_the_admin_address_of_another_machine_has_to_be_named() -> None:
    result = run("drain", "--address", "192.0.2.1:50051")
    assert result.exit_code == 69
    assert "admin address of 192.0.2.1:50051 is not known" in result.output


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "[::1]:65536"])
def test_a_port_that_does_not_exist_is_refused_before_a_key_is_sent(address: str) -> None:
    """Another server may listen at the low 16 bits of the number, which gRPC would take."""
    result = run("generate", "p", "--address", address)
    assert result.exit_code == 2
    assert "a port up to 65535" in result.output


@pytest.mark.parametrize("name", ["/", "loop"])
def test_a_key_file_that_cannot_exist_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    result = run("keys", "add", "x", "--role", "generate", "--file", str(tmp_path / name))
    assert (result.exit_code, "cannot change" in result.output) == (2, True), result.output


def test_a_key_that_cannot_be_shown_is_not_added(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    command = [sys.executable, "-m", "quire", "keys", "add", "ci", "--role", "generate", "--file", str(file)]
    with open("/dev/full", "w", encoding="utf-8") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, "quire: cannot write: No space left on device\n")
    assert read_keys(str(file)).by_digest == {}


def test_unusable_files_are_reported(tmp_path: Path) -> None:
    result = run("generate", "p", "--ca", str(tmp_path / "absent.pem"))
    assert result.exit_code == 2
    assert "cannot read" in result.output
    authority = Authority.create(tmp_path)
    result = run("generate", "p", "--tls-certificate", authority.ca)
    assert result.exit_code == 2
    assert "must be given together" in result.output
