"""Which tokens the messages of an answer get, for all that tokens and events can look like."""

from typing import Any

import pytest

from gateway.api.message_logprobs import MessageLogprobs


def entry(data: bytes) -> dict[str, Any]:
    return {"bytes": list(data)}


def taken(*deltas: tuple[str, list[bytes], list[tuple[str, bool]]]) -> list[bytes]:
    """Returns the tokens of all messages.

    deltas  texts, tokens, and the events that follow: their texts, and whether they are those of a message
    """
    logprobs = MessageLogprobs()
    found = []
    was_message = None  # nothing has begun
    for text, tokens, events in deltas:
        logprobs.add(text, map(entry, tokens))
        for covered, is_message in events:
            found += logprobs.cover(covered, is_message=is_message)
            was_message = is_message
        if was_message is not None:
            rest = logprobs.rest()
            found += rest if was_message else []
    found += logprobs.rest(is_end=True)
    return [bytes(each["bytes"]) for each in found]


@pytest.mark.parametrize(
    ("deltas", "tokens"),
    [
        ([("ab", [b"a", b"b"], [("ab", True)])], [b"a", b"b"]),
        # Text is held back, and arrives with other text.
        ([("a <", [b"a", b" <"], [("a", True)]), ("b", [b"b"], [(" <b", True)])], [b"a", b" <", b"b"]),
        # One delta ends a thought and begins the message; a token is a part of both.
        (
            [("no</t>yes", [b"no", b"</", b"t>y", b"es"], [("no", False), ("</t>", False), ("yes", True)])],
            [b"t>y", b"es"],
        ),
        # One token begins before markup within the message, and ends after it.
        ([("a|b", [b"a|b", b""], [("a", True), ("|", False), ("b", True)])], [b"a|b", b""]),
        # The parts of a character arrive before its text.
        ([("", [b"\xf0\x9f"], []), ("😀", [b"\x98\x80"], [("😀", True)])], [b"\xf0\x9f", b"\x98\x80"]),
        (
            [("no|", [b"no", b"|", b"\xc3"], [("no", False), ("|", False)]), ("éa", [b"\xa9", b"a"], [("éa", True)])],
            [b"\xc3", b"\xa9", b"a"],
        ),
        ([("a", [b"a", b"\xf0"], [("a", True)])], [b"a", b"\xf0"]),
        # Tokens have names that the text lacks, and spaces that a first word loses. Later tokens keep their places.
        ([("", [b"<s>"], []), ("a", [b" a"], [("a", True)]), ("b", [b"b"], [("b", True)])], [b"<s>", b" a", b"b"]),
        ([("a", [b"a"], [("a", True)]), ("", [b"</s>"], [])], [b"a", b"</s>"]),
        # The space that the first word loses moves no later border.
        ([("no|yes", [b" no", b"|", b"yes"], [("no", False), ("|", False), ("yes", True)])], [b"yes"]),
        (
            [("", [b" "], []), ("no|a", [b"no", b"|", b"a"], [("no", True), ("|", False), ("a", True)])],
            [b" ", b"no", b"a"],
        ),
        ([(" no|a", [b" no", b"|", b"a"], [(" no", False), ("|", False), ("a", True)])], [b"a"]),
    ],
)
def test_messages_get_every_token_with_a_part_of_their_text(deltas: Any, tokens: list[bytes]) -> None:
    assert taken(*deltas) == tokens
