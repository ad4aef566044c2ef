"""Keeps what clients write in chats apart from the control tokens that the chat template writes.

A control token structures the prompt: `<|im_end|>` ends a turn. The tokenizers library finds such tokens in any text:
`<|im_end|><|im_start|>system` within a user's message would end that message and begin another. Here the text of a
control token becomes its id only if the template wrote it, in three steps:

1. `scheduler.text.chat_worker` renders with contents and roles in which no control token can be recognised.
2. It replaces each control token of the rendered text with its *stand-in*, a text that no client can guess.
3. `ChatEncoder` encodes the result with a tokenizer in which the stand-ins are the control tokens. Everything else is
   the checkpoint's, so a chat without the text of a control token has the ids of transformers' `apply_chat_template`.

Added tokens are of three classes:

    structure   every special token, and others in brackets (`<|user|>`, `[INST]`): text in every message
    markup      in the form of a tag, and not special (`<think>`, `</tool_call>`): text in every message except those of
                the assistant, because models write them, and templates look for them there
    vocabulary  white space, words and the tags of HTML that are not special: tokens in every message, as without Quire

A special token that is only white space counts as vocabulary: templates trim white space.

A prompt that is plain text (`GenerateRequest.text`) is not a chat: control tokens in it are recognised, because callers
that render their own chats need this.
"""

import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

TAG = re.compile(r"</?\w+/?>")
HTML_TAG = re.compile(
    "</?(a|b|blockquote|br|caption|code|div|em|h[1-6]|hr|i|img|li|ol|p|pre|s|span|strong|sub|sup|table|tbody|td|tfoot|th"
    "|thead|tr|u|ul)/?>"
)
BRACKETS = ("<>", "[]", "{}", "【】")


@dataclass(frozen=True, slots=True)
class ControlToken:
    """An added token that the content of a chat must not contain as a token.

    stand_in      the text that denotes the token in a rendered chat
    is_markup     see the module's three classes
    single_word   it is recognised between characters that are not of words only
    """

    text: str
    stand_in: str
    is_markup: bool
    single_word: bool


class ChatEncoder:
    """Encodes rendered chats, in which stand-ins denote the control tokens.

    tokens      the control tokens
    tokenizer   encodes to ids of its own, which `checkpoint_ids` translates
    """

    def __init__(self, tokenizer: FastTokenizer) -> None:
        added: dict[int, AddedToken] = dict(sorted(tokenizer.get_added_tokens_decoder().items()))
        nonce = secrets.token_hex(8)
        controls = {
            # The stand-in ends with a digit: a combining character would change a letter.
            token_id: ControlToken(token.content, f"{nonce}{token_id:08}", _is_markup(token), token.single_word)
            for token_id, token in added.items()
            if _is_control(token)
        }
        self.tokens = tuple(controls.values())
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        model, unknown_id = _model_without({token.text for token in self.tokens} & vocabulary.keys(), tokenizer)
        self.tokenizer = FastTokenizer(model)
        self.tokenizer.normalizer = tokenizer.normalizer
        self.tokenizer.pre_tokenizer = tokenizer.pre_tokenizer
        # The library counts up from the number of entries, which ids with gaps exceed.
        num_gaps = max(vocabulary.values(), default=-1) + 1 - len(vocabulary)
        self.tokenizer.add_tokens([f"{nonce}-{i}" for i in range(num_gaps)])
        texts = {token_id: token.content for token_id, token in added.items()}
        texts |= {token_id: control.stand_in for token_id, control in controls.items()}
        self.tokenizer.add_tokens([_renamed(token, texts[token_id]) for token_id, token in added.items()])
        self._checkpoint_ids: dict[int, int] = {}
        for token_id, text in texts.items():
            chat_id = self.tokenizer.token_to_id(text)
            if chat_id is not None and chat_id != token_id:
                self._checkpoint_ids[chat_id] = token_id
        # Any text that the vocabulary cannot express becomes the unknown token, so content may have it.
        self._unwanted_ids = frozenset(controls).intersection(vocabulary.values()) - {unknown_id}

    def checkpoint_ids(self, chat_ids: list[int]) -> list[int]:
        """Returns the checkpoint's ids. Raises ValueError if a control token came from text instead of a stand-in."""
        if self._unwanted_ids and not self._unwanted_ids.isdisjoint(chat_ids):
            raise ValueError("the model of the tokenizer made a control token from text")
        checkpoint_ids = self._checkpoint_ids
        return [checkpoint_ids.get(chat_id, chat_id) for chat_id in chat_ids]


def _renamed(token: AddedToken, text: str) -> AddedToken:
    return AddedToken(
        text,
        # The worker has checked the neighbours of control tokens.
        single_word=token.single_word and text == token.content,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=False,
    )


def _is_control(token: AddedToken) -> bool:
    text = token.content
    if not text.strip():
        return False
    return token.special or (text[0] + text[-1] in BRACKETS and HTML_TAG.fullmatch(text) is None)


def _is_markup(token: AddedToken) -> bool:
    return not token.special and TAG.fullmatch(token.content) is not None


def _model_without(texts: set[str], tokenizer: FastTokenizer) -> tuple[Any, int | None]:
    """Returns a model that has the same ids and makes none of these entries from text, and the unknown token's id.

    The model is the tokenizer's own, which shares its memory, unless it could make such a token: the entries are then
    renamed in a copy. BPE makes a token within a text only if it makes it from the token's own text alone, since the
    merges within a token do not depend on what surrounds it.
    """
    model = tokenizer.model
    reachable = {text for text in texts if _makes(model, text)}
    if not reachable and hasattr(model, "unk_token"):
        return model, None if model.unk_token is None else model.token_to_id(model.unk_token)
    state = json.loads(tokenizer.to_str())
    parts = state["model"]
    pieces = parts["vocab"]
    unknown = parts.get("unk_token")
    if isinstance(pieces, list) and parts.get("unk_id") is not None:  # Unigram
        unknown = pieces[parts["unk_id"]][0]
    unknown_id = None if unknown is None else model.token_to_id(unknown)
    names = {text: secrets.token_hex(16) for text in reachable - {unknown}}
    if not names:
        return model, unknown_id
    if isinstance(pieces, list):
        parts["vocab"] = [[names.get(piece, piece), score] for piece, score in pieces]
    else:
        parts["vocab"] = {names.get(piece, piece): number for piece, number in pieces.items()}
    if "merges" in parts:
        parts["merges"] = [merge for merge in parts["merges"] if names.keys().isdisjoint(_made_by(merge))]
    state |= {"added_tokens": [], "post_processor": None, "decoder": None}
    return FastTokenizer.from_str(json.dumps(state)).model, unknown_id


def _makes(model: Any, text: str) -> bool:
    if not hasattr(model, "ignore_merges"):  # Unigram, WordPiece and WordLevel take any entry of their vocabulary
        return True
    return [token.value for token in model.tokenize(text)] == [text]


def _made_by(merge: list[str] | str) -> set[str]:
    """Returns the two parts and the product of a merge of BPE."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    return {*parts, "".join(parts)}
