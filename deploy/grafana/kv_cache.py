"""KV cache: what the pool holds, what of it is waste, what is shared, and what it costs when it is full."""

from grafana_foundation_sdk.builders import dashboard

from deploy.grafana.panels import WINDOW, bars, dashboard_named, lines, per_second, tile

_BY_STATE = "sum by (state) (quire_kv_blocks{m})"


def kv_cache() -> dashboard.Dashboard:
    board = dashboard_named("Quire / KV cache", "quire-kv-cache", "The block pool of a Quire server.")
    for panel in (
        tile("Blocks", "Of the pool.", "sum (quire_kv_blocks{m})", "short"),
        tile("In use", "Active blocks over all.", "max (quire_kv_occupancy_ratio{m})", "percentunit", bad_from=0.98),
        tile("Waste", "Empty places for tokens in active blocks.", "max (quire_kv_waste_ratio{m})", "percentunit"),
        tile("Shared", "Blocks in several block tables.", "sum (quire_kv_shared_blocks{m})", "short"),
        tile("Prefix hits", "Share of prompt tokens found in the prefix cache.", _hit_ratio(), "percentunit"),
        tile(
            "Preemptions", "Within the last 5 minutes.",
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
                "Free: empty. Cached: found again by a prefix until it is reused. Active: in a block table.",
                {"{state}": _BY_STATE},
                "short",
                stacked=True,
            )
        )
        .with_panel(
            lines(
                "Occupancy",
                "Active blocks over all.",
                {"{model_name}": "max by (model_name) (quire_kv_occupancy_ratio{m})"},
                "percentunit",
                most=1,
            )
        )
        .with_panel(
            lines(
                "Waste",
                "Places for tokens in active blocks that hold none: less than one block a sequence.",
                {"{model_name}": "max by (model_name) (quire_kv_waste_ratio{m})"},
                "percentunit",
            )
        )
        .with_panel(
            lines(
                "Places for tokens in active blocks",
                "Used, and allocated ahead of use.",
                {"{state}": "sum by (state) (quire_kv_slots{m})"},
                "short",
                width="two thirds",
                stacked=True,
            )
        )
        .with_panel(
            bars(
                "Block map",
                "The pool now. The live page of a scheduler shows it block by block, and `quire kv` in a terminal.",
                {"{state}": _BY_STATE, "of these shared": "sum (quire_kv_shared_blocks{m})"},
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
                "Blocks in several block tables.",
                {"{model_name}": "sum by (model_name) (quire_kv_shared_blocks{m})"},
                "short",
            )
        )
        .with_panel(
            lines(
                "Copies on write",
                "Blocks a second that were copied because they were shared.",
                {"copies": per_second("quire_kv_cow_copies_total")},
                "short",
            )
        )
        .with_panel(
            lines(
                "Prefix cache",
                "Share of prompt tokens found, counted once, at first admission: a recomputed token is no hit.",
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
                "Sequences a second that gave their blocks away.",
                {"{mode}": per_second("quire_preemptions_total", "mode")},
                "short",
            )
        )
        .with_panel(
            lines(
                "Preempted tokens",
                "Computed tokens a second that were thrown away and will be computed again.",
                {"tokens": per_second("quire_preempted_tokens_total")},
                "short",
            )
        )
        .with_panel(
            lines(
                "Share of the work lost",
                "Preempted tokens over all tokens that steps compute.",
                {"lost": f"{per_second('quire_preempted_tokens_total')} / {computed}"},
                "percentunit",
            )
        )
    )


def _hit_ratio() -> str:
    hits, queries = "quire_prefix_cache_hits_tokens_total", "quire_prefix_cache_queries_tokens_total"
    return f"sum (rate({hits}{{m}}[{WINDOW}])) / sum (rate({queries}{{m}}[{WINDOW}]))"
