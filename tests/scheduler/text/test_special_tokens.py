"""Special tokens have no text, unless a request asks for their names."""

import pytest

from scheduler.requests.completion import Completion
from scheduler.requests.stream_settings import StreamSettings
from scheduler.text.detokenizer import Vocabulary
from tests.support.scheduler import small_tokenizers

ALL = {
    "byte_level": small_tokenizers.byte_level(),
    "sentencepiece": small_tokenizers.sentencepiece(),
    "metaspace": small_tokenizers.metaspace(),
    "wordpiece": small_tokenizers.wordpiece(),
}


def special_of(name: str) -> int:
    added = ALL[name].get_added_tokens_decoder()
    return next(token_id for token_id, token in added.items() if token.special)


@pytest.mark.parametrize("name", ALL)
def test_names_are_shown_if_asked_for(name: str) -> None:
    special = special_of(name)
    ids = [special, *ALL[name].encode("a b", add_special_tokens=False).ids, special]
    shown = Vocabulary(ALL[name], shows_special_tokens=True).detokenizer()
    hidden = Vocabulary(ALL[name]).detokenizer()
    token = ALL[name].id_to_token(special)
    text = "".join(shown.decode([each]) for each in ids) + shown.flush()
    assert text.startswith(token)
    assert text.rstrip().endswith(token)
    assert token not in "".join(hidden.decode([each]) for each in ids) + hidden.flush()


@pytest.mark.parametrize("include_stop", [False, True])
def test_the_token_that_ends_the_text_is_not_shown(include_stop: bool) -> None:
    special = special_of("byte_level")
    settings = StreamSettings(
        "r",
        1,
        ending_token_ids=frozenset({special}),
        include_stop=include_stop,
        nameless_token_ids=frozenset({special}),
    )
    vocabulary = Vocabulary(ALL["byte_level"], shows_special_tokens=True)
    completion = Completion(0, settings, vocabulary.detokenizer())
    completion.add([*ALL["byte_level"].encode("a", add_special_tokens=False).ids, special], None)
    message = completion.take()
    assert message is not None
    assert message.delta.text == "a"


@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_id_that_is_no_special_token_keeps_its_text_beside_names(include_stop: bool) -> None:
    special, (first, last) = special_of("byte_level"), ALL["byte_level"].encode("a!", add_special_tokens=False).ids
    settings = StreamSettings(
        "r", 1, ending_token_ids=frozenset({last}), include_stop=include_stop, nameless_token_ids=frozenset({special})
    )
    vocabulary = Vocabulary(ALL["byte_level"], shows_special_tokens=True)
    completion = Completion(0, settings, vocabulary.detokenizer())
    completion.add([first, special, last], None)
    message = completion.take()
    assert message is not None
    assert message.delta.text == "a" + ALL["byte_level"].id_to_token(special) + ("!" if include_stop else "")
