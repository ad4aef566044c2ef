"""The process that renders chat templates. `scheduler.text.chat` runs it as a script; it imports nothing from Quire.

A checkpoint's chat template is an untrusted program. Jinja's sandbox keeps it away from Python's objects, but does not
limit time and memory: `{{ 7 ** (9 ** 9) }}` never returns to the interpreter. Templates therefore run in a separate
process, whose resources the kernel limits: SIGPROF ends it after `max_render_s` of processor time, and its address
space is bounded.

Standard input and output carry messages: a length of 4 bytes, big-endian, then JSON.

    in    {"template", "variables", "max_text_bytes", "max_render_s", "max_memory_bytes"}    once
    in    {"messages": [{"role", "content"}, …]}                                             any number of times
    out   {"text"} or {"error"}                                                              one for each chat
"""

import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class GenerationBlock(Extension):
    """Renders `{% generation %}…{% endgeneration %}`, which marks text for training, as its content."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's `tojson`, which escapes for HTML and sorts keys. Templates expect this one."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def now(time_format: str) -> str:
    return datetime.now().strftime(time_format)


def compile_template(template: str, variables: dict[str, str]) -> Callable[[list[dict[str, str]], int], str]:
    """Returns a function of (messages, max_text_bytes). Both may raise any exception.

    Templates receive the same variables as from transformers' `apply_chat_template`.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": now}
    compiled = environment.from_string(template)

    def render(messages: list[dict[str, str]], max_text_bytes: int) -> str:
        chunks = []
        num_bytes = 0
        for chunk in compiled.generate(
            messages=messages, tools=None, documents=None, add_generation_prompt=True, **variables
        ):
            num_bytes += len(chunk.encode())
            if num_bytes > max_text_bytes:
                raise TemplateError(f"the rendered chat has more than {max_text_bytes} bytes")
            chunks.append(chunk)
        return "".join(chunks)

    return render


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent; this process ends when its input is closed
    settings = read_message()
    if settings is None:
        return
    resource.setrlimit(resource.RLIMIT_AS, (settings["max_memory_bytes"],) * 2)
    render = None
    while (message := read_message()) is not None:
        signal.setitimer(signal.ITIMER_PROF, settings["max_render_s"])
        try:
            if render is None:
                render = compile_template(settings["template"], settings["variables"])
            answer = {"text": render(message["messages"], settings["max_text_bytes"])}
        except Exception as error:  # noqa: BLE001  (a template can raise any exception; the parent reports it)
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_message(answer)


def read_message() -> dict[str, Any] | None:
    """Returns the next message, or None if the parent has closed the pipe."""
    header = sys.stdin.buffer.read(4)
    if len(header) < 4:
        return None
    body = sys.stdin.buffer.read(int.from_bytes(header))
    message: dict[str, Any] = json.loads(body)
    return message


def write_message(message: dict[str, str]) -> None:
    body = json.dumps(message).encode()
    sys.stdout.buffer.write(len(body).to_bytes(4) + body)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
