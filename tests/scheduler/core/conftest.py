"""Options of the core's tests.

--regenerate   writes the golden transcripts and the state diagram again, then compares
--effort 20    simulates 20 times as many worlds, and searches 20 times as long with random examples
"""

import pytest
from hypothesis import HealthCheck, Phase, settings


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate", action="store_true", help="write golden files again")
    parser.addoption("--effort", type=int, default=1, help="factor for the numbers of seeds and examples")


@pytest.fixture
def regenerate(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--regenerate", default=False))


@pytest.fixture
def effort(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--effort", default=1))


@pytest.fixture
def search(effort: int) -> settings:
    """Settings of Hypothesis: the same examples in every run unless --effort is given, and no time limit."""
    return settings(
        max_examples=100 * effort,
        stateful_step_count=50,
        derandomize=effort == 1,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
