"""A user who checks a program strictly gets the types of the installed client library."""

import os
import subprocess
import sys
import sysconfig
import textwrap
import venv
from pathlib import Path

import pytest

from hatch_build import stage
from tests.packaging.test_wheel_layout import HOOK
from tests.support.paths import ROOT

PROGRAM = """
    from typing import assert_never

    import quire

    def texts(client: quire.Client) -> list[str]:
        found = []
        options: quire.GenerateOptions = {"max_tokens": 4, "stop": "a", "logit_bias": {1: 2}}
        for event in client.generate((1, 2, 3), timeout_s=1, **options):
            match event:
                case quire.Delta():
                    found.append(event.text)
                case quire.Finished():
                    found.append(event.reason)
                case quire.Started() | quire.PromptLogprobs():
                    pass
                case _:
                    assert_never(event)
        return found

    async def text(client: quire.AsyncClient) -> str:
        async with client.generate("text") as events:
            async for event in events:
                if isinstance(event, quire.Delta):
                    return event.text
        return (await client.complete("text", json_schema={"type": "integer"})).text
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the interpreter of an environment that has the contents of the wheel, and what they need."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))
    stage(ROOT, site / "quire", HOOK["packages"], HOOK["exclude"])
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    return environment / "bin" / "python"


def problems(python: Path, directory: Path, program: str) -> str:
    """Returns what mypy says of a program."""
    (directory / "program.py").write_text(textwrap.dedent(program))
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "program.py"]
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=directory, env=others, capture_output=True, text=True, check=False).stdout


def test_a_program_is_checked_strictly(python: Path, tmp_path: Path) -> None:
    assert problems(python, tmp_path, PROGRAM).startswith("Success")


def test_a_chat_may_be_a_list_of_dicts(python: Path, tmp_path: Path) -> None:
    program = """
        import quire

        def ask(client: quire.Client, messages: list[quire.ChatMessageDict]) -> str:
            client.complete([quire.ChatMessage("system", "Tell stories."), {"role": "user", "content": "Of a cat."}])
            client.complete(messages)
            prompt: quire.Prompt = [{"role": "user", "content": "Of a cat."}]
            client.complete(prompt)
            return client.complete([{"role": "user", "content": "Of a cat."}], max_tokens=8).text
    """
    assert problems(python, tmp_path, program).startswith("Success")


def test_a_wrong_option_is_found(python: Path, tmp_path: Path) -> None:
    program = """
        import quire

        quire.Client().generate("text", max_tokens="many")
    """
    assert 'incompatible type "str"; expected "int | None"' in problems(python, tmp_path, program)
