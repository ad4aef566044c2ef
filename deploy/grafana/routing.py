"""The row of the overview dashboard about gateways and the schedulers among which they choose."""

from grafana_foundation_sdk.builders import dashboard

from deploy.grafana.panels import lines, per_second


def with_routing(board: dashboard.Dashboard) -> dashboard.Dashboard:
    """Adds what gateways tell about the schedulers behind them. Their series have no label for the model."""
    return (
        board.with_row(dashboard.Row("Gateways"))
        .with_panel(
            lines(
                "Answers by status",
                "Answers of gateways, probes and scrapes included; and streams that failed after they began, whose "
                "answers count as 200, by the status that they would have had.",
                {
                    "{status}": _routed("quire_gateway_requests_total", "status"),
                    "stream failed, {status}": _routed("quire_gateway_stream_failures_total", "status"),
                },
                "reqps",
            )
        )
        .with_panel(
            lines(
                "Requests by scheduler",
                "Requests that gateways sent, by scheduler and reason: the policy, or why they were sent again.",
                {"{scheduler} {reason}": _routed("quire_gateway_choices_total", "scheduler", "reason")},
                "reqps",
                stacked=True,
            )
        )
        .with_panel(
            lines(
                "Known blocks",
                "Cached blocks that schedulers have reported to gateways. 0: the gateway chooses without knowing them.",
                {"{scheduler}": "max by (scheduler) (quire_gateway_known_blocks)"},
                "short",
            )
        )
        .with_panel(
            lines(
                "Reports",
                "Events of cached blocks, and times per second that all blocks had to be reported again.",
                {
                    "events, {scheduler}": _routed("quire_gateway_prefix_events_total", "scheduler"),
                    "all again, {scheduler}": _routed("quire_gateway_prefix_resyncs_total", "scheduler"),
                },
                "short",
            )
        )
    )


def _routed(counter: str, *by: str) -> str:
    return per_second(counter, *by).replace("{m}", "")
