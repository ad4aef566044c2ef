"""Two Quire servers in turns, scripted."""

from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

from rich.console import Console

from bench.serving.measurer import LoadSettings, ratios
from bench.serving.serve import ServeSettings, run
from quire.v1 import generation_pb2
from tests.support.client.scripted_server import ScriptedServer, delta, finished, started


async def all_tokens(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
    wanted = request.stopping.max_tokens
    yield started()
    yield delta(0, "", *range(wanted))
    yield finished(0, generation_pb2.FINISH_REASON_LENGTH, completion_tokens=wanted)


async def test_two_servers_get_the_same_requests_in_turns() -> None:
    own, peer = ScriptedServer(), ScriptedServer()
    load = LoadSettings((1, 2), num_requests=3, num_rounds=2)
    with ExitStack() as stack:
        for server in (own, peer):
            server.script = all_tokens
            server.start()
            stack.callback(server.stop)
        _, runs = await run(ServeSettings(load, own.address, peer_grpc=peer.address), Console(quiet=True))
    assert [each.summary.engine for each in runs] == ["quire", "peer"] * 2 + ["peer", "quire"] * 2
    prompts = [list(request.token_ids.ids) for request in own.requests]
    assert len(prompts) > 12
    assert sorted(prompts) == sorted(list(request.token_ids.ids) for request in peer.requests)
    assert set(ratios(runs)["peer"]) == {1, 2}
    assert not any(each.observed.pool or each.observed.steps for each in runs)
