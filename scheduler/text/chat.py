"""Renders chat messages to one text with the checkpoint's chat template, in a separate process.

`scheduler.text.chat_worker` explains the sandbox, and how clients' text is kept apart from control tokens. There are
two processes (`scheduler.text.workers`), and a tenant has at most one of them: another tenant's chat never waits for
slow renders. The second is started when two tenants' chats are rendered at once.
"""

import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from quire.checksums import TOOL_TEMPLATE
from scheduler.core.errors import InvalidRequest
from scheduler.text.chat_messages import Chat
from scheduler.text.checkpoint import Checkpoint
from scheduler.text.control_tokens import ControlToken
from scheduler.text.workers import NUM_TRIES, WorkerPool

NUM_WORKERS = 2

TEXT, BAD_FIELD = b"t", b"f"
"""Letters of the worker's answers; the third is an error."""


@dataclass(frozen=True, slots=True)
class ChatLimits:
    """Limits of one render.

    max_text_bytes     size of the rendered text, before control tokens are replaced by stand-ins
    max_render_s       processor time, including the compilation of the template
    max_memory_bytes   address space of each process that renders
    """

    max_text_bytes: int = 2 * 2**20
    max_render_s: float = 2.0
    max_memory_bytes: int = 2**30


def load_template(checkpoint: Checkpoint) -> str | None:
    """Returns the checkpoint's chat template, or None if it has none. Raises CheckpointError for unreadable files."""
    template: object = checkpoint.text("chat_template.jinja")
    with_tools: object = None
    if template is not None:
        with_tools = checkpoint.text(TOOL_TEMPLATE)
    else:
        template = checkpoint.json_object("tokenizer_config.json").get("chat_template")
        if isinstance(template, list):  # several templates with names
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template, with_tools = named.get("default"), named.get("tool_use")
    if not isinstance(template, str):
        return None
    return _either(with_tools, template) if isinstance(with_tools, str) else template


def _either(with_tools: str, without: str) -> str:
    """Returns a template that renders as the first one if there are tools, and otherwise as the second.

    Jinja drops the line feed at the end of a template and the one after a tag; the plus sign keeps spaces before a tag.
    """
    first, second = with_tools.removesuffix("\n"), without.removesuffix("\n")
    return f"{{% if tools %}}\n{first}{{%+ else %}}\n{second}{{%+ endif %}}"


class ChatRenderer:
    """Renders the chats of one checkpoint. Used from one event loop; `close` ends its processes.

    `variables` are the special tokens by role, which the template receives with the messages. `tokens` are the control
    tokens, for whose stand-ins `Tokenizer.encode_chat` has the ids.
    """

    def __init__(
        self,
        template: str,
        variables: dict[str, str],
        limits: ChatLimits | None = None,
        tokens: Sequence[ControlToken] = (),
    ) -> None:
        self.template = template
        self._limits = limits or ChatLimits()
        settings = {
            "template": template,
            "variables": variables,
            "tokens": [asdict(token) for token in tokens],
            "max_text_bytes": self._limits.max_text_bytes,
            "max_render_s": self._limits.max_render_s,
            "max_memory_bytes": self._limits.max_memory_bytes,
        }
        self._workers = WorkerPool("chat_worker", settings, NUM_WORKERS)

    async def start(self) -> None:
        """Starts a process, so that the first chat does not wait for it (0.2 s)."""
        await self._workers.start()

    async def render(self, chat: Chat, *, tenant: str = "default") -> str:
        """Returns the text of a chat, with stand-ins for the template's control tokens.

        Raises InvalidRequest if the template refuses the chat or breaks its limits, or if a text that should be JSON is
        not; QueueFull if too many messages wait already, Unavailable after `close`.
        """
        message = {
            "messages": [each.fields() for each in chat.messages],
            "tools": list(chat.tools),
            "arguments": dict(chat.arguments),
            "continues_last": chat.continues_last,
        }
        for _ in range(NUM_TRIES):
            answer = await self._workers.ask(message, tenant, chat.num_characters())
            if not isinstance(answer, int) or answer == -signal.SIGPROF:
                break  # otherwise the process may have ended before the chat came
        if isinstance(answer, int):
            raise InvalidRequest({"chat": f"the chat template refused it: {self._exit_reason(answer)}"})
        if answer.kind == TEXT:
            return answer.text
        if answer.kind == BAD_FIELD:
            path, _, problem = answer.text.partition(" ")
            raise InvalidRequest({f"chat.{path}": problem})
        raise InvalidRequest({"chat": f"the chat template refused it: {answer.text}"})

    async def close(self) -> None:
        """Ends the processes. Chats that wait, or are being rendered, fail with Unavailable."""
        await self._workers.close()

    def _exit_reason(self, status: int) -> str:
        if status == -signal.SIGPROF:
            return f"it ran for more than {self._limits.max_render_s} s"
        return f"the process that ran it ended with status {status}"
