"""On and off in one run: both sides stream whole, and only one of them can be seen."""

import aiohttp

from bench.observability_cost import OPEN_METRICS, _services, measure, table
from bench.shell_cost import Load, rig


async def test_pairs_of_turns() -> None:
    pairs = await measure(1, Load(num_clients=3, num_tokens=30, num_requests=2))
    (pair,) = pairs
    for cost in (pair.watched, pair.blind):
        assert cost.num_checked_tokens >= 3 * 2 * 30
        assert cost.scheduler_cpu_s > 0
    assert pair.lost_ratio < 1 > pair.lost_cpu_ratio
    assert "median of 1" in table(pairs)


async def test_what_is_compared() -> None:
    """The blind side has recorded nothing; the other side has."""
    counts = {}
    for module in ("quire", "bench.unobserved"):
        async with rig(services=_services(module, "error", False)) as bench:
            await bench.measure(Load(num_clients=2, num_tokens=20, num_requests=1))
            async with aiohttp.ClientSession() as http:
                async with http.get(f"http://{bench.http_address}/metrics", headers=OPEN_METRICS) as response:
                    lines = (await response.text()).splitlines()
        counts[module] = sum(
            float(line.split()[1])
            for line in lines
            if line.startswith(("quire_generation_tokens_total", "quire_step_batch_tokens_count"))
        )
    assert counts["quire"] >= 2 * 20
    assert counts["bench.unobserved"] == 0
