"""Detokenizers return whole characters, which together equal the tokenizer's own decode."""

from collections.abc import Iterator
from itertools import groupby

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from scheduler.text.detokenizer import Detokenizer, Vocabulary
from tests.support.scheduler import small_tokenizers
from tests.support.scheduler.small_tokenizers import id_of

BYTE_LEVEL = small_tokenizers.byte_level()
SENTENCEPIECE = small_tokenizers.sentencepiece()
GEMMA = small_tokenizers.sentencepiece(strip=False)
METASPACE = small_tokenizers.metaspace()
METASPACE_NEVER = small_tokenizers.metaspace("never")
WORDPIECE = small_tokenizers.wordpiece()
ALL = {
    "byte_level": BYTE_LEVEL,
    "sentencepiece": SENTENCEPIECE,
    "gemma": GEMMA,
    "metaspace": METASPACE,
    "metaspace_never": METASPACE_NEVER,
    "wordpiece": WORDPIECE,
}
VOCABULARIES = {name: Vocabulary(tokenizer) for name, tokenizer in ALL.items()}

texts = st.text(st.sampled_from("abcefhlo rtuxé你好世界狐😀👩‍🎉\n\t▁<0x"), max_size=30)
cuts = st.lists(st.integers(1, 5), min_size=1, max_size=5)


def token_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Draws token ids, also beyond the vocabulary, because logits can be wider than the tokenizer."""
    return st.lists(st.integers(0, tokenizer.get_vocab_size() + 2), max_size=24)


def pieces_of(ids: list[int], sizes: list[int]) -> Iterator[list[int]]:
    position, i = 0, 0
    while position < len(ids):
        yield ids[position : position + sizes[i % len(sizes)]]
        position += sizes[i % len(sizes)]
        i += 1


def all_text(detokenizer: Detokenizer, ids: list[int], sizes: list[int]) -> str:
    return "".join([detokenizer.decode(piece) for piece in pieces_of(ids, sizes)]) + detokenizer.flush()


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=150)
@given(data=st.data())
def test_text_equals_decode(name: str, data: st.DataObject) -> None:
    ids = ALL[name].encode(data.draw(texts), add_special_tokens=False).ids
    assert all_text(VOCABULARIES[name].detokenizer(), ids, data.draw(cuts)) == ALL[name].decode(ids)


@pytest.mark.parametrize("name", ["byte_level", "metaspace", "metaspace_never"])
@settings(max_examples=300)
@given(data=st.data())
def test_text_of_random_ids_equals_decode(name: str, data: st.DataObject) -> None:
    ids = data.draw(token_ids(ALL[name]))
    assert all_text(VOCABULARIES[name].detokenizer(), ids, data.draw(cuts)) == ALL[name].decode(ids)


@settings(max_examples=300)
@given(ids=st.lists(st.sampled_from(range(WORDPIECE.get_vocab_size())), max_size=24), sizes=cuts)
def test_text_over_a_window_equals_decode(ids: list[int], sizes: list[int]) -> None:
    assert all_text(VOCABULARIES["wordpiece"].detokenizer(), ids, sizes) == WORDPIECE.decode(ids)


def is_well_defined(tokenizer: Tokenizer, ids: list[int]) -> bool:
    """Returns False if a run of byte tokens has whole characters and is broken elsewhere."""
    tokens = [tokenizer.id_to_token(i) or "<unk>" for i in ids]
    tokens = [token for token in tokens if token not in ("<unk>", "<s>", "</s>")]
    for is_byte, run in groupby(tokens, key=lambda token: token.startswith("<0x") and len(token) == 6):
        data = bytes(int(token[3:5], 16) for token in run) if is_byte else b""
        try:
            data.decode()
        except UnicodeDecodeError:
            if set(data.decode(errors="replace")) != {"\ufffd"}:
                return False
    return True


@pytest.mark.parametrize("name", ["sentencepiece", "gemma"])
@settings(max_examples=400)
@given(data=st.data())
def test_byte_fallback_of_random_ids_equals_decode(name: str, data: st.DataObject) -> None:
    tokenizer = ALL[name]
    some_bytes = [id_of(tokenizer, f"<0x{byte:02X}>") for byte in (0x0A, 0x41, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0xFF)]
    ids = data.draw(st.lists(st.sampled_from(some_bytes) | st.integers(0, 302), max_size=16))
    text = all_text(VOCABULARIES[name].detokenizer(), ids, data.draw(cuts))
    if is_well_defined(tokenizer, ids):
        assert text == tokenizer.decode(ids)
    else:  # whole characters stay, broken ones are replaced byte by byte
        assert text.count("\ufffd") <= tokenizer.decode(ids).count("\ufffd")


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "gemma", "metaspace", "metaspace_never"])
@settings(max_examples=150)
@given(prompt=texts, output=texts, data=st.data())
def test_output_that_continues_a_text_joins_it(name: str, prompt: str, output: str, data: st.DataObject) -> None:
    tokenizer = ALL[name]
    prompt_ids = tokenizer.encode("a" + prompt, add_special_tokens=False).ids
    output_ids = tokenizer.encode(output, add_special_tokens=False).ids
    text = all_text(VOCABULARIES[name].detokenizer(continues_text=True), output_ids, data.draw(cuts))
    assert tokenizer.decode(prompt_ids) + text == tokenizer.decode(prompt_ids + output_ids)


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
@settings(max_examples=100)
@given(text=texts)
@example(text="😀你👩‍")
def test_characters_are_never_cut(name: str, text: str) -> None:
    ids = ALL[name].encode(text, add_special_tokens=False).ids
    detokenizer = VOCABULARIES[name].detokenizer()
    sent = ""
    for token_id in ids:
        sent += detokenizer.decode([token_id])
        assert "\ufffd" not in sent
        assert ALL[name].decode(ids).startswith(sent)
    assert detokenizer.flush() == ""


def test_emoji_waits_for_its_last_byte() -> None:
    ids = BYTE_LEVEL.encode("🦊", add_special_tokens=False).ids
    assert len(ids) > 1
    detokenizer = VOCABULARIES["byte_level"].detokenizer()
    assert [detokenizer.decode([token_id]) for token_id in ids] == [""] * (len(ids) - 1) + ["🦊"]


def test_incomplete_character_becomes_a_replacement_character() -> None:
    ids = BYTE_LEVEL.encode("🦊", add_special_tokens=False).ids[:-1]
    detokenizer = VOCABULARIES["byte_level"].detokenizer()
    assert detokenizer.decode(ids) == ""
    assert detokenizer.flush() == BYTE_LEVEL.decode(ids) == "\ufffd"


def test_broken_byte_tokens_are_replaced_one_by_one() -> None:
    ids = [id_of(SENTENCEPIECE, token) for token in ("<0xE4>", "<0xBD>")]
    assert SENTENCEPIECE.decode(ids) == "\ufffd\ufffd"
    assert all_text(VOCABULARIES["sentencepiece"].detokenizer(), ids, [1]) == "\ufffd\ufffd"


def test_whole_characters_of_a_broken_run_stay() -> None:
    tokens = [f"<0x{byte:02X}>" for byte in "你".encode() + b"\xe4"]
    ids = [id_of(SENTENCEPIECE, token) for token in tokens]
    assert all_text(VOCABULARIES["sentencepiece"].detokenizer(), ids, [1]) == "你\ufffd"


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "wordpiece"])
def test_special_tokens_have_no_text(name: str) -> None:
    tokenizer = ALL[name]
    special = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    assert special
    assert all_text(VOCABULARIES[name].detokenizer(), special * 40, [3]) == ""


def test_window_does_not_grow() -> None:
    detokenizer = VOCABULARIES["wordpiece"].detokenizer()
    ids = WORDPIECE.encode("the fox said hello", add_special_tokens=False).ids * 50
    detokenizer.decode(ids)
    assert len(detokenizer._anchor) + len(detokenizer._unsent) <= 2  # type: ignore[attr-defined]
    special = [id_of(WORDPIECE, "[CLS]")] * 100
    detokenizer.decode(special)
    assert len(detokenizer._anchor) + len(detokenizer._unsent) <= 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "wordpiece"])
def test_tokens_have_bytes(name: str) -> None:
    tokenizer = getattr(small_tokenizers, name)()
    vocabulary = Vocabulary(tokenizer)
    ids = tokenizer.encode("the fox é", add_special_tokens=False).ids
    if name != "wordpiece":  # which has no bytes of its own, and drops accents
        assert b"".join(map(vocabulary.token_bytes, ids)).decode().strip() == "the fox é"
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        if token.special:
            assert vocabulary.token_bytes(token_id) == token.content.encode()
    assert vocabulary.token_bytes(tokenizer.get_vocab_size() + 7) == b""
