"""Hostile grammars cost a bounded time and memory, and harm no other tenant."""

import asyncio
import json
import os
import signal
from typing import Any

import psutil
import pytest

from scheduler.core import QueueFull, Unavailable
from scheduler.text import turns
from scheduler.text.grammars import MEMORY, TIME, CompiledGrammar
from tests.support.scheduler.grammar_rig import SLOW, MakeCompiler, compile_text, worker_pids


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(a{1,1000}){1,1000}"),
        ("regex", "((a|b|c|d|e){1,50}){1,50}"),
        ("json_schema", json.dumps({"enum": [f"value {i}" for i in range(15_000)]})),
        (
            "json_schema",
            json.dumps(
                {f"d{i}": {"anyOf": [{"$ref": f"#/d{i + 1}"}] * 2} for i in range(40)}
                | {"d40": {"type": "null"}, "$ref": "#/d0"}
            ),
        ),
        ("choice", json.dumps([f"{i} " * 40 for i in range(1024)])),
    ],
)
async def test_large_grammars_have_a_result_and_harm_nothing(make_compiler: MakeCompiler, kind: str, text: str) -> None:
    compiler = make_compiler()
    compiled = await compile_text(compiler, kind, text)
    assert bool(compiled.text) != bool(compiled.problem)
    assert (await compile_text(compiler, "regex", "next")).text


async def test_a_grammar_that_takes_too_long_ends_its_process_only(make_compiler: MakeCompiler) -> None:
    compiler = make_compiler(max_s=0.2)
    slow = asyncio.create_task(compile_text(compiler, "json_schema", SLOW))
    assert (await compile_text(compiler, "regex", "other", tenant="b")).text
    assert (await slow) == CompiledGrammar(problem="takes more than 0.2 s to compile", limit=TIME)
    before = worker_pids()
    assert (await compile_text(compiler, "json_schema", SLOW)).limit == TIME  # from the cache
    assert (await compile_text(compiler, "regex", "next")).text
    assert set(before) <= set(worker_pids())


async def test_slow_grammars_of_a_tenant_keep_no_other_waiting(make_compiler: MakeCompiler) -> None:
    """The slow ones would need half a minute, and the others are ready before any of them ends."""
    compiler = make_compiler(max_s=30)
    slow = [
        asyncio.create_task(compile_text(compiler, "json_schema", SLOW + " " * i, tenant="hostile")) for i in range(4)
    ]
    await asyncio.sleep(0.1)
    for text in ("a", "b"):
        assert (await compile_text(compiler, "regex", text, tenant="other")).text
    assert not any(each.done() for each in slow)
    assert len(worker_pids()) == 3
    await compiler.close()
    assert [type(each) for each in await asyncio.gather(*slow, return_exceptions=True)] == [Unavailable] * 4


async def test_a_grammar_that_takes_too_much_memory_is_refused(make_compiler: MakeCompiler) -> None:
    compiler = make_compiler(max_memory_bytes=4 << 20, max_s=30)
    large = json.dumps({"enum": [f"value {i}" for i in range(15_000)]})
    compiled = await compile_text(compiler, "json_schema", large)
    assert compiled == CompiledGrammar(problem="needs more than 4 MiB to compile", limit=MEMORY)
    assert (await compile_text(compiler, "regex", "next")).text


async def test_grammars_that_refer_too_deeply_are_refused_before_the_executor_gets_them(
    make_compiler: MakeCompiler,
) -> None:
    """The first has nearly the most that is compiled. The executor could use the next three, see `tests.executor`."""
    compiler = make_compiler()
    assert (await compile_text(compiler, "lark", chain(1_100))).text
    for depth in (1_500, 2_672, 3_600, 8_000):
        compiled = await compile_text(compiler, "lark", chain(depth))
        assert compiled == CompiledGrammar(problem="refers from rule to rule too deeply to compile", limit=MEMORY)
    assert (await compile_text(compiler, "regex", "next")).text


def chain(depth: int) -> str:
    """Returns a grammar in Lark whose rules refer to each other, one after the other."""
    return "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(depth)), f'r{depth}: "a"'])


async def test_a_compilation_survives_a_process_that_is_killed(make_compiler: MakeCompiler) -> None:
    compiler = make_compiler(max_s=0.5)
    assert (await compile_text(compiler, "regex", "first")).text
    (pid,) = worker_pids()
    os.kill(pid, signal.SIGSTOP)
    task = asyncio.create_task(compile_text(compiler, "regex", "second"))
    await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    assert (await task).text
    assert (await compile_text(compiler, "regex", "third")).text


async def test_a_grammar_whose_processes_are_always_killed_is_refused_and_tried_again_later(
    make_compiler: MakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = make_compiler()
    killed: list[int] = []

    async def kill(message: dict[str, Any], tenant: str, size: int) -> int:
        killed.append(size)
        return -signal.SIGKILL

    with monkeypatch.context() as patched:
        patched.setattr(compiler._workers, "ask", kill)
        compiled = await compile_text(compiler, "regex", "a")
    assert "ended with status -9" in compiled.problem
    assert len(killed) == 2
    assert (await compile_text(compiler, "regex", "a")).text


@pytest.mark.timeout(1800)
async def test_memory_is_bounded_with_many_distinct_schemas(make_compiler: MakeCompiler) -> None:
    """With NUM_SCHEMAS=100000 in the environment it takes five minutes."""
    number = int(os.environ.get("NUM_SCHEMAS", "2000"))
    compiler = make_compiler(max_cache_bytes=256 << 10)
    assert (await compile_text(compiler, "json_schema", schema(0))).text

    def resident() -> int:
        return sum(psutil.Process(pid).memory_info().rss for pid in worker_pids())

    for i in range(1, 500):
        await compile_text(compiler, "json_schema", schema(i))
    before = resident()
    for i in range(500, number):
        assert (await compile_text(compiler, "json_schema", schema(i))).text
    assert compiler._cache.num_bytes <= 256 << 10
    assert 0 < len(compiler._cache) < 400
    assert resident() - before < 16 << 20


def schema(i: int) -> str:
    return json.dumps({"type": "object", "properties": {f"key {i}": {"type": "string", "maxLength": i % 100}}})


async def test_a_tenant_with_many_slow_grammars_does_not_starve_another(make_compiler: MakeCompiler) -> None:
    compiler = make_compiler(max_s=0.1)
    slow = [asyncio.create_task(compile_text(compiler, "json_schema", SLOW + " " * i)) for i in range(20)]
    await asyncio.sleep(0)
    assert (await compile_text(compiler, "regex", "a", tenant="b")).text
    assert sum(task.done() for task in slow) < 10
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_waiting_grammars_are_limited_by_tenant(
    make_compiler: MakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "MAX_TENANT_PENDING_CHARACTERS", 3 * 4096)
    compiler = make_compiler()
    tasks = [asyncio.create_task(compile_text(compiler, "regex", f"a{i}")) for i in range(10)]
    other = asyncio.create_task(compile_text(compiler, "regex", "a", tenant="b"))
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(outcome, QueueFull) for outcome in outcomes] == [False] * 3 + [True] * 7
    assert (await other).text


async def test_close_does_not_wait_for_a_slow_grammar(make_compiler: MakeCompiler) -> None:
    compiler = make_compiler(max_s=1000)
    tasks = [asyncio.create_task(compile_text(compiler, "json_schema", SLOW + " " * i)) for i in range(3)]
    await asyncio.sleep(0.5)
    await compiler.close()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, Unavailable)
