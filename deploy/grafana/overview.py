"""The overview dashboard: readiness, throughput, latency, and the queue."""

from functools import partial

from grafana_foundation_sdk.builders import dashboard

from deploy.grafana.panels import (
    attainment,
    choice,
    dashboard_named,
    heat_map,
    lines,
    per_second,
    percentiles,
    tile,
)
from deploy.grafana.routing import with_routing

# Bounds of histogram buckets, as Prometheus writes them; attainment is exact only at these bounds.
TTFT_BOUNDS_S = ("0.1", "0.25", "0.5", "1.0", "2.5", "5.0", "10.0")
ITL_BOUNDS_S = ("0.01", "0.025", "0.05", "0.1", "0.25", "0.5")

REFUSALS = {
    "caller": ("quire_calls_refused_total", "reason"),
    "request": ("quire_requests_rejected_total", "reason"),
    "bound": ("quire_limited_total", "limit"),
}
"""Counters with the label that says why, by their names in the legend."""

# A scheduler whose scrape fails has no series of its own, so its target stands for it. In Kubernetes, where all targets
# of the PodMonitor have one job (its namespace and name), those of schedulers are at the port `status`.
READY = (
    "quire_ready or on (instance) 0 * "
    '(up{job="quire-scheduler"} or up{job=~".+/quire", endpoint="status"})'
)  # fmt: skip

TTFT = "quire_time_to_first_token_seconds"
ITL = "quire_inter_token_latency_seconds"


def overview() -> dashboard.Dashboard:
    board = (
        dashboard_named("Quire / Overview", "quire-overview", "Load, latency, queue and objectives of a Quire server.")
        .with_variable(choice("ttft", "TTFT objective, s", TTFT_BOUNDS_S, "1.0"))
        .with_variable(choice("itl", "ITL objective, s", ITL_BOUNDS_S, "0.1"))
    )
    small = partial(tile, width="small tile")
    for panel in (
        # Not filtered by model: a scheduler that has not seen an executor yet has no model name.
        small("Ready", "1 if every scheduler answers and serves.", f"min ({READY})", "short", good_from=1),
        small("Requests/s", "Requests that ended per second.", per_second("quire_requests_finished_total"), "reqps"),
        small("Tokens/s", "Generated tokens per second.", per_second("quire_generation_tokens_total"), "short"),
        small("Running", "Requests with a sequence in the batch.", "sum (quire_requests_running{m})", "short"),
        small("Queued", "Requests in the queue.", "sum (quire_queue_requests{m})", "short"),
        small(
            "Oldest in the queue", "Waiting time of the request that has waited longest.",
            "max (quire_queue_oldest_age_seconds{m})", "s", bad_from=30,
        ),
        small(
            "Pool in use", "Share of active blocks in the fullest pool.",
            "max (quire_kv_occupancy_ratio{m})", "percentunit", bad_from=0.98,
        ),
        small(
            "Within TTFT", "Share of requests with a first token within $ttft s.",
            attainment(TTFT, "ttft"), "percentunit",
        ),
    ):  # fmt: skip
        board = board.with_panel(panel)
    return with_routing(_refusals(_tenants(_reasons(_objectives(_latency(_throughput(board)))))))


def _throughput(board: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        board.with_row(dashboard.Row("Throughput"))
        .with_panel(
            lines(
                "Requests by reason of their end",
                "A request counts once, when its last sequence ends.",
                {"{reason}": per_second("quire_requests_finished_total", "reason")},
                "reqps",
                stacked=True,
            )
        )
        .with_panel(
            lines(
                "Tokens",
                "Generated tokens, and prompt tokens by the source of their KV. Recomputed tokens are not counted.",
                {
                    "generated": per_second("quire_generation_tokens_total"),
                    "prompt, {source}": per_second("quire_prompt_tokens_total", "source"),
                },
                "short",
            )
        )
        .with_panel(
            lines(
                "Refused requests",
                "Requests that were refused before they entered the queue, by status code.",
                {"{reason}": per_second("quire_requests_rejected_total", "reason")},
                "reqps",
                stacked=True,
            )
        )
    )


def _latency(board: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        board.with_row(dashboard.Row("Latency"))
        .with_panel(
            lines(
                "Time to first token",
                "Time from arrival to the first token, including the queue. Dots are single requests.",
                percentiles(TTFT),
                "s",
                width="half",
                exemplars=True,
            )
        )
        .with_panel(
            lines(
                "Inter-token latency",
                "Time between two tokens of a sequence. Dots are single requests.",
                percentiles(ITL),
                "s",
                width="half",
                exemplars=True,
            )
        )
        .with_panel(heat_map("Time to first token, spread", "Brighter: more requests.", TTFT, "s"))
        .with_panel(heat_map("Inter-token latency, spread", "Brighter: more tokens.", ITL, "s"))
        .with_panel(
            lines(
                "Whole requests",
                "From arrival to the end of the last sequence. Dots are single requests.",
                percentiles("quire_e2e_request_latency_seconds"),
                "s",
                exemplars=True,
            )
        )
        .with_panel(
            lines(
                "Request time by phase",
                "Mean time in the queue, from there to the first token, and from the first token to the end.",
                {
                    phase: f"{per_second(f'quire_request_{phase}_time_seconds_sum')}"
                    f" / {per_second(f'quire_request_{phase}_time_seconds_count')}"
                    for phase in ("queue", "prefill", "decode")
                },
                "s",
                stacked=True,
            )
        )
        .with_panel(
            lines(
                "Time per output token",
                "Mean time per output token of a sequence, after the first.",
                percentiles("quire_time_per_output_token_seconds"),
                "s",
            )
        )
    )


def _objectives(board: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        board.with_row(dashboard.Row("Objectives"))
        .with_panel(
            lines(
                "Attainment",
                "Share of requests with a first token within $ttft s, and of tokens within $itl s of the previous one.",
                {"TTFT ≤ $ttft s": attainment(TTFT, "ttft"), "ITL ≤ $itl s": attainment(ITL, "itl")},
                "percentunit",
                width="half",
                most=1,
            )
        )
        .with_panel(
            lines(
                "Request lengths, p90",
                "90 % of the requests have at most this many prompt or completion tokens.",
                {
                    "prompt": percentiles("quire_request_prompt_tokens")["p90"],
                    "completion": percentiles("quire_request_generation_tokens")["p90"],
                },
                "short",
                width="half",
            )
        )
    )


def _reasons(board: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        board.with_row(dashboard.Row("Queue"))
        .with_panel(
            lines(
                "Running and queued",
                "Requests in the batch, and in the queue by reason: new, preempted, deferred, or executor lost.",
                {
                    "running": "sum (quire_requests_running{m})",
                    "queued, {reason}": "sum by (reason) (quire_queue_requests{m})",
                },
                "short",
            )
        )
        .with_panel(
            lines(
                "Oldest request in the queue",
                "Time since the request that has waited longest entered the queue, or returned to it after a "
                "preemption or the loss of the executor.",
                {"oldest": "max (quire_queue_oldest_age_seconds{m})"},
                "s",
            )
        )
        .with_panel(
            lines(
                "Prompt tokens in the queue",
                "Prompt tokens of waiting requests; the limit is --max-waiting-prompt-tokens.",
                {"tokens": "sum (quire_queue_prompt_tokens{m})"},
                "short",
            )
        )
    )


def _tenants(board: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        board.with_row(dashboard.Row("Tenants"))
        .with_panel(
            lines(
                "Tokens by tenant",
                "Prompt tokens and generated tokens per second, of the largest tenants and all others.",
                {"{tenant}, {kind}": per_second("quire_tenant_tokens_total", "tenant", "kind")},
                "short",
                stacked=True,
                width="half",
            )
        )
        .with_panel(
            lines(
                "Service by tenant",
                "Computed prompt tokens, and generated tokens twice, per second.",
                {"{tenant}": per_second("quire_tenant_service_total", "tenant")},
                "short",
                stacked=True,
                width="half",
            )
        )
        .with_panel(
            lines(
                "Ahead of the least served",
                "Service, divided by the weight, by which a tenant is ahead of the tenant that waits with the least.",
                {"{tenant}": "sum by (tenant) (quire_tenant_ahead{m})"},
                "short",
                width="half",
            )
        )
        .with_panel(
            lines(
                "Waiting and refused",
                "Waiting sequences, and requests refused per second, by tenant.",
                {
                    "{tenant} waiting": "sum by (tenant) (quire_tenant_sequences_waiting{m})",
                    "{tenant} refused": per_second("quire_tenant_requests_rejected_total", "tenant"),
                },
                "short",
                width="half",
            )
        )
    )


def _refusals(board: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        board.with_row(dashboard.Row("Limits"))
        .with_panel(
            lines(
                "Refused at the edge",
                "Refusals per second: calls because of their caller, and requests, by reason; reads, grammars, "
                "connections and log lines because of a bound, by bound.",
                {f"{name}, {{{label}}}": per_second(counter, label) for name, (counter, label) in REFUSALS.items()},
                "short",
                width="half",
            )
        )
        .with_panel(
            lines(
                "Grammars",
                "Grammars of requests with structured output: compiled, found in the cache, or refused.",
                {"{result}": per_second("quire_grammars_total", "result")},
                "reqps",
                stacked=True,
                width="half",
            )
        )
    )
