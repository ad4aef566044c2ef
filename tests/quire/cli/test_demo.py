"""The demonstration against a scripted server, without a terminal."""

import asyncio
import io
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from rich.console import Console
from typer.testing import CliRunner

import quire
from quire.cli import demo
from quire.cli.block_map_view import RequestColours
from quire.cli.demo import perform
from quire.cli.demo_scenes import SCENES, Scene
from quire.cli.demo_view import Readings, live_view
from quire.cli.main import app
from quire.settings import ConfigError
from quire.v1 import admin_pb2, generation_pb2
from tests.support.client.scripted_server import ScriptedServer, delta, finished, started

THREE = Scene("three", "samples", "Once", {"n": 2, "temperature": 0.5})
CHAT = Scene("chat", "a chat", [quire.ChatMessage("user", "Why?")])


def console(width: int = 100) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width), out


async def test_texts_and_frames_are_printed_without_a_terminal(server: ScriptedServer) -> None:
    async def script(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        yield started(request.request_id, 3, 2)
        for index in range(request.sampling.n or 1):
            yield delta(index, f" text {index}", 1, 2)
        await asyncio.sleep(0.5)  # long enough for the first frame
        for index in range(request.sampling.n or 1):
            yield finished(index)

    server.script = script
    server.block_map = admin_pb2.GetBlockMapResponse(
        block_size=4,
        blocks=[
            admin_pb2.BlockInfo(state=admin_pb2.BLOCK_STATE_FREE),
            admin_pb2.BlockInfo(state=admin_pb2.BLOCK_STATE_ACTIVE, ref_count=2),
        ],
        sequences=[admin_pb2.SequenceInfo(request_id="three", num_tokens=3, block_table=[1])],
    )
    terminal, out = console()
    async with quire.AsyncClient(server.address) as client:
        show = await perform(client, terminal, (THREE, CHAT))
    assert [reading.text for reading in show.readings.all] == [" text 0", " text 1", " text 0"]
    assert all(reading.finished for reading in show.readings.all)
    assert show.readings.num_tokens == 6
    assert show.cached_tokens == 4
    text = out.getvalue()
    assert "after 0." in text
    assert "three[1] · samples · 2 tokens, eos" in text
    assert "Once text 1" in text
    assert "Why?\n text 0" in text
    assert {request.request_id for request in server.requests} == {"three", "chat"}


async def test_the_help_shows_the_values_that_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def service_pair(values: dict[str, Any]) -> None:
        seen.update(values)
        raise ConfigError("seen")

    monkeypatch.setattr(demo, "service_pair", service_pair)
    with pytest.raises(ConfigError):
        await demo.run({"model": "tiny"}, console()[0])
    assert (seen.pop("model"), seen["num_blocks"], seen["gateway"]) == ("tiny", 128, False)
    help_text = CliRunner().invoke(app, ["demo", "--help"]).output
    for name, value in seen.items():
        _, flag, rest = help_text.partition(f"\n  --{name.replace('_', '-')} ")
        shown = " ".join(rest.split("\n  --")[0].split())
        assert flag, name
        assert shown.endswith(f"[default: {value}]"), shown


async def test_a_scene_that_fails_does_not_affect_the_others(server: ScriptedServer) -> None:
    async def script(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        if request.request_id == "chat":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no chat template")
        yield started()
        for index in range(2):
            yield finished(index)

    server.script = script
    terminal, out = console()
    async with quire.AsyncClient(server.address) as client:
        show = await perform(client, terminal, (CHAT, THREE))
    chat, *three = show.readings.all
    assert (chat.error, chat.finished) == ("no chat template", None)
    assert all(reading.finished for reading in three)
    assert "no chat template" in out.getvalue()


def test_the_screen_shows_every_sequence_whatever_its_size() -> None:
    readings = Readings.of(SCENES)
    readings.all[0].text = "It was a dark night."
    for width, height in ((120, 50), (80, 24), (40, 12)):
        terminal, out = console(width)
        terminal.size = (width, height)  # type: ignore[assignment]  # rich takes a plain pair too
        terminal.print(live_view(readings, None, RequestColours(), (width, height)))
        lines = out.getvalue().splitlines()
        assert len(lines) <= height
        assert max(map(len, lines)) <= width
        if height == 50:
            assert all(f"{reading.name} " in out.getvalue() for reading in readings.all)
            assert "dark night." in out.getvalue()


def test_scenes_cover_all_kinds_of_requests() -> None:
    names = [scene.name for scene in SCENES]
    assert len(set(names)) == len(names)
    assert any(scene.num_sequences >= 3 for scene in SCENES)
    assert any(scene.is_chat for scene in SCENES)
    prompts = [scene.prompt for scene in SCENES if isinstance(scene.prompt, str)]
    assert any(one != other and other.startswith(one) for one in prompts for other in prompts)  # a prefix hit
