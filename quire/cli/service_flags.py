"""The flags of the services, for all commands that start them."""

from dataclasses import fields
from typing import Any

import typer

from executor.config import ExecutorConfig
from executor.parallel.rank_config import RankConfig
from gateway.config import GatewayConfig
from quire.channel import DEFAULT_ADDRESS
from quire.cli.config_flags import flag, flag_parameters, given, with_defaults
from quire.cli.services import EXECUTOR_ADDRESS, EXECUTOR_HOP, GATEWAY_HOP, GATEWAY_OWN, SCHEDULER_HOP, on_free_ports
from quire.model_path import resolved_model
from quire.options import flag_texts
from scheduler.config import SchedulerConfig

SCHEDULER_FLAGS = flag_parameters(SchedulerConfig)
EXECUTOR_FLAGS = flag_parameters(ExecutorConfig)
RANK_FLAGS = flag_parameters(RankConfig)
GATEWAY_FLAGS = [
    # The only flag that can be given more than once.
    flag(
        "scheduler",
        list[str],
        typer.Option(help=f"{flag_texts(GatewayConfig)['scheduler']} [default: {DEFAULT_ADDRESS}]"),
    ),
    *flag_parameters(GatewayConfig, leave_out={"scheduler"}),
]
# For all services: a field that several have becomes one flag, and so does the address at which they meet.
SERVICE_FLAGS = [
    *flag_parameters(ExecutorConfig, leave_out={EXECUTOR_ADDRESS[1], *EXECUTOR_HOP}),
    *flag_parameters(
        SchedulerConfig,
        leave_out={field.name for field in fields(ExecutorConfig)} - EXECUTOR_HOP | SCHEDULER_HOP | GATEWAY_HOP,
    ),
    flag("gateway", bool, typer.Option(help="start a gateway, which serves OpenAI's API [default: True]")),
    flag("gateway_listen", str, typer.Option(help=f"host:port of the gateway [default: {GatewayConfig().listen}]")),
]
SERVE_FLAGS = [
    *SERVICE_FLAGS,
    flag(
        "replicas",
        int,
        typer.Option(min=1, help="schedulers with an executor each, all behind the gateway [default: 1]"),
    ),
    *[each for each in flag_parameters(GatewayConfig) if each.name in ("routing", *GATEWAY_OWN)],
]
# For `quire demo`: so small that the whole pool is visible, and that the requests fill the pool and the queue.
DEMO_DEFAULTS = on_free_ports({"num_blocks": 128, "max_num_seqs": 6})
DEMO_FLAGS = with_defaults(SERVICE_FLAGS, DEMO_DEFAULTS)


def with_schedulers(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the given flags of a gateway, with the addresses of all schedulers in one value."""
    schedulers = values.pop("scheduler", None)
    return given(values) | ({"scheduler": ",".join(schedulers)} if schedulers else {})


def with_model(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the given flags and the directory of the model, which is the embedded one by default."""
    return given(values) | {"model": resolved_model(values.get("model"))}
