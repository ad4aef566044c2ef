"""Executor: what a step costs and where, how full its batches are, and whether the device has work."""

from grafana_foundation_sdk.builders import dashboard

from deploy.grafana.panels import dashboard_named, heat_map, lines, per_second, percentiles, tile

_STEP = "quire_executor_step_duration_seconds"
_BATCH = "quire_step_batch_tokens"
_LAST_STEP = "quire_executor_last_step_timestamp_seconds"
# An executor is its address: a new process there is a restart.
_RESTARTS = "changes(quire_executor_start_timestamp_seconds{m}[1h])"


def executor() -> dashboard.Dashboard:
    board = dashboard_named("Quire / Executor", "quire-executor", "Steps, memory and restarts of a Quire executor.")
    for panel in (
        tile("Steps/s", "Steps that ended.", _rate_of("forward"), "short"),
        tile("Since the last step", "Grows where there is no work, too.", f"time() - max ({_LAST_STEP}{{m}})", "s"),
        tile("Idle", "Share of the time without a plan.", "max (quire_executor_idle_ratio{m})", "percentunit"),
        tile("Tokens a step", "Mean.", f"{per_second(f'{_BATCH}_sum')} / {per_second(f'{_BATCH}_count')}", "short"),
        tile("Memory", "Weights, pool and buffers.", "sum (quire_executor_memory_bytes{m})", "bytes"),
        tile("Restarts", "Within the last hour.", f"sum ({_RESTARTS})", "short", bad_from=1),
    ):
        board = board.with_panel(panel)
    return _process(_steps(board))


def _steps(board: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        board.with_row(dashboard.Row("Steps"))
        .with_panel(
            lines(
                "Time of a step by phase",
                "Means. queue: between arrival and start; prepare: inputs; forward: the model; sample: token ids.",
                {"{phase}": f"{per_second(f'{_STEP}_sum', 'phase')} / {per_second(f'{_STEP}_count', 'phase')}"},
                "s",
                width="half",
                stacked=True,
            )
        )
        .with_panel(
            lines(
                "Forward, percentiles",
                "The model's part of a step.",
                {name: query.replace("{m}", '{m, phase="forward"}') for name, query in percentiles(_STEP).items()},
                "s",
                width="half",
            )
        )
        .with_panel(heat_map("Tokens a step, spread", "Brighter: more steps.", _BATCH, "short"))
        .with_panel(
            lines(
                "Planning a step",
                "What the scheduler's core takes, hidden behind the steps in flight.",
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
                "Held, by kind.",
                {"{kind}": "sum by (kind) (quire_executor_memory_bytes{m})"},
                "bytes",
                stacked=True,
            )
        )
        .with_panel(
            lines(
                "Start-up",
                "What the process that runs now took to start, by phase.",
                {"{phase}": "max by (phase) (quire_executor_startup_seconds{m})"},
                "s",
                stacked=True,
            )
        )
        .with_panel(
            lines(
                "Restarts",
                "Within the hour before, by the address of the executor.",
                {"{executor}": f"sum by (executor) ({_RESTARTS})"},
                "short",
                width="half",
            )
        )
        .with_panel(
            lines(
                "Versions",
                "Services that answer Prometheus, by version: more than one while an update is under way.",
                {"{service} {version}": "count by (service, version) (quire_build_info)"},
                "short",
                width="half",
            )
        )
    )


def _rate_of(phase: str) -> str:
    return per_second(f"{_STEP}_count").replace("{m}", f'{{m, phase="{phase}"}}')
