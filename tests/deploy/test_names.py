"""All metric names in dashboards, rules and docs exist, and every metric is documented."""

import re

from prometheus_client.parser import text_string_to_metric_families

from deploy.reference import PAGE, metric_names
from tests.support.deploy.observed import Observed
from tests.support.deploy.panels import NAME, panel_queries, rules
from tests.support.e2e.process import ROOT

SHIPPED = {
    "scheduler": {
        "quire_build_info": {"service", "version"},
        "quire_ready": set(),
        "quire_engine_failures_total": set(),
        "quire_requests_running": set(),
        "quire_queue_requests": {"reason"},
        "quire_queue_prompt_tokens": set(),
        "quire_queue_oldest_age_seconds": set(),
        "quire_kv_blocks": {"state"},
        "quire_kv_slots": {"state"},
        "quire_kv_occupancy_ratio": set(),
        "quire_kv_waste_ratio": set(),
        "quire_kv_shared_blocks": set(),
        "quire_kv_cow_copies_total": set(),
        "quire_prefix_cache_queries_tokens_total": set(),
        "quire_prefix_cache_hits_tokens_total": set(),
        "quire_preemptions_total": {"mode"},
        "quire_preempted_tokens_total": set(),
        "quire_prompt_tokens_total": {"source"},
        "quire_generation_tokens_total": set(),
        "quire_requests_finished_total": {"reason"},
        "quire_requests_resumed_total": set(),
        "quire_requests_rejected_total": {"reason"},
        "quire_calls_refused_total": {"reason"},
        "quire_limited_total": {"limit"},
        "quire_unexpected_errors_total": {"where"},
        "quire_open_files": set(),
        "quire_grammars_total": {"result"},
        "quire_grammar_compile_seconds": {"le"},
        "quire_tenant_service_total": {"tenant"},
        "quire_tenant_tokens_total": {"tenant", "kind"},
        "quire_tenant_ahead": {"tenant"},
        "quire_tenant_sequences_running": {"tenant"},
        "quire_tenant_sequences_waiting": {"tenant"},
        "quire_tenant_requests_rejected_total": {"tenant"},
        "quire_time_to_first_token_seconds": {"le"},
        "quire_inter_token_latency_seconds": {"le"},
        "quire_time_per_output_token_seconds": {"le"},
        "quire_e2e_request_latency_seconds": {"le"},
        "quire_request_queue_time_seconds": {"le"},
        "quire_request_prefill_time_seconds": {"le"},
        "quire_request_decode_time_seconds": {"le"},
        "quire_request_prompt_tokens": {"le"},
        "quire_request_generation_tokens": {"le"},
        "quire_step_batch_tokens": {"le"},
        "quire_schedule_duration_seconds": {"le"},
    },
    "executor": {
        "quire_build_info": {"service", "version", "executor"},
        "quire_executor_step_duration_seconds": {"phase", "le", "executor"},
        "quire_executor_last_step_timestamp_seconds": {"executor"},
        "quire_executor_start_timestamp_seconds": {"executor"},
        "quire_executor_not_finite_total": {"executor"},
        "quire_executor_grammars_compiled_total": {"executor"},
        "quire_executor_grammar_ends_total": {"executor"},
        "quire_executor_grammar_wait_seconds_total": {"executor"},
        "quire_executor_grammar_deferred_total": {"executor"},
        "quire_executor_unexpected_errors_total": {"where", "executor"},
        "quire_executor_idle_ratio": {"executor"},
        "quire_executor_memory_bytes": {"kind", "executor"},
        "quire_executor_startup_seconds": {"phase", "executor"},
        "quire_executor_graphs": {"state", "executor"},
    },
}
"""Names and labels that users have queries for. None may disappear, and new ones must be added here."""


def served_names(observed: Observed) -> set[str]:
    return set().union(*map(metric_names, observed.pages()))


def names_in(text: str) -> set[str]:
    return set(NAME.findall(text))


def test_all_shipped_names_and_labels_are_served(observed: Observed) -> None:
    for service, page in zip(SHIPPED, observed.pages(), strict=True):
        served: dict[str, set[str]] = {}
        for family in text_string_to_metric_families(page):
            if not family.name.endswith("_created"):
                name = f"{family.name}_total" if family.type == "counter" else family.name
                served[name] = {label for sample in family.samples for label in sample.labels} - {"model_name"}
        assert served == SHIPPED[service]


def test_dashboards_use_existing_names(observed: Observed) -> None:
    used = set().union(*(names_in(query.expression) for query in panel_queries()))
    used = {name for name in used if not name.startswith("quire_gateway_")}  # tests/gateway/test_page.py
    assert used - served_names(observed) == set()


def test_rules_use_existing_names(observed: Observed) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    used = set().union(*(names_in(rule["expr"]) for rule in rules()))
    used = {name for name in used if not name.startswith("quire_gateway_")}  # tests/gateway/test_page.py
    assert used - served_names(observed) - recorded == set()
    assert len(recorded) == len([rule for rule in rules() if "record" in rule])


def test_the_documentation_uses_existing_names(observed: Observed) -> None:
    served = served_names(observed)
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in served}
    for page in (*ROOT.glob("docs/*.md"), ROOT / "README.md"):
        named = set(re.findall(r"\bquire_[a-z0-9_]+\b", page.read_text(encoding="utf-8")))
        named = {name for name in named if not name.startswith("quire_gateway_")}  # tests/gateway/test_page.py
        assert named - families - served == set(), page.name


def test_every_metric_is_in_the_documentation(observed: Observed) -> None:
    text = PAGE.read_text(encoding="utf-8")
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in served_names(observed)}
    assert {name for name in families if f"| `{name}` |" not in text} == set()
