"""`quire fleet`: several replicas with their gateways, kept running on this machine or on a Ray cluster."""

import json
import sys
import time
from typing import Annotated, Any

import typer

from fleet.client import FleetClient, fleet_client
from fleet.parts import Role
from fleet.settings import DEFAULT_NAME, FleetSettings
from fleet.wanted import Wanted
from quire.cli import exit_codes
from quire.cli.config_flags import flag, flag_parameters, given, with_flags
from quire.cli.fleet_settings import fleet_settings
from quire.cli.outcome import fail, reported
from quire.log_writer import put_line
from quire.settings import ConfigError

app = typer.Typer(help="Starts, shows, scales, drains and ends several replicas behind gateways.", no_args_is_help=True)

_FATAL = frozenset({exit_codes.USAGE, 126, 127})
"""Exit codes of a part after which another start is useless."""

_MAX_ADDRESS_ENDS = 3
"""Ends in a row of a part whose address is in use before it is given up. Flags can give two parts the same address."""

_Name = Annotated[str, typer.Option("--name", help="name of the fleet")]
_Backend = Annotated[str, typer.Option(help="local: this machine; ray: a Ray cluster")]
_Address = Annotated[str, typer.Option(help="address of the Ray cluster: auto, host:port or ray://host:port")]
_Wait = Annotated[float, typer.Option(min=0, help="seconds to wait for it")]


def up(
    context: typer.Context,
    replicas: Annotated[int, typer.Option(min=1, help="number of replicas to begin with")] = 1,
    gateways: Annotated[int, typer.Option(min=1, help="number of gateways")] = 1,
    address: _Address = "auto",
    wait_s: _Wait = 600.0,
    **values: Any,
) -> None:
    """Starts a fleet in the background, and prints `ready …` when every replica serves.

    Flags of the services are given as one text each: --scheduler-flags "--api-keys keys.json --policy priority".
    """
    with reported():
        values = {"name": DEFAULT_NAME, "backend": "local"} | given(values)
        if "target_ttft_ms" not in values and values.keys() & {"min_replicas", "max_replicas"}:
            raise ConfigError("min_replicas and max_replicas need target_ttft_ms: without it, quire fleet scale scales")
        values = {"max_replicas": max(replicas, values.get("min_replicas", 1))} | values
        settings = fleet_settings(context.find_root().command, values)
        wanted = Wanted.of(replicas, gateways)
        client = fleet_client(settings.backend, settings.name, address)
        is_new = client.up(settings, wanted)
        try:
            status = _until_ready(client, wait_s, is_new=is_new)
        except KeyboardInterrupt:
            put_line(sys.stderr, f"quire: the fleet {settings.name} goes on in the background: see quire fleet down")
            raise
    addresses = [each["address"] for each in status["parts"] if each["part"].startswith("gateway-")]
    print(f"ready openai={','.join(addresses)} replicas={len(status['wanted']['serving'])}")


_UP_FLAGS = [
    *flag_parameters(FleetSettings, leave_out=[f"{role}_flags" for role in Role]),
    *(flag(f"{role}_flags", str, typer.Option(help=f"further flags of `quire {role}`, in quotes")) for role in Role),
]
app.command("up")(with_flags(up, _UP_FLAGS))


@app.command("status")
def status(
    name: _Name = DEFAULT_NAME,
    backend: _Backend = "local",
    address: _Address = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """Shows every part of a fleet: its state, its address, and how often its controller has seen it end."""
    report = _asked(name, backend, address, "status")
    if as_json:
        print(json.dumps(report))
    else:
        _show(report)


@app.command("scale")
def scale(
    replicas: Annotated[int, typer.Option(help="number of replicas")],
    name: _Name = DEFAULT_NAME,
    backend: _Backend = "local",
    address: _Address = "auto",
    wait_s: _Wait = 600.0,
) -> None:
    """Changes the number of replicas. Those that leave give their streams to the others."""
    _asked(name, backend, address, "scale", replicas=replicas)
    _settled(name, backend, address, wait_s)


@app.command("drain")
def drain(
    replica: Annotated[int, typer.Argument(help="number of the replica, as in executor-2 and scheduler-2")],
    name: _Name = DEFAULT_NAME,
    backend: _Backend = "local",
    address: _Address = "auto",
    timeout_s: Annotated[
        float | None,
        typer.Option(min=0, help="seconds after which the replica is killed; default: the fleet's --drain-timeout-s"),
    ] = None,
    wait_s: _Wait = 600.0,
) -> None:
    """Takes one replica out: its streams go on at the others, and the fleet has one replica less."""
    _asked(name, backend, address, "drain", replica=replica, **given({"timeout_s": timeout_s}))
    _settled(name, backend, address, wait_s)


@app.command("down")
def down(
    name: _Name = DEFAULT_NAME,
    backend: _Backend = "local",
    address: _Address = "auto",
    timeout_s: Annotated[float, typer.Option(min=0, help="seconds that open requests get to end")] = 600.0,
) -> None:
    """Ends a fleet: gateways first, when their requests have ended, then the replicas."""
    with reported():
        client = fleet_client(backend, name, address)
        client.ask("down", {"timeout_s": timeout_s})
        client.until_down(timeout_s + 60.0)


def _asked(name: str, backend: str, address: str, verb: str, **arguments: Any) -> dict[str, Any]:
    with reported():
        return fleet_client(backend, name, address).ask(verb, arguments)


def _settled(name: str, backend: str, address: str, wait_s: float) -> None:
    """Waits until all wanted replicas serve and those that left are gone."""
    with reported():
        _until_ready(fleet_client(backend, name, address), wait_s, is_new=False)


def _until_ready(client: FleetClient, wait_s: float, *, is_new: bool) -> dict[str, Any]:
    """Returns the report of a fleet that serves. Ends the command if it does not in time, or cannot.

    is_new  if a part cannot be started, the fleet is ended, too; otherwise its other parts serve on
    """
    until_s = time.monotonic() + wait_s
    said = ""
    while True:
        report = client.ask("status", {})
        ready = [each["part"] for each in report["parts"] if each["state"] == "ready" and each["is_wanted"]]
        wanted = report["wanted"]  # it changes while the fleet scales by its load
        num_parts = 2 * len(wanted["serving"]) + wanted["gateways"]
        if len(ready) == num_parts and not wanted["draining"]:
            return report
        for each in report["parts"]:
            if each["state"] == "ended" and _is_useless(each["exit_code"], each.get("num_alike_ends", 0)):
                if is_new:
                    client.ask("down", {"timeout_s": 0.0})
                fail(f"{each['part']} cannot be started: {each['last_line']}", each["exit_code"])
        if time.monotonic() >= until_s:
            fail(f"not ready after {wait_s:g} s: see quire fleet status", exit_codes.TRY_AGAIN)
        line = f"{len(ready)} of {num_parts} parts are ready"
        line += "".join(f", replica {index} is draining" for index in wanted["draining"])
        if line != said:
            said = line
            put_line(sys.stderr, line)
        time.sleep(0.2)


def _is_useless(exit_code: int | None, num_alike_ends: int) -> bool:
    """Returns whether another start of a part that has ended with this code, so often in a row, cannot succeed."""
    return exit_code in _FATAL or (exit_code == exit_codes.ADDRESS_IN_USE and num_alike_ends >= _MAX_ADDRESS_ENDS)


def _show(report: dict[str, Any]) -> None:
    wanted = report["wanted"]
    print(
        f"{report['name']} ({report['backend']}): {len(wanted['serving'])} replicas of {report['model']}"
        + (f", {len(wanted['draining'])} draining" if wanted["draining"] else "")
        + (", going down" if wanted["down_by_s"] is not None else "")
        + (f", predicted TTFT {report['predicted_ttft_s']:.2f} s" if report["predicted_ttft_s"] is not None else "")
    )
    print(f"{'part':<15}{'state':<10}{'age':>8}{'ends':>6}{'requests':>10}  machine, address")
    for each in report["parts"]:
        requests = "" if each["num_requests"] is None else each["num_requests"]
        where = each["last_line"] or f"{each['machine']}, {each['address']}"
        print(
            f"{each['part']:<15}{each['state']:<10}{each['age_s']:>6.0f} s{each['num_ends']:>6}{requests:>10}  {where}"
        )
