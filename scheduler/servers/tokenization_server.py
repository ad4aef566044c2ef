"""`quire.v1.Tokenization` on grpc.aio."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from quire.v1 import tokenization_pb2 as pb
from quire.v1.tokenization_pb2_grpc import TokenizationServicer
from scheduler.core import InvalidRequest
from scheduler.identity.identity import CALLER
from scheduler.requests.status import or_abort
from scheduler.servers.generation_server import read_fields

if TYPE_CHECKING:
    from typing import Any

    import grpc

    from scheduler.requests.intake import Intake

    Context = grpc.aio.ServicerContext[Any, Any]

MAX_TOKENS_WITH_BYTES = 1 << 14
"""The bytes of so many tokens are looked up in 5 ms, during which the event loop cannot run."""


class TokenizationServer(TokenizationServicer):
    """Shows the tokenizer that `Generate` uses. The work waits for the turn of the caller's tenant."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:  # noqa: N802
        """Fails as Generate does with a prompt that is not valid or too long."""
        adds_special_tokens = not request.HasField("add_special_tokens") or request.add_special_tokens
        return await or_abort(self._tokenize(request, adds_special_tokens), context)

    async def _tokenize(self, request: pb.TokenizeRequest, adds_special_tokens: bool) -> pb.TokenizeResponse:
        tenant, tokenizer = CALLER.get().tenant, self._intake.model.tokenizer
        ids = await self._intake.tokenize(read_fields(request), tenant, adds_special_tokens)
        tokens: list[bytes] = []
        if request.return_bytes:
            if len(ids) > MAX_TOKENS_WITH_BYTES:
                raise InvalidRequest({"return_bytes": f"is for at most {MAX_TOKENS_WITH_BYTES} tokens, not {len(ids)}"})
            tokens = [tokenizer.token_bytes(token_id) for token_id in ids]
        respond = partial(pb.TokenizeResponse, token_ids=ids, tokens=tokens, max_model_len=self._intake.max_model_len)
        return await tokenizer.in_turn(respond, len(ids), tenant)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:  # noqa: N802
        """Fails with INVALID_ARGUMENT for ids that the model lacks."""
        text = await or_abort(self._intake.detokenize(read_fields(request), CALLER.get().tenant), context)
        return pb.DetokenizeResponse(text=text)

    async def GetTokenizerInfo(  # noqa: N802
        self, request: pb.GetTokenizerInfoRequest, context: Context
    ) -> pb.GetTokenizerInfoResponse:
        """Never fails: the tokenizer is loaded before the server starts."""
        model = self._intake.model
        return pb.GetTokenizerInfoResponse(
            special_tokens=model.tokenizer.special_tokens,
            eos_token_ids=model.defaults.eos_token_ids,
            chat_template=None if model.chat is None else model.chat.template,
        )
