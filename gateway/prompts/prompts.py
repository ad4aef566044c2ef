"""Finds the token ids of a prompt and the digests of its blocks, for the choice of a scheduler and for nothing else.

The request goes to the scheduler as it came, which reads the prompt again: so every error and every meaning stays that
of the scheduler, and no client can have this gateway send ids that its text does not stand for. A prompt that cannot be
read here is chosen for by its beginning.
"""

from __future__ import annotations

import logging
import struct
from typing import TYPE_CHECKING

from gateway.routing.choice import Prompt
from gateway.schedulers.affinity import affinity_key
from scheduler.core import QuireError as SchedulerError
from scheduler.core.prefix_index import PrefixIndex
from scheduler.requests.chat_fields import read_chat
from scheduler.requests.limits import RequestLimits
from scheduler.requests.salts import tenant_salt
from scheduler.servers.generation_server import read_fields
from scheduler.text.chat import ChatRenderer, load_template
from scheduler.text.checkpoint import Checkpoint
from scheduler.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Set

    from gateway.schedulers.schedulers import Schedulers
    from gateway.schedulers.stream import Caller
    from gateway.schedulers.watch import DigestScheme
    from quire.v1 import generation_pb2 as pb

log = logging.getLogger(__name__)

_DIGEST = struct.Struct(">Q")


class Prompts:
    """Reads prompts with the tokenizer and the chat template of a checkpoint, as a scheduler with the same one does."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatRenderer | None, template_arguments: Set[str]) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._limits = RequestLimits(template_arguments=template_arguments)

    @classmethod
    def load(cls, model: str, revision: str | None, template_arguments: Set[str]) -> Prompts:
        """Raises CheckpointError."""
        checkpoint = Checkpoint.find(model, revision)
        tokenizer = Tokenizer.load(checkpoint)
        template = load_template(checkpoint)
        variables, tokens = tokenizer.special_tokens, tokenizer.control_tokens
        chat = None if template is None else ChatRenderer(template, variables, tokens=tokens)
        return cls(tokenizer, chat, template_arguments)

    async def start(self) -> None:
        if self._chat is not None:
            await self._chat.start()

    async def close(self) -> None:
        self._tokenizer.close()
        if self._chat is not None:
            await self._chat.close()

    async def read(self, request: pb.GenerateRequest, caller: Caller, schedulers: Schedulers) -> Prompt:
        """Returns the prompt; only its beginning, if it cannot be read or no scheduler reports what it has cached."""
        beginning, scheme, info = Prompt(affinity_key(request)), schedulers.digest_scheme, schedulers.info
        if scheme is None or scheme.name != PrefixIndex.SCHEME or info is None or scheme.block_size < 1:
            return beginning
        tenant = await schedulers.tenant_of(caller.authorization)
        if tenant is None:
            return beginning
        try:
            token_ids = await self._token_ids(request, tenant.name, info.max_model_len)
        except SchedulerError:
            token_ids = []
        except Exception:
            log.exception("a prompt could not be read because of a bug")
            token_ids = []
        if not token_ids:
            return beginning
        # As for the core: a request for the log-probabilities of its prompt computes all of it.
        reads_cache = not request.output.HasField("prompt_logprobs")
        salt = tenant_salt(tenant.name, request.cache_salt.encode(errors="replace"))
        return Prompt(
            affinity_key=beginning.affinity_key,
            num_tokens=len(token_ids),
            digests=_digests(token_ids, salt, scheme) if reads_cache else (),
            block_size=scheme.block_size,
        )

    async def _token_ids(self, request: pb.GenerateRequest, tenant: str, max_tokens: int) -> list[int]:
        """Returns the ids; none if there are none. Raises the errors of a scheduler that refuses the prompt."""
        if request.HasField("resume"):
            received = request.resume.sequences[0].token_ids if request.resume.sequences else ()
            return [*request.resume.continuation.prompt.ids, *received][:max_tokens]
        kind = request.WhichOneof("prompt")
        if kind == "token_ids":
            return list(request.token_ids.ids[:max_tokens])
        if kind == "text":
            return await self._tokenizer.encode(request.text, max_tokens=max_tokens, tenant=tenant)
        if kind is None or self._chat is None:
            return []
        fields = read_fields(request)
        chat = read_chat(fields, self._limits)
        if chat is None or fields.violations:
            return []
        rendered = await self._chat.render(chat, tenant=tenant)
        return await self._tokenizer.encode_chat(rendered, max_tokens=max_tokens, tenant=tenant)


def _digests(token_ids: list[int], salt: bytes, scheme: DigestScheme) -> list[int]:
    """Returns the digests of the blocks that can be found in a cache: the last token is always computed."""
    num_full = (len(token_ids) - 1) // scheme.block_size
    index = PrefixIndex(scheme.block_size, scheme.namespace)
    chain = index.extend_chain([], token_ids, num_full, salt)
    return [_DIGEST.unpack_from(digest)[0] for digest in chain]
