"""Tests that requests from the prompt box join their client's trace, as requests over gRPC do."""

import aiohttp

from tests.support.live.served import Served

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


async def test_the_trace_of_an_http_request_is_in_the_exemplars(served: Served) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
    body = {"text": "hello", "request_id": "mine", "stopping": {"max_tokens": 3}}
    async with aiohttp.ClientSession(served.url) as session:
        async with session.post("/live/completions", json=body, headers=headers) as response:
            assert response.status == 200
            await response.read()
        accepted = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
        async with session.get("/metrics", headers=accepted) as response:
            assert response.headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
            page = await response.text()
        async with session.get("/metrics") as response:
            assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            plain = await response.text()
    exemplar = f'# {{request_id="mine",trace_id="{TRACE_ID}"}}'
    (line,) = [
        line
        for line in page.splitlines()
        if line.startswith("quire_time_to_first_token_seconds_bucket") and exemplar in line
    ]
    assert len(line.split(exemplar)[1].split()) == 2, "a value and a time"
    assert "mine" not in plain
