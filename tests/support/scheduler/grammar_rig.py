"""Compilers of grammars for tests, and a schema that is slow to compile."""

import json
from collections.abc import Callable

import psutil

from scheduler.text.grammars import CompiledGrammar, GrammarCompiler, GrammarDefinition

SLOW = json.dumps({"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(1, 80)]})
"""A schema of 3 KB that takes llguidance many seconds."""

MakeCompiler = Callable[..., GrammarCompiler]


async def compile_text(compiler: GrammarCompiler, kind: str, text: str, tenant: str = "a") -> CompiledGrammar:
    return (await compiler.compile(GrammarDefinition(kind, text), 400, tenant)).grammar


def worker_pids() -> list[int]:
    return [child.pid for child in psutil.Process().children() if "grammar_worker" in child.cmdline()]
