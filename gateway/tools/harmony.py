"""The format of gpt-oss, harmony: messages in channels, of which those to `functions.NAME` are calls.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>

The channel `analysis` and messages to other recipients are reasoning, everything else is content. The recipient decides
about a call, whatever the channel: the models write calls to the channel `analysis`, too. The format is described at
https://github.com/openai/harmony.
"""

import re
from collections.abc import Callable, Mapping

from gateway.tools.events import Arguments, Content, Event, Markup, Reasoning
from gateway.tools.lark import Lark, literal, regex
from gateway.tools.reader import END, MAX_HELD, Reader, Steps
from gateway.tools.tool_use import ToolUse

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END_OF_MESSAGE, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_BEGINS = (START, CHANNEL)
_ENDS = (END_OF_MESSAGE, CALL, RETURN)
_PLAIN = re.compile(r"[^< \t\n\r]+")
_IN_MESSAGES = re.compile(r"[^<]+")
_FUNCTION = "functions."
_RECIPIENT = re.compile(r"\bto=((?:functions\.)?[^\s<]+)")


class HarmonyReader(Reader):
    """Reads channels. `reads_calls` is False if messages to functions are content.

    Text outside messages is content; the header of a message that breaks off is markup.
    """

    def __init__(self, *, reads_calls: bool) -> None:
        self._reads_calls = reads_calls
        super().__init__()

    def _read(self) -> Steps[None]:
        # The prompt ends with the role of the first message, which can be followed by its recipient.
        is_header = (yield from self._skip_white()) == "t" and (yield from self._rest_of(("to=",), "t"))
        if not is_header:
            self._rewind(0)
        while is_header or (yield from self._find(_BEGINS, _PLAIN)):
            header = yield from self._read_header()
            if header is not None:
                yield from self._read_message(header)
            is_header = None

    def _read_header(self) -> Steps[str | None]:
        """Receives a header to its end. Returns None if no message follows."""
        while self._num_held <= MAX_HELD:
            piece = yield None
            if piece == END:
                self._send(Markup)
                return None
            if piece == ">" and self._held().endswith(MESSAGE):
                return self._held()
            if piece == ">" and self._held().endswith(_ENDS):
                self._send(Markup)
                return None
        self._send(Content)
        return None

    def _read_message(self, header: str) -> Steps[None]:
        self._send(Markup)
        recipient = _RECIPIENT.search(header)
        is_function = recipient is not None and recipient[1].startswith(_FUNCTION)
        if recipient is not None and is_function and self._reads_calls:
            yield from self._read_call(recipient[1].removeprefix(_FUNCTION))
            return
        is_thought = header.rpartition(CHANNEL)[2].lstrip().startswith("analysis") or (recipient and not is_function)
        yield from self._read_body(Reasoning if is_thought else Content)
        yield from self._read_end()

    def _read_call(self, name: str) -> Steps[None]:
        index = self._start_call(name)
        if not (yield from self._read_body(lambda text: Arguments(index, text))):
            self._events.append(Arguments(index, "{}", is_written=False))
        yield from self._read_end()

    def _read_body(self, new: Callable[[str], Event]) -> Steps[bool]:
        """Sends the text of a message up to the next marker. Returns whether it has any."""
        has_text = False
        while (piece := (yield _IN_MESSAGES)) != END:
            if piece == "<":
                if (yield from self._rest_of((*_ENDS, *_BEGINS), piece)):
                    self._rewind(0)
                    break
                self._rewind(1)
            self._send(new)
            has_text = True
        return has_text

    def _read_end(self) -> Steps[None]:
        """Receives the marker of a message's end. The next message can begin without it."""
        if (yield None) == "<" and (yield from self._rest_of(_ENDS, "<")):
            self._send(Markup)
        self._rewind(0)


class Harmony:
    """The format of gpt-oss, whose texts have channels also if a request has no tools."""

    name = "harmony"
    markers = (START, CHANNEL, CONSTRAIN, MESSAGE, END_OF_MESSAGE)
    passed = ()

    def reader(self, use: ToolUse | None) -> HarmonyReader:
        return HarmonyReader(reads_calls=use is not None and use.is_read)

    def grammar(self, use: ToolUse, tokens: Mapping[str, int]) -> str:
        """The end of the last message is EOS, so it is not a part of the grammar."""
        lark = Lark(tokens)
        channel, message = lark.marker(CHANNEL), lark.marker(MESSAGE)
        text = "TEXT" if END_OF_MESSAGE in tokens else regex("[^<]*")
        next_message = lark.add("next", f'{lark.marker(END_OF_MESSAGE)} {lark.marker(START)} "assistant"')
        thought = lark.add("thought", f'{channel} "analysis" {message} {text} {next_message}')
        type_ = lark.add("type", f'" "? {lark.marker(CONSTRAIN)} "json" | " json"')
        calls = [
            lark.add(
                f"call_{i}",
                f"{channel} {regex(literal(f'commentary to={_FUNCTION}{tool.name}'))} {type_}? {message} "
                f"{lark.arguments(tool)}",
            )
            for i, tool in enumerate(use.callable_tools)
        ]
        call = lark.add("call", " | ".join(calls))
        if use.has_no_text:
            several = f" ({next_message} {call})*" if use.allows_several else ""
            answer = lark.answer(use, f'{channel} "final" {message}')
            return lark.grammar(f"{thought}? ({call}{several}{answer})")
        passage = lark.add("passage", f'{channel} ("analysis" | "commentary" | "final") {message} {text}')
        part = lark.add("part", f"{passage} | {call}")
        return lark.grammar(f"({part if use.allows_several else passage} {next_message})* {part}")
