"""The flags that say how to reach a server, for all commands that call one."""

import inspect
import os
from typing import Annotated, Any

import typer

from quire.channel import DEFAULT_ADDRESS
from quire.client import Client
from quire.command import API_KEY
from quire.settings import ConfigError
from quire.tls import TlsFiles

_FLAGS: dict[str, tuple[Any, Any]] = {
    "address": (
        Annotated[str, typer.Option(help="host:port or unix:path of the scheduler")],
        DEFAULT_ADDRESS,
    ),
    "tls": (Annotated[bool, typer.Option("--tls", help="connect with TLS")], False),
    "ca": (Annotated[str | None, typer.Option(help="PEM file of the server's authorities; implies --tls")], None),
    "tls_certificate": (Annotated[str | None, typer.Option(help="PEM file of a client certificate")], None),
    "tls_key": (Annotated[str | None, typer.Option(help="PEM file of its private key")], None),
    "admin": (Annotated[str | None, typer.Option(help="admin address, if it is not the default one")], None),
}


def connection_parameters(*, admin: bool) -> list[inspect.Parameter]:
    """Returns a keyword parameter for each flag, as typer reads them. `admin`: for a command that calls Admin."""
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in _FLAGS.items()
        if admin or name != "admin"
    ]


def take_client(values: dict[str, Any], **options: Any) -> Client:
    """Takes the connection's flags out of `values`; returns a client with them and the key in QUIRE_API_KEY.

    Raises ConfigError for files that cannot be used and for a key that cannot be sent.
    """
    flags = {name: values.pop(name) for name in _FLAGS if name in values}
    certificate, key, ca = flags["tls_certificate"], flags["tls_key"], flags["ca"]
    if (certificate is None) != (key is None):
        raise ConfigError("--tls-certificate and --tls-key must be given together")
    tls = flags["tls"] if certificate is None else TlsFiles(certificate, str(key), ca)
    api_key = os.environ.get(API_KEY) or None
    try:
        return Client(flags["address"], api_key=api_key, tls=tls, ca=ca, admin=flags.get("admin"), **options)
    except ValueError as error:
        raise ConfigError(f"{API_KEY}: {error}" if "api_key" in str(error) else str(error)) from None
