"""Certificates for tests, made by the command `openssl`, so that no test needs a Python package for it."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from quire.tls import TlsFiles


@dataclass(frozen=True, slots=True)
class Authority:
    """An authority that signs certificates; its files are in `directory`."""

    directory: Path

    @classmethod
    def create(cls, directory: Path, name: str = "test authority") -> "Authority":
        directory.mkdir(parents=True, exist_ok=True)
        authority = cls(directory)
        _new_key(directory / "ca.key")
        _openssl("req", "-x509", "-new", "-key", directory / "ca.key", "-out", directory / "ca.pem", "-days", "2",
                 "-subj", f"/CN={name}")  # fmt: skip
        return authority

    @property
    def ca(self) -> str:
        return str(self.directory / "ca.pem")

    def issue(self, name: str, *names: str, key_kind: str = "prime256v1") -> TlsFiles:
        """Returns a certificate with these subject alternative names: "DNS:host", "IP:address", "URI:…".

        `name` is the common name and the stem of the files; a second certificate of a name replaces the first one.
        `key_kind` is "rsa", "ed25519" or the name of a curve.
        """
        stem = self.directory / name
        key, request, certificate, extension = (stem.with_suffix(end) for end in (".key", ".csr", ".pem", ".ext"))
        _new_key(key, key_kind)
        extension.write_text(f"subjectAltName={','.join(names)}\n")
        _openssl("req", "-new", "-key", key, "-out", request, "-subj", f"/CN={name}")
        _openssl("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self.directory / "ca.key", "-days", "2",
                 "-CAcreateserial", "-extfile", extension, "-out", certificate)  # fmt: skip
        return TlsFiles(str(certificate), str(key), self.ca)

    def issue_for_loopback(self, name: str = "server", key_kind: str = "prime256v1") -> TlsFiles:
        """Returns a certificate for servers on this machine."""
        return self.issue(name, "DNS:localhost", "IP:127.0.0.1", key_kind=key_kind)


def replace_pair(old: TlsFiles, new: TlsFiles) -> None:
    """Puts the new certificate and key at the paths of the old ones."""
    Path(new.certificate).replace(old.certificate)
    Path(new.key).replace(old.key)


def _new_key(path: Path, kind: str = "prime256v1") -> None:
    options = (
        ["-algorithm", kind]
        if kind in ("rsa", "ed25519")
        else ["-algorithm", "EC", "-pkeyopt", f"ec_paramgen_curve:{kind}"]
    )
    _openssl("genpkey", *options, "-out", path)


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
