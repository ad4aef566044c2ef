"""The bound on a text's tokens is never above their number."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from scheduler.text.text_bound import TextBound
from tests.support.scheduler import small_tokenizers


def _nfc() -> FastTokenizer:
    tokenizer = small_tokenizers.byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _stripping() -> FastTokenizer:
    tokenizer = small_tokenizers.byte_level()
    tokenizer.add_tokens([AddedToken("<|end|>", rstrip=True, lstrip=True)])
    return tokenizer


BOUNDED = {
    "byte_level": small_tokenizers.byte_level(),
    "sentencepiece": small_tokenizers.sentencepiece(),
    "nfc": _nfc(),
    "stripping": _stripping(),
}
BOUNDS = {name: TextBound(tokenizer) for name, tokenizer in BOUNDED.items()}
PIECES = [
    "the fox",
    " ",
    "\n\n",
    "<|end|>",
    "\u03b1\u0313\u0300\u0345",
    "e\u0301",
    "你好",
    "😀",
    "nothing",
    "<s>",
    "日本",
    "xq",
]
texts = st.lists(st.tuples(st.sampled_from(PIECES), st.integers(1, 60)), max_size=6)


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=150)
@given(texts=texts)
def test_texts_have_at_least_as_many_tokens(name: str, texts: list[tuple[str, int]]) -> None:
    text = "".join(piece * times for piece, times in texts)
    assert BOUNDS[name].fewest_tokens(text) <= len(BOUNDED[name].encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", BOUNDED)
def test_long_texts_have_many_tokens(name: str) -> None:
    assert BOUNDS[name].fewest_tokens("fox" * 100_000) > 1000


def test_tokenizers_that_drop_text_have_no_bound() -> None:
    stripping = small_tokenizers.byte_level()
    stripping.normalizer = normalizers.Strip()
    removing = small_tokenizers.byte_level()
    removing.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    fusing = FastTokenizer(models.BPE({"a": 0, "?": 1}, [], unk_token="?", fuse_unk=True))
    for tokenizer in (stripping, removing, fusing, small_tokenizers.wordpiece(), small_tokenizers.metaspace()):
        assert TextBound(tokenizer).fewest_tokens(" x" * 10**6) == 0
