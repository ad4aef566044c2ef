"""The file of tenants: what it may hold, and what is refused at start."""

from pathlib import Path

import pytest

from scheduler.config import SchedulerConfig
from scheduler.core import TenantTerms
from scheduler.main import EXIT_BAD_CONFIG, run
from scheduler.tenants.settings import Tenants, TenantsError

FILE = """
[default]
requests_per_minute = 600
max_waiting_requests = 50

[tenants.research]
weight = 2.5
priority = -1
default_max_tokens = 1024
"""


def load(path: Path, text: str) -> Tenants:
    path.write_text(text)
    return Tenants.load(str(path))


def test_without_a_file_all_tenants_are_equal() -> None:
    assert Tenants.load(None).terms_of("anyone") == TenantTerms()


def test_a_table_inherits_the_default_and_unknown_tenants_have_it(tmp_path: Path) -> None:
    tenants = load(tmp_path / "tenants.toml", FILE)
    research, other = tenants.settings_of("research"), tenants.settings_of("other")
    assert research.terms == TenantTerms(weight=2.5, priority=-1, max_waiting_requests=50)
    assert (research.requests_per_minute, research.default_max_tokens) == (600, 1024)
    assert other.terms == TenantTerms(max_waiting_requests=50)
    assert other.default_max_tokens is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[default]\nwieght = 2", "unknown keys: wieght"),
        ("[tenant.a]\nweight = 2", "unknown tables: tenant"),
        ("[default]\nweight = 0", "weight must be a number"),
        ("[default]\nweight = nan", "weight must be a number"),
        ("[default]\nweight = true", "weight must be a number"),
        ("[tenants.a]\npriority = 1.5", "priority must be a whole number"),
        ("[tenants.a]\nmax_num_seqs = 0", "max_num_seqs must be a whole number"),
        ("[tenants.a]\nmax_num_seqs = 2\ndefault_n = 3", "default_n must be at most max_num_seqs"),
        ("tenants = 3", "tenants must be tables"),
        ("default = 3", r"\[default\] must be a table"),
        ("[default", "Expected"),
    ],
)
def test_mistakes_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(TenantsError, match=problem):
        load(tmp_path / "tenants.toml", text)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TenantsError, match="No such file"):
        Tenants.load(str(tmp_path / "absent.toml"))


def test_a_bad_file_ends_the_process_with_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text("[default]\nwieght = 2")
    assert run(SchedulerConfig(model="models/tiny", tenants=str(path))) == EXIT_BAD_CONFIG
    assert "unknown keys: wieght" in capsys.readouterr().err
