"""The flags of the services, for all commands that start them, and what they come to."""

from dataclasses import fields
from typing import Any

from executor.config import ExecutorConfig
from quire.cli.config_flags import flag_parameters, given
from quire.cli.services import EXECUTOR_ADDRESS
from quire.model_path import resolved_model
from scheduler.config import SchedulerConfig

SCHEDULER_FLAGS = flag_parameters(SchedulerConfig)
EXECUTOR_FLAGS = flag_parameters(ExecutorConfig)
# Both at once: a field that both have is said once, and so is the address at which they meet.
SERVICE_FLAGS = flag_parameters(ExecutorConfig, leave_out={EXECUTOR_ADDRESS[1]}) + flag_parameters(
    SchedulerConfig, leave_out={field.name for field in fields(ExecutorConfig)}
)
# What a measurement leaves open where it decides the rest itself.
MODEL_FLAGS = flag_parameters(
    ExecutorConfig, leave_out={field.name for field in fields(ExecutorConfig)} - {"model", "dtype", "device"}
)


def with_model(values: dict[str, Any]) -> dict[str, Any]:
    """The flags that were given, and the directory of the model, of the embedded one where none was."""
    return given(values) | {"model": resolved_model(values.get("model"))}
