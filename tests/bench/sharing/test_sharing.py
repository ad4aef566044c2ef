"""`bench sharing` on a scripted server with known block tables: requests, counts and report."""

import asyncio
import io
import json
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from rich.console import Console

from bench.command_line import BenchError
from bench.sharing.cases import PAPER, Case, Mode, all_cases
from bench.sharing.command import run
from bench.sharing.measure import CaseResult, SharingSettings, measure
from bench.sharing.report import PlotUnavailable, render_table, report, save_plot
from planning.lengths import ALPACA, SHAREGPT
from quire.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc
from tests.support.client.scripted_server import listen_as_admin


class SharingServer(generation_pb2_grpc.GenerationServicer, admin_pb2_grpc.AdminServicer):
    """A server whose sequences have the tables (1, 2, 3 + number). A request ends after two block maps were read.

    num_missing  number of tokens by which each sequence is too short
    """

    def __init__(self, num_missing: int = 0) -> None:
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.num_resets = 0
        self._num_missing = num_missing
        self._num_running = 0
        self._num_maps = 0

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Any) -> Any:  # noqa: N802
        self.requests.append(request)
        num_sequences = request.sampling.n or 1
        yield generation_pb2.GenerateResponse(started=generation_pb2.Started())
        self._num_running += num_sequences
        seen = self._num_maps
        if request.WhichOneof("prompt") == "token_ids" and request.stopping.max_tokens > 1:
            while self._num_maps < seen + 2:  # noqa: ASYNC110 - another call reads the maps
                await asyncio.sleep(0.001)
        self._num_running -= num_sequences
        num_tokens = request.stopping.max_tokens - self._num_missing
        for index in range(num_sequences):
            yield generation_pb2.GenerateResponse(
                delta=generation_pb2.Delta(index=index, token_ids=range(10, 10 + num_tokens))
            )
            end = generation_pb2.Finished(
                index=index,
                reason=generation_pb2.FINISH_REASON_LENGTH,
                usage=generation_pb2.Usage(completion_tokens=num_tokens),
            )
            yield generation_pb2.GenerateResponse(finished=end)

    async def GetServerInfo(self, request: Any, context: Any) -> generation_pb2.GetServerInfoResponse:  # noqa: N802
        return generation_pb2.GetServerInfoResponse(
            max_model_len=128, num_blocks=64, block_size=16, state=generation_pb2.SERVER_STATE_SERVING
        )

    async def GetBlockMap(self, request: Any, context: Any) -> admin_pb2.GetBlockMapResponse:  # noqa: N802
        self._num_maps += not request.summary_only
        return admin_pb2.GetBlockMapResponse(
            sequences=[
                admin_pb2.SequenceInfo(num_tokens=40, num_prompt_tokens=33, block_table=[1, 2, 3 + number])
                for number in range(self._num_running)
            ]
        )

    async def ResetPrefixCache(self, request: Any, context: Any) -> admin_pb2.ResetPrefixCacheResponse:  # noqa: N802
        self.num_resets += 1
        return admin_pb2.ResetPrefixCacheResponse()


@asynccontextmanager
async def serving(servicer: SharingServer) -> AsyncIterator[str]:
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServicer_to_server(servicer, server)
    admin_pb2_grpc.add_AdminServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    address = f"127.0.0.1:{port}"
    listen_as_admin(server, address)
    await server.start()
    yield address
    await server.stop(grace=None)


def console() -> Console:
    return Console(file=io.StringIO(), width=120)


SMALL = (Case(Mode.SAMPLES, ALPACA, 2), Case(Mode.BEAMS, SHAREGPT, 4), Case(Mode.SYSTEM_PROMPT, ALPACA, 3))


async def results_of(servicer: SharingServer) -> list[CaseResult]:
    async with serving(servicer) as address:
        _, results = await measure(address, SharingSettings(SMALL, num_requests=2, num_system_tokens=40), console())
    return results


async def test_sharing_is_counted_in_tables_of_decoding_sequences() -> None:
    servicer = SharingServer()
    results = await results_of(servicer)
    assert [(result.mean_unshared, result.mean_blocks) for result in results[:2]] == [(6, 4), (12, 6)]
    assert [round(result.saved_ratio, 3) for result in results[:2]] == [0.333, 0.5]
    assert [result.peak_saved_ratio for result in results[:2]] == [result.saved_ratio for result in results[:2]]
    assert 0.333 < results[2].saved_ratio <= 0.445  # a group: two of them run, or all three
    assert all(result.num_maps >= 2 for result in results)
    asked = [request for request in servicer.requests if request.WhichOneof("prompt") == "token_ids"]
    assert [(r.sampling.n, r.sampling.beam_width) for r in asked[:4]] == [(2, 0), (2, 0), (4, 4), (4, 4)]
    assert all(not r.sampling.HasField("temperature") for r in asked[2:4])
    groups = asked[4:]
    assert [r.stopping.max_tokens == 1 for r in groups].count(True) >= 2  # only the system prompt
    assert servicer.num_resets == 6


async def test_short_completion_invalidates_the_measurement() -> None:
    servicer = SharingServer(num_missing=1)
    async with serving(servicer) as address:
        with pytest.raises(BenchError, match="full length"):
            await run(SharingSettings(SMALL[:1], num_requests=1), address, (), Path("unused"), console())


async def test_run_saves_json_and_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = console()
    async with serving(SharingServer()) as address:
        await run(SharingSettings(SMALL, num_requests=1), address, (), tmp_path / "results" / "sharing.json", out)
    values = json.loads((tmp_path / "results" / "sharing.json").read_text())
    assert [case["case"]["mode"] for case in values["cases"]] == ["samples", "beams", "system prompt"]
    assert values["cases"][1]["saved_ratio"] == 0.5
    assert "number" not in values["paper"]
    assert (tmp_path / "results" / "sharing.png").read_bytes().startswith(b"\x89PNG")
    assert isinstance(out.file, io.StringIO)
    printed = out.file.getvalue()
    assert "44.3-66.3%" in printed
    assert "50.0%" in printed


async def test_table_and_report_cite_the_paper() -> None:
    results = await results_of(SharingServer())
    out = io.StringIO()
    Console(file=out, width=80).print(render_table(results))
    rows = [line.split() for line in out.getvalue().splitlines()]
    assert ["samples,", "Alpaca-like", "2"] in [row[:3] for row in rows]
    assert [row[-1] for row in rows[2:4]] == ["6.1-9.8%", "44.3-66.3%"]
    values = report(results, {"model_name": "toy"})
    assert "Kwon" in values["paper"]["source"]
    assert len(values["paper"]["saved"]) == len(PAPER) == 4


async def test_missing_matplotlib_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = await results_of(SharingServer())
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PlotUnavailable, match=r"quire\[bench\]"):
        save_plot(results, tmp_path / "plot.json")


def test_all_cases_cover_modes_lengths_and_numbers() -> None:
    cases = all_cases((2, 4, 6))
    assert len(cases) == 15
    assert {case.num_sharers for case in cases if case.mode is Mode.BEAMS} == {2, 4, 6}


@pytest.mark.parametrize("lengths", [ALPACA, SHAREGPT])
def test_lengths_have_the_means_of_the_paper_and_scale_with_the_model(lengths: Any) -> None:
    rng = random.Random(3)
    drawn = [lengths.draw(rng, 2048) for _ in range(20_000)]
    assert lengths.scale(2048) == 1.0
    assert sum(prompt for prompt, _ in drawn) / len(drawn) == pytest.approx(lengths.mean_prompt, rel=0.08)
    assert sum(output for _, output in drawn) / len(drawn) == pytest.approx(lengths.mean_output, rel=0.08)
    small = [lengths.draw(rng, 128) for _ in range(1000)]
    assert max(prompt + output for prompt, output in small) <= 128
    assert min(min(pair) for pair in small) >= 2


def test_saved_ratio_is_zero_without_blocks() -> None:
    empty = CaseResult(SMALL[0], 1, 1.0, 1.0, 1.0, 1, 0.0, 0.0, 0, 0, 0)
    assert (empty.saved_ratio, empty.peak_saved_ratio) == (0.0, 0.0)
    assert replace(empty, peak_unshared=4, peak_blocks=3).peak_saved_ratio == 0.25
