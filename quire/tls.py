"""TLS for servers and clients: credentials from PEM files, which are read again when the files change.

A server looks at its files at each new connection, so a renewed certificate needs no restart and no signal. Open
connections keep the certificate they began with. A new pair that cannot be used (a key of another certificate, half a
file) is logged, and the server goes on with the pair it has. The credentials of a channel cannot change: a client that
connects for long asks for them before each attempt (`watched_channel_credentials`).
"""

from __future__ import annotations

import base64
import re
import socket
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from quire.watched_files import WatchedFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

T = TypeVar("T")

_MAX_READS = 5
"""Number of times that files are read again at once because they changed while they were read."""

_KINDS_OF_KEYS = tuple(map(bytes.fromhex, ("06092a864886f70d010101", "06082a8648ce3d030107", "06052b81040022")))
"""Object identifiers, as certificates contain them, of the keys that gRPC can use: RSA, P-256 and P-384."""


class TlsError(ValueError):
    """The files cannot be used for TLS. The message names them."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files.

    certificate  the certificate, followed by the intermediate certificates if there are any. For gRPC, its key is one
                 of RSA, P-256 or P-384
    key          its private key, without a password
    ca           the authorities that sign the certificates of the other side; None: for a client those of the system,
                 for a server none, and it asks clients for no certificate
    """

    certificate: str
    key: str
    ca: str | None = None


def server_credentials(files: TlsFiles, require_client: bool = False) -> grpc.ServerCredentials:
    """Returns the credentials of a gRPC server, which follow the files. Raises TlsError.

    require_client  True: only clients with a certificate signed by `files.ca` can connect. gRPC in Python cannot ask
                    for a certificate without requiring it.
    """
    _check_authorities(files, require_client)
    current = _watched(files, _grpc_configuration)
    last = current.get()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal last
        if (latest := current.get()) is last:
            return None
        last = latest
        return latest

    # types-grpcio does not know that None means no change.
    return grpc.dynamic_ssl_server_credentials(last, changed, require_client)  # type: ignore[arg-type]


def channel_credentials(tls: TlsFiles | str | None) -> grpc.ChannelCredentials:
    """Returns the credentials of a gRPC channel. They do not follow the files: make them for each new channel.

    tls  with a client certificate, TlsFiles; without one, the path of the authorities' file; None: the authorities
         bundled with gRPC

    Raises TlsError.
    """
    if not isinstance(tls, TlsFiles):
        return grpc.ssl_channel_credentials(None if tls is None else _authorities(tls))
    return _load(tls, _grpc_channel_credentials)


def watched_channel_credentials(files: TlsFiles) -> Callable[[], grpc.ChannelCredentials]:
    """Returns a function that gives the credentials of a new channel, the same object until the files change.

    Raises TlsError. The function does not: it gives the credentials before that while the files cannot be used.
    """
    return _watched(files, _grpc_channel_credentials).get


def ssl_context(files: TlsFiles, require_client: bool = False) -> ssl.SSLContext:
    """Returns the context of a server on asyncio, which follows the files. Raises TlsError.

    require_client  as for `server_credentials`
    """
    _check_authorities(files, require_client)
    current = _watched(files, lambda _: _server_context(files, require_client))
    outer = _server_context(files, require_client)

    def follow(connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = current.get()

    # OpenSSL calls it in each handshake, also of clients that send no server name.
    outer.sni_callback = follow
    return outer


def peer_names(auth_context: Mapping[str, Iterable[bytes]]) -> list[str]:
    """Returns the subject alternative names of the peer's verified certificate; none if it sent no certificate.

    auth_context  `ServicerContext.auth_context()` of a gRPC call

    The common name is not among them: nothing says what kind of name it is.
    """
    return [name.decode("utf-8", "replace") for name in auth_context.get("x509_subject_alternative_name", ())]


def certificate_names(certificate: Mapping[str, Any] | None) -> list[str]:
    """Returns the same names as `peer_names`, from `SSLObject.getpeercert()`."""
    return [_as_grpc_writes(kind, str(name)) for kind, name in (certificate or {}).get("subjectAltName", ())]


def _as_grpc_writes(kind: str, name: str) -> str:
    """Returns an IPv6 address in its short form, "2001:db8::1", for which Python writes "2001:DB8:0:0:0:0:0:1"."""
    if kind != "IP Address":
        return name
    try:
        return socket.inet_ntop(socket.AF_INET6, socket.inet_pton(socket.AF_INET6, name))
    except OSError:  # an IPv4 address, which both write in the same way
        return name


@dataclass(frozen=True, slots=True)
class _Pems:
    files: TlsFiles
    certificate: bytes
    key: bytes
    ca: bytes | None


def _watched(files: TlsFiles, make: Callable[[_Pems], T]) -> WatchedFiles[T]:
    """Raises TlsError."""
    paths = [path for path in (files.certificate, files.key, files.ca) if path is not None]
    return WatchedFiles(paths, lambda: _load(files, make))


def _load(files: TlsFiles, make: Callable[[_Pems], T]) -> T:
    """Checks that certificate and key fit together, in the same state of the files as is returned. Raises TlsError."""
    for _ in range(_MAX_READS):
        pems = _read(files)
        _load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files)
        value = make(pems)
        if _read(files) == pems:
            return value
    raise TlsError(f"{files.certificate} and {files.key} change while they are read")


def _check_authorities(files: TlsFiles, require_client: bool) -> None:
    if require_client and files.ca is None:
        raise TlsError("client certificates need the file of the authorities that sign them")


def _read(files: TlsFiles) -> _Pems:
    ca = None if files.ca is None else _authorities(files.ca)
    return _Pems(files, _bytes(files.certificate), _bytes(files.key), ca)


def _bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise TlsError(f"cannot read {path}: {error.strerror or error}") from None


def _authorities(path: str) -> bytes:
    """Raises TlsError unless the file holds at least one certificate."""
    pem = _bytes(path)
    try:
        # Python takes ASCII only, and comments of a bundle may have other characters.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii", "backslashreplace"))
    except (ssl.SSLError, ValueError) as error:
        raise TlsError(f"{path} holds no certificates in PEM format: {error}") from None
    return pem


def _load_pair(context: ssl.SSLContext, files: TlsFiles) -> None:
    def no_password() -> str:
        raise TlsError(f"the key {files.key} has a password: give a key without one")

    try:
        context.load_cert_chain(files.certificate, files.key, no_password)
    except OSError as error:  # ssl.SSLError is one
        raise TlsError(f"{files.certificate} and {files.key} are not a certificate and its key: {error}") from None


def _check_kind_of_key(pems: _Pems) -> None:
    """Raises TlsError for a key that gRPC reads, and with which it then fails every handshake, or does not listen."""
    pem = re.search(rb"-----BEGIN [A-Z0-9 ]*CERTIFICATE-----(.*?)-----END", pems.certificate, re.DOTALL)
    der = b"" if pem is None else base64.b64decode(pem[1])
    if not any(kind in der for kind in _KINDS_OF_KEYS):
        path = pems.files.certificate
        raise TlsError(f"{path} has a key of a kind that gRPC cannot use: give one with RSA, P-256 or P-384")


def _grpc_channel_credentials(pems: _Pems) -> grpc.ChannelCredentials:
    _check_kind_of_key(pems)
    return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.certificate)


def _grpc_configuration(pems: _Pems) -> grpc.ServerCertificateConfiguration:
    _check_kind_of_key(pems)
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.certificate)], pems.ca)


def _server_context(files: TlsFiles, require_client: bool) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files.ca)
    if require_client:
        context.verify_mode = ssl.CERT_REQUIRED
        # A resumed session does not check the client's certificate again, which may not be trusted any more.
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
    _load_pair(context, files)
    return context
