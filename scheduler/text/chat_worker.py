"""The process that renders chat templates. `scheduler.text.chat` runs it as a script; of ours, it imports nothing.

A checkpoint's chat template is a program by a stranger. Jinja's sandbox keeps it from Python's objects, but not from
using time and memory: `{{ 7 ** (9 ** 9) }}` never returns to the interpreter. So it runs in a process of its own, and
the kernel ends that process when it uses too much: SIGPROF after `max_render_s` of processor time, whatever the code
is doing, and a bound on its memory.

Standard input and output carry messages: 4 bytes of length, big-endian, then JSON.

    in    {"template", "variables", "max_text_bytes", "max_render_s", "max_memory_bytes"}    once
    in    {"messages": [{"role", "content"}, …]}                                             then one for each
    out   {"text"} or {"error"}                                                              of these
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
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it is its content."""

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
    """Jinja's own `tojson` escapes for HTML and sorts; templates are written for this one."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def now(time_format: str) -> str:
    return datetime.now().strftime(time_format)


def compile_template(template: str, variables: dict[str, str]) -> Callable[[list[dict[str, str]], int], str]:
    """A function of (messages, max_text_bytes); both may raise anything that jinja2 or the template does.

    Templates are given what transformers' `apply_chat_template` gives them.
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; this process ends with its input
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
        except Exception as error:  # noqa: BLE001  (a template can raise anything; the parent is told)
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_message(answer)


def read_message() -> dict[str, Any] | None:
    """None when the parent is gone."""
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
