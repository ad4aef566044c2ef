"""The process that renders chat templates. `scheduler.text.chat` starts it; from Quire it imports only its neighbours
`client_text` and `worker_pipe`.

A checkpoint's chat template is an untrusted program. Jinja's sandbox keeps it away from Python's objects, but does not
limit time and memory: `{{ 7 ** (9 ** 9) }}` never returns to the interpreter. Templates therefore run in a separate
process, whose resources the kernel limits: SIGPROF ends it after `max_render_s` of processor time, and its address
space is bounded.

The messages, which `worker_pipe` reads and writes:

    in    {"template", "variables", "tokens", "max_text_bytes", "max_render_s", "max_memory_bytes"}   once
    in    {"messages": [{"role", "content", …}, …], "tools", "arguments", "continues_last"}           for each chat
    out   t and the text; f, the path of a field and what is wrong with it; or e and an error         for each chat

A message may have the fields of `scheduler.text.chat_messages.ChatMessage`, with [id, name, arguments] for each tool
call. `tools`, `arguments` and the arguments of tool calls are JSON in JSON, which is parsed here for the same reason.
`tokens` are the control tokens, with the fields of `scheduler.text.control_tokens.ControlToken`; without any, the text
is the template's. `ClientText` explains how clients' text is kept apart from them.
"""

import json
import resource
import signal
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .client_text import ClientText, TemplateInput
from .worker_pipe import read_message, write_answer


class GenerationBlock(Extension):
    """Renders `{% generation %}…{% endgeneration %}`, which marks text for training, as its content.

    As in transformers, a variable that is set in it is gone after it.
    """

    tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


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


class BadField(Exception):
    """A field that is not what it should be. The text is the field's path, a space, and the problem."""


def read_chat(message: dict[str, Any]) -> TemplateInput:
    """Parses the JSON in a message of the parent. Raises BadField."""
    messages = [_read_message(each, f"messages[{i}]") for i, each in enumerate(message["messages"])]
    tools = [_json_object(text, f"tools[{i}]") for i, text in enumerate(message["tools"])]
    arguments = {name: _json_value(text, f"template_arguments[{name}]") for name, text in message["arguments"].items()}
    return TemplateInput(messages, tools, arguments, "" if message["continues_last"] else None)


def _read_message(fields: dict[str, Any], path: str) -> dict[str, Any]:
    message = dict(fields)
    if "tool_calls" in message:
        message["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": _json_object(text or "{}", f"{path}.tool_calls[{i}].arguments"),
                },
            }
            for i, (call_id, name, text) in enumerate(message["tool_calls"])
        ]
    # Templates know it by one of these names. That of gpt-oss reads the second one, and refuses it beside a content and
    # calls: it shows the content as their thought.
    if "reasoning_content" in message and not (message["content"] and "tool_calls" in message):
        message["thinking"] = message["reasoning_content"]
    return message


def _json_object(text: str, path: str) -> dict[str, Any]:
    value = _json_value(text, path)
    if not isinstance(value, dict):
        raise BadField(f"{path} must be a JSON object")
    return value


def _json_value(text: str, path: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadField(f"{path} must be JSON") from None


def compile_template(template: str, variables: dict[str, str]) -> Callable[[TemplateInput, int], str]:
    """Returns a function of (chat, max_text_bytes). Both may raise any exception."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": now}
    compiled = environment.from_string(template)

    def render(chat: TemplateInput, max_text_bytes: int) -> str:
        chunks = []
        num_bytes = 0
        names: dict[str, Any] = {"add_generation_prompt": True, "documents": None, **variables, **chat.arguments}
        if chat.mark is not None:
            names["add_generation_prompt"] = False
        names |= {"messages": chat.messages, "tools": chat.tools or None}
        for chunk in compiled.generate(names):
            num_bytes += len(chunk.encode())
            if num_bytes > max_text_bytes:
                raise TemplateError(f"the rendered chat has more than {max_text_bytes} bytes")
            chunks.append(chunk)
        text = "".join(chunks)
        return text if chat.mark is None else _up_to(chat.mark, text)

    return render


def _up_to(mark: str, text: str) -> str:
    """Returns the text before the mark, as transformers does: without white space if the template cuts that off."""
    before, found, _ = text.rpartition(mark.strip())
    if not found:
        raise TemplateError("it leaves out the end of the last message, which therefore cannot be continued")
    return before if text.startswith(mark, len(before)) else before.rstrip()


def main() -> None:
    settings = read_message()
    if settings is None:
        return
    resource.setrlimit(resource.RLIMIT_AS, (settings["max_memory_bytes"],) * 2)
    render = None
    client_text = ClientText(settings["tokens"], settings["template"])
    while (message := read_message()) is not None:
        signal.setitimer(signal.ITIMER_PROF, settings["max_render_s"])
        try:
            if render is None:
                render = compile_template(settings["template"], settings["variables"])
            chat = read_chat(message)
            hidden, replaced = client_text.hide(chat)
            # The characters that replace others may have more bytes.
            num_added_bytes = _num_bytes(hidden) - _num_bytes(chat) if replaced else 0
            text = render(hidden, settings["max_text_bytes"] + num_added_bytes)
            answer = b"t", client_text.restore(text, replaced)
        except BadField as error:
            answer = b"f", str(error)[:500]
        except Exception as error:  # noqa: BLE001  (a template can raise any exception; the parent reports it)
            answer = b"e", f"{type(error).__name__}: {error}"[:500]
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_answer(*answer)


def _num_bytes(chat: TemplateInput) -> int:
    return sum(len(text.encode()) for text in chat.texts())
