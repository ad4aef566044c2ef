"""Both sides of the comparison stream completely, and only one of them records metrics."""

import aiohttp

from bench.overhead.observability_cost import OPEN_METRICS, _services, measure, table
from bench.overhead.shell_cost import harness
from bench.overhead.stream_load import Load


async def test_measure_returns_pairs_of_turns() -> None:
    pairs = await measure(1, Load(num_clients=3, num_tokens=30, num_requests=2))
    (pair,) = pairs
    for cost in (pair.watched, pair.blind):
        assert cost.num_checked_tokens >= 3 * 2 * 30
        assert cost.scheduler_cpu_s > 0
    assert pair.lost_ratio < 1 > pair.lost_cpu_ratio
    assert "median of 1" in table(pairs)


async def test_only_the_watched_side_records_metrics() -> None:
    counts = {}
    for module in ("quire", "bench.overhead.unobserved"):
        async with harness(services=_services(module, "error", False)) as running:
            await running.measure(Load(num_clients=2, num_tokens=20, num_requests=1))
            async with aiohttp.ClientSession() as http:
                async with http.get(f"http://{running.http_address}/metrics", headers=OPEN_METRICS) as response:
                    lines = (await response.text()).splitlines()
        counts[module] = sum(
            float(line.split()[1])
            for line in lines
            if line.startswith(("quire_generation_tokens_total", "quire_step_batch_tokens_count"))
        )
    assert counts["quire"] >= 2 * 20
    assert counts["bench.overhead.unobserved"] == 0
