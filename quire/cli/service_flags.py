"""The flags of the services, for all commands that start them."""

from dataclasses import fields
from typing import Any

from executor.config import ExecutorConfig
from quire.cli.config_flags import flag_parameters, given
from quire.cli.services import EXECUTOR_ADDRESS, EXECUTOR_HOP, SCHEDULER_HOP
from quire.model_path import resolved_model
from scheduler.config import SchedulerConfig

SCHEDULER_FLAGS = flag_parameters(SchedulerConfig)
EXECUTOR_FLAGS = flag_parameters(ExecutorConfig)
# For both services: a field that both have becomes one flag, and so does the address at which they meet.
SERVICE_FLAGS = flag_parameters(ExecutorConfig, leave_out={EXECUTOR_ADDRESS[1], *EXECUTOR_HOP}) + flag_parameters(
    SchedulerConfig, leave_out={field.name for field in fields(ExecutorConfig)} - EXECUTOR_HOP | SCHEDULER_HOP
)
# For measurements that choose all other values themselves.
MODEL_FLAGS = flag_parameters(
    ExecutorConfig, leave_out={field.name for field in fields(ExecutorConfig)} - {"model", "dtype", "device"}
)


def with_model(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the given flags and the directory of the model, which is the embedded one by default."""
    return given(values) | {"model": resolved_model(values.get("model"))}
