"""Encodes many log-probabilities as messages at once.

Setting the fields of a message takes about 1.4 µs for each log-probability, during which no other stream is served. So
the messages are written in protobuf's wire format by numpy, and parsed. A varint may be longer than necessary: here all
of them have their greatest length, so that each entry has the same size. Parsing makes ordinary messages of them.

Wire format: https://protobuf.dev/programming-guides/encoding
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.v1 import generation_pb2 as pb

_UINT32_BYTES = 5
_SIZE_BYTES = 3
_MORE = 0x80
"""The bit of a varint's byte that says that another byte follows."""

_ENTRY = np.dtype(
    [
        ("tag", "u1"),
        ("size", "u1"),
        ("token_id_tag", "u1"),
        ("token_id", "u1", _UINT32_BYTES),
        ("logprob_tag", "u1"),
        ("logprob", "<f4"),
        ("rank_tag", "u1"),
        ("rank", "u1", _UINT32_BYTES),
    ]
)
"""A TokenLogprob inside of a TokenLogprobs, without `bytes`."""

_VARINT, _FIXED32, _NESTED = 0, 5, 2
_FIELDS = pb.TokenLogprob.DESCRIPTOR.fields_by_name
_CHOSEN, _TOP = (pb.TokenLogprobs.DESCRIPTOR.fields_by_name[name].number << 3 | _NESTED for name in ("chosen", "top"))
_TOKENS = pb.PromptLogprobs.DESCRIPTOR.fields_by_name["tokens"].number << 3 | _NESTED


def messages(
    token_ids: Sequence[int], logprobs: Sequence[float], ranks: Sequence[int], width: int
) -> list[pb.TokenLogprobs]:
    """Returns a message for each `width` entries: the chosen token, then the most probable ones.

    All sequences have the same length, a multiple of `width`.
    """
    layout = np.dtype([("tag", "u1"), ("size", "u1", _SIZE_BYTES), ("entries", _ENTRY, width)])
    tokens = np.empty(len(token_ids) // width, layout)
    tokens["tag"] = _TOKENS
    tokens["size"] = _varints(np.array([width * _ENTRY.itemsize], np.uint32), _SIZE_BYTES)
    entries = tokens["entries"]
    entries["tag"] = _TOP
    entries["tag"][:, 0] = _CHOSEN
    entries["size"] = _ENTRY.itemsize - 2
    entries["token_id_tag"] = _FIELDS["token_id"].number << 3 | _VARINT
    entries["token_id"] = _varints(np.array(token_ids, np.uint32).reshape(-1, width), _UINT32_BYTES)
    entries["logprob_tag"] = _FIELDS["logprob"].number << 3 | _FIXED32
    entries["logprob"] = np.array(logprobs, np.float32).reshape(-1, width)
    entries["rank_tag"] = _FIELDS["rank"].number << 3 | _VARINT
    entries["rank"] = _varints(np.array(ranks, np.uint32).reshape(-1, width), _UINT32_BYTES)
    return list(pb.PromptLogprobs.FromString(tokens.tobytes()).tokens)


def _varints(values: NDArray[np.uint32], num_bytes: int) -> NDArray[np.uint8]:
    """Returns each value as a varint of `num_bytes` bytes: seven bits in each, the lowest ones first."""
    shifted = values[..., np.newaxis] >> np.arange(0, 7 * num_bytes, 7, dtype=np.uint32)
    varints = (shifted & 0x7F).astype(np.uint8)
    varints[..., :-1] |= _MORE
    return varints
