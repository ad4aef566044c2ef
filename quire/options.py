"""The options of a request, declared once: for both clients, for the message that is sent, and for the flags."""

import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

_DOCUMENTED = re.compile(r"\s*(?P<name>\w+) {2,}(?P<text>\S.*)")
_QUOTED = re.compile(r"`(?P<name>\w+)`")


class GenerateOptions(TypedDict, total=False):
    """All options of `generate` and `complete`, by the names of their fields in generation.proto.

    An option that is absent or None takes the checkpoint's default, or else the one in generation.proto. `stop` may be
    one string or several. At most one of json_schema, json_object, regex, choice and lark may be given.

    max_tokens          most tokens to generate
    min_tokens          fewest tokens to generate
    temperature         divides the logits before a token is drawn; 0: greedy
    top_p               draw from the most probable tokens that have this probability together, in (0, 1]
    top_k               draw from this many most probable tokens; 0: all
    min_p               drop tokens less probable than this fraction of the most probable one, in [0, 1]
    seed                same seed, same tokens
    n                   sequences sampled from the prompt, or beams shown
    beam_width          search for the most probable text with this many beams
    length_penalty      above 0 favours long beams
    early_stopping      end the search when enough beams are complete
    repetition_penalty  divides the logits of tokens that occurred; 1: none
    frequency_penalty   subtracted from a token's logit for each time it was generated
    presence_penalty    subtracted once from the logit of each token that was generated
    logit_bias          added to a token's logit
    allowed_token_ids   generate no other tokens
    logprobs            show the log-probability of each token and of this many most probable ones
    prompt_logprobs     the same for the prompt's tokens
    token_bytes         name the bytes of the tokens with log-probabilities
    special_tokens      write the names of special tokens into the text
    stop                end the text at this string
    stop_token_ids      end the sequence at this token
    include_stop        keep what ended the text
    ignore_eos          continue after the end-of-sequence token
    priority            lower runs earlier, if the server's policy is priority
    cache_salt          share prefixes only with requests of this salt
    json_schema         write JSON of this schema, a dict or its text
    json_object         write a JSON object
    regex               write a text that this regular expression matches as a whole
    choice              write one of these texts
    lark                write a text of this grammar, in the dialect of Lark that llguidance reads
    request_id          for logs; the server makes one if it is absent
    """

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    n: int | None
    beam_width: int | None
    length_penalty: float | None
    early_stopping: bool | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    logprobs: int | None
    prompt_logprobs: int | None
    token_bytes: bool | None
    special_tokens: bool | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop: bool | None
    ignore_eos: bool | None
    priority: int | None
    cache_salt: str | None
    json_schema: Mapping[str, Any] | str | None
    json_object: bool | None
    regex: str | None
    choice: Sequence[str] | None
    lark: str | None
    request_id: str | None


def field_texts(declaration: type[Any]) -> dict[str, str]:
    """Returns the text of each field in the docstring of a dataclass or TypedDict, continuation lines joined."""
    names = set(typing.get_type_hints(declaration))
    texts: dict[str, str] = {}
    current = ""
    for line in (declaration.__doc__ or "").splitlines():
        match = _DOCUMENTED.fullmatch(line)
        if match and match["name"] in names:
            current = match["name"]
            texts[current] = match["text"].strip()
        elif current and line.strip():
            texts[current] += " " + line.strip()
        else:
            current = ""
    return texts


def flag_texts(declaration: type[Any]) -> dict[str, str]:
    """Returns `field_texts` for a command: `other_field` becomes its flag, and None an absent one."""
    texts = field_texts(declaration)

    def name_of_flag(match: re.Match[str]) -> str:
        name = match["name"]
        return f"--{name.replace('_', '-')}" if name in texts else match[0]

    return {name: _QUOTED.sub(name_of_flag, text).replace("; None:", "; absent:") for name, text in texts.items()}
