"""`quire serve` with its gateway on the embedded model, for tests with the libraries that users have."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.e2e.stack import TINY, Stack

MODEL = "tiny"
KEY = "no key is needed"
CHAT: list[dict[str, Any]] = [{"role": "user", "content": "Tell a story about a fox."}]
PROMPT = "Once upon a time"
_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{{ '<|assistant|>' if message.role == 'assistant' else '<|user|>' }}{{ (message.content or '') | trim }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The template of the embedded model knows no system messages and no tools; this one writes all of them."""


def model_with_tools(directory: Path, **defaults: Any) -> str:
    """Makes the embedded model with the template above in `directory`; returns its path.

    defaults  sampling parameters of requests that do not give them
    """
    for file in Path(TINY).iterdir():
        if file.suffix in (".json", ".safetensors"):
            (directory / file.name).symlink_to(file)
    settings = json.loads((Path(TINY) / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").unlink()
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": _TEMPLATE}))
    if defaults:
        settings = json.loads((Path(TINY) / "generation_config.json").read_text())
        (directory / "generation_config.json").unlink()
        (directory / "generation_config.json").write_text(json.dumps(settings | defaults))
    return str(directory)


@contextmanager
def served(directory: Path, *, defaults: dict[str, Any] | None = None, **flags: Any) -> Iterator[Stack]:
    """Serves the model with its gateway on free ports; the gateway's address is `stack.openai`.

    defaults  sampling parameters of requests that do not give them, as of a checkpoint
    """
    model = model_with_tools(directory, **(defaults or {}))
    with Stack(gateway=True, gateway_listen="127.0.0.1:0", model=model, model_name=MODEL, **flags) as stack:
        yield stack
