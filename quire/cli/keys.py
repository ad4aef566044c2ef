"""`quire keys`: writes the file of keys that the scheduler reads (--api-keys)."""

from typing import Annotated

import typer

from quire.cli import exit_codes
from quire.cli.outcome import fail, reported
from scheduler.identity.identity import DEFAULT_TENANT, Identity, Role, is_name
from scheduler.identity.key_file import add_certificate, add_key, list_entries, revoke

app = typer.Typer(
    help="Adds, lists and revokes the keys of callers. A scheduler sees changes within a second.", no_args_is_help=True
)

_File = Annotated[str, typer.Option("--file", help="the file that --api-keys names")]
_Name = Annotated[str, typer.Argument(help="name of the caller, as the log shows it")]


@app.command("add")
def add(
    name: _Name,
    file: _File,
    role: Annotated[list[Role], typer.Option(help="what the caller may do; may be repeated")],
    tenant: Annotated[str, typer.Option(help="whose share and limits count")] = DEFAULT_TENANT,
    certificate: Annotated[
        str | None, typer.Option(help="a subject alternative name of the caller's certificate, instead of a key")
    ] = None,
) -> None:
    """Adds a key and prints it: nothing else ever shows it again."""
    if not is_name(name) or not is_name(tenant):
        fail("a name or a tenant has at most 128 letters, digits and ._@:/-", exit_codes.USAGE)
    identity = Identity(name, tenant, frozenset(role))
    with reported():
        if certificate is not None:
            add_certificate(file, identity, certificate)
            return
        key = add_key(file, identity)
        try:
            print(key, flush=True)
        except OSError:  # a key that was never shown is of no use
            revoke(file, name)
            raise


@app.command("list")
def show(file: _File) -> None:
    """Lists names, tenants and roles."""
    with reported():
        for entry in list_entries(file):
            kind = f"certificate {entry['san']}" if "san" in entry else "key"
            print(entry["name"], entry["tenant"], ",".join(entry["roles"]), kind, sep="\t")


@app.command("revoke")
def remove(name: _Name, file: _File) -> None:
    """Removes a key or a certificate. Calls that have begun continue; new ones are refused within a second."""
    with reported():
        revoke(file, name)
