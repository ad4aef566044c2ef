"""The KV cache dashboard: the use of the pool, its waste, sharing, and the cost of memory pressure."""

from grafana_foundation_sdk.builders import dashboard

from deploy.grafana.panels import WINDOW, bars, dashboard_named, lines, per_second, tile

_BY_STATE = "sum by (state) (quire_kv_blocks{m})"
_SUM_BY_MODEL = "sum by (model_name)"


def kv_cache() -> dashboard.Dashboard:
    board = dashboard_named("Quire / KV cache", "quire-kv-cache", "The block pool of a Quire server.")
    for panel in (
        tile("Blocks", "Number of blocks in the pool.", "sum (quire_kv_blocks{m})", "short"),
        tile(
            "In use", "Share of active blocks in the fullest pool.",
            "max (quire_kv_occupancy_ratio{m})", "percentunit", bad_from=0.98,
        ),
        tile(
            "Waste", "Share of token slots in active blocks that are empty.",
            _waste("sum"), "percentunit",
        ),
        tile("Shared", "Blocks in more than one block table.", "sum (quire_kv_shared_blocks{m})", "short"),
        tile("Prefix hits", "Share of prompt tokens found in the prefix cache.", _hit_ratio(), "percentunit"),
        tile(
            "Preemptions", "Preemptions within the last 5 minutes.",
            "sum (increase(quire_preemptions_total{m}[5m]))", "short", bad_from=1,
        ),
    ):  # fmt: skip
        board = board.with_panel(panel)
    return _pressure(_sharing(_pool(board)))


def _pool(board: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        board.with_row(dashboard.Row("Pool"))
        .with_panel(
            lines(
                "Blocks by state",
                "Free blocks are empty. Cached blocks can be found by a prefix until they are reused. Active blocks "
                "are in a block table.",
                {"{state}": _BY_STATE},
                "short",
                stacked=True,
            )
        )
        .with_panel(
            lines(
                "Occupancy",
                "Share of active blocks among all blocks of all servers, and in the fullest of their pools.",
                {
                    "{model_name}": _ratio(_SUM_BY_MODEL, "quire_kv_blocks", "active"),
                    "{model_name}, fullest": "max by (model_name) (quire_kv_occupancy_ratio{m})",
                },
                "percentunit",
                most=1,
            )
        )
        .with_panel(
            lines(
                "Waste",
                "Share of token slots in active blocks that are empty; less than one block per sequence.",
                {"{model_name}": _waste(_SUM_BY_MODEL)},
                "percentunit",
            )
        )
        .with_panel(
            lines(
                "Token slots in active blocks",
                "Token slots that hold a token, and those that are allocated but still empty.",
                {"{state}": "sum by (state) (quire_kv_slots{m})"},
                "short",
                width="two thirds",
                stacked=True,
            )
        )
        .with_panel(
            bars(
                "Block map",
                "Current state of the pool. A scheduler's live page and `quire kv` in a terminal show every block.",
                {"{state}": _BY_STATE, "active and shared": "sum (quire_kv_shared_blocks{m})"},
                "short",
            )
        )
    )


def _sharing(board: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        board.with_row(dashboard.Row("Sharing"))
        .with_panel(
            lines(
                "Shared blocks",
                "Blocks in more than one block table.",
                {"{model_name}": "sum by (model_name) (quire_kv_shared_blocks{m})"},
                "short",
            )
        )
        .with_panel(
            lines(
                "Copies on write",
                "Blocks per second that were copied before a write because they were shared.",
                {"copies": per_second("quire_kv_cow_copies_total")},
                "short",
            )
        )
        .with_panel(
            lines(
                "Prefix cache",
                "Share of prompt tokens found in the prefix cache at first admission; recomputation does not count.",
                {"hit ratio": _hit_ratio()},
                "percentunit",
                most=1,
            )
        )
    )


def _pressure(board: dashboard.Dashboard) -> dashboard.Dashboard:
    computed = per_second("quire_step_batch_tokens_sum")
    return (
        board.with_row(dashboard.Row("Pressure"))
        .with_panel(
            lines(
                "Preemptions",
                "Preempted sequences per second; a preempted sequence loses its blocks.",
                {"{mode}": per_second("quire_preemptions_total", "mode")},
                "short",
            )
        )
        .with_panel(
            lines(
                "Preempted tokens",
                "Computed tokens per second that were discarded and have to be computed again.",
                {"tokens": per_second("quire_preempted_tokens_total")},
                "short",
            )
        )
        .with_panel(
            lines(
                "Share of the work lost",
                "Preempted tokens as a share of all tokens that steps compute.",
                {"lost": f"{per_second('quire_preempted_tokens_total')} / {computed}"},
                "percentunit",
            )
        )
    )


def _waste(total: str) -> str:
    return _ratio(total, "quire_kv_slots", "wasted")


def _ratio(total: str, gauge: str, state: str) -> str:
    """Returns a query for the share of one state, 0 if there is nothing.

    It is a ratio of sums over all servers: a server with little in its pool can have any ratio of its own.
    """
    return f'{total} ({gauge}{{m, state="{state}"}}) / clamp_min({total} ({gauge}{{m}}), 1)'


def _hit_ratio() -> str:
    hits, queries = "quire_prefix_cache_hits_tokens_total", "quire_prefix_cache_queries_tokens_total"
    return f"sum (rate({hits}{{m}}[{WINDOW}])) / sum (rate({queries}{{m}}[{WINDOW}]))"
