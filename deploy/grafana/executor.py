"""The executor dashboard: the duration of steps by phase, the size of batches, and the device's idle time."""

from grafana_foundation_sdk.builders import dashboard

from deploy.grafana.panels import dashboard_named, heat_map, lines, per_second, percentiles, tile

_STEP = "quire_executor_step_duration_seconds"
_FORWARD = '{m, phase="forward"}'
_BATCH = "quire_step_batch_tokens"
_LAST_STEP = "quire_executor_last_step_timestamp_seconds"
# An executor is identified by its address; a new process at the same address is a restart.
_RESTARTS = "changes(quire_executor_start_timestamp_seconds{m}[1h])"


def executor() -> dashboard.Dashboard:
    board = dashboard_named("Quire / Executor", "quire-executor", "Steps, memory and restarts of a Quire executor.")
    for panel in (
        tile("Steps/s", "Completed steps per second.", per_second(f"{_STEP}_count").replace("{m}", _FORWARD), "short"),
        tile(
            "Since the last step",
            "Time since the last completed step. It also grows while there is no work.",
            f"time() - max ({_LAST_STEP}{{m}})",
            "s",
        ),
        tile(
            "Idle",
            "Share of the time in which the device has no plan.",
            "max (quire_executor_idle_ratio{m})",
            "percentunit",
        ),
        tile(
            "Tokens per step",
            "Mean number of tokens in a step.",
            f"{per_second(f'{_BATCH}_sum')} / {per_second(f'{_BATCH}_count')}",
            "short",
        ),
        tile("Memory", "Memory of weights, pool and buffers.", "sum (quire_executor_memory_bytes{m})", "bytes"),
        tile("Restarts", "Restarts within the last hour.", f"sum ({_RESTARTS})", "short", bad_from=1),
    ):
        board = board.with_panel(panel)
    return _process(_steps(board))


def _steps(board: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        board.with_row(dashboard.Row("Steps"))
        .with_panel(
            lines(
                "Step duration by phase",
                "Mean duration of each phase. queue: from arrival to start; prepare: building the inputs; forward: the "
                "model; sample: choosing tokens.",
                {"{phase}": f"{per_second(f'{_STEP}_sum', 'phase')} / {per_second(f'{_STEP}_count', 'phase')}"},
                "s",
                width="half",
                stacked=True,
            )
        )
        .with_panel(
            lines(
                "Forward duration, percentiles",
                "Duration of the model's part of a step.",
                {name: query.replace("{m}", _FORWARD) for name, query in percentiles(_STEP).items()},
                "s",
                width="half",
            )
        )
        .with_panel(
            heat_map(
                "Tokens per step, distribution",
                "Distribution of the number of tokens in a step. Brighter cells mean more steps.",
                _BATCH,
                "short",
            )
        )
        .with_panel(
            lines(
                "Planning duration",
                "Time that the scheduler's core takes to plan a step. It overlaps with the steps in flight.",
                percentiles("quire_schedule_duration_seconds"),
                "s",
                width="half",
            )
        )
    )


def _process(board: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        board.with_row(dashboard.Row("Process"))
        .with_panel(
            lines(
                "Idle share",
                "Share of the last seconds in which the device had no plan.",
                {"{executor}": "max by (executor) (quire_executor_idle_ratio{m})"},
                "percentunit",
                most=1,
            )
        )
        .with_panel(
            lines(
                "Memory",
                "Memory that the executor holds, by kind.",
                {"{kind}": "sum by (kind) (quire_executor_memory_bytes{m})"},
                "bytes",
                stacked=True,
            )
        )
        .with_panel(
            lines(
                "Start-up",
                "Start-up time of the current process, by phase.",
                {"{phase}": "max by (phase) (quire_executor_startup_seconds{m})"},
                "s",
                stacked=True,
            )
        )
        .with_panel(
            lines(
                "CUDA graphs",
                "Graphs of decode steps by state. Batches whose graph is missing for lack of memory take longer steps.",
                {"{state}": "sum by (state) (quire_executor_graphs{m})"},
                "short",
                stacked=True,
            )
        )
        .with_panel(
            lines(
                "Restarts",
                "Restarts within the preceding hour, by the address of the executor.",
                {"{executor}": f"sum by (executor) ({_RESTARTS})"},
                "short",
            )
        )
        .with_panel(
            lines(
                "Unexpected errors",
                "Exceptions per second that no code expected and a service survived. Tracebacks are in the log.",
                {
                    "scheduler, {where}": per_second("quire_unexpected_errors_total", "where"),
                    "executor, {where}": per_second("quire_executor_unexpected_errors_total", "where"),
                },
                "short",
            )
        )
        .with_panel(
            lines(
                "Versions",
                "Services that answer Prometheus, by version. There is more than one version during an update.",
                {"{service} {version}": "count by (service, version) (quire_build_info)"},
                "short",
            )
        )
    )
