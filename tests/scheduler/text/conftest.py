"""Fixtures of the tests of texts."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer

from scheduler.text.grammars import GrammarCompiler, GrammarLimits
from tests.support.scheduler.grammar_rig import MakeCompiler


@pytest.fixture(scope="module")
def tokenizer_json(byte_level: FastTokenizer) -> str:
    return str(byte_level.to_str())


@pytest.fixture
async def make_compiler(tmp_path: Path, byte_level: FastTokenizer, tokenizer_json: str) -> AsyncIterator[MakeCompiler]:
    """Makes compilers, and closes them after the test."""
    file = tmp_path / "tokenizer.json"
    file.write_text(tokenizer_json)
    made = []

    def make(**limits: Any) -> GrammarCompiler:
        made.append(GrammarCompiler(file, [byte_level.token_to_id("</s>")], GrammarLimits(**limits)))
        return made[-1]

    yield make
    for compiler in made:
        await compiler.close()
