"""A vocabulary of a few letters and pairs of letters, for grammars whose masks are computed by hand."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.support.executor.checkpoints import RandomCheckpoint, make_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

EOS, OTHER_EOS = 0, 1
TEXTS = ["", "", "a", "b", "c", "ab", "ba", "bc", "aa", "abc", "cab", "bb"]
"""The text of each token. The first two have none: they are special."""

VOCAB_SIZE = 37
"""The width of the logits. The ids from len(TEXTS) on are padding, as in many checkpoints."""

_MERGES = [("a", "b"), ("b", "a"), ("b", "c"), ("a", "a"), ("ab", "c"), ("c", "ab"), ("b", "b")]


def tokenizer_json() -> str:
    """Returns a tokenizer.json with byte-level BPE and two special tokens."""
    names = ["<eos>", "<other>", *TEXTS[2:]]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [{"id": index, "content": names[index], **special} for index in (EOS, OTHER_EOS)],
            "pre_tokenizer": level,
            "decoder": level,
            "model": {
                "type": "BPE",
                "vocab": {name: index for index, name in enumerate(names)},
                "merges": [list(pair) for pair in _MERGES],
            },
        }
    )


def make_lettered(directory: Path) -> RandomCheckpoint:
    """Makes a small random checkpoint whose tokenizer has these letters. Most ids of its model are padding."""
    made = make_checkpoint("llama", directory)
    (directory / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    return made


def text_of(token_ids: list[int]) -> str:
    """Returns the text of an output. EOS has none."""
    return "".join(TEXTS[token_id] for token_id in token_ids)
