"""`quire.v1.Tokenization` shows what Generate sees."""

import asyncio
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer as FastTokenizer

from quire.v1 import generation_pb2 as pb
from quire.v1 import tokenization_pb2 as tpb
from quire.v1.tokenization_pb2_grpc import TokenizationStub
from scheduler.servers import tokenization_server
from tests.support.scheduler.generation_calls import collect
from tests.support.scheduler.servers import Served, Servers

CHAT = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hello")])
Code = grpc.StatusCode


async def generated_prompt(served: Served, prompt: dict[str, Any]) -> list[int]:
    call = asyncio.create_task(collect(served.generation.Generate(pb.GenerateRequest(**prompt))))
    submitted = await served.engine.next_request()
    submitted.start().finish()
    await call
    return list(submitted.request.prompt_token_ids)


@pytest.mark.parametrize("prompt", [{"text": "The quick fox"}, {"text": "Zürich <s> 🦊"}, {"chat": CHAT}])
async def test_the_ids_are_those_of_generate(servers: Servers, prompt: dict[str, Any]) -> None:
    served = await servers.start()
    stub = TokenizationStub(served.channel)
    answer = await stub.Tokenize(tpb.TokenizeRequest(**prompt, return_bytes=True))
    assert list(answer.token_ids) == await generated_prompt(served, prompt)
    text = f"<s>{prompt['text']}" if "text" in prompt else "<s><|user|>hello<|assistant|>"
    assert b"".join(answer.tokens).decode() == text
    assert answer.max_model_len == served.engine.description.max_model_len
    assert not (await stub.Tokenize(tpb.TokenizeRequest(**prompt))).tokens
    assert (await stub.Detokenize(tpb.DetokenizeRequest(token_ids=answer.token_ids))).text == text


async def test_special_tokens_can_be_left_out(servers: Servers, byte_level: FastTokenizer) -> None:
    stub = TokenizationStub((await servers.start()).channel)
    for adds in (True, False):
        answer = await stub.Tokenize(tpb.TokenizeRequest(text="hello", add_special_tokens=adds))
        assert list(answer.token_ids) == byte_level.encode("hello", add_special_tokens=adds).ids


async def test_the_model_is_described(servers: Servers) -> None:
    info = await TokenizationStub((await servers.start()).channel).GetTokenizerInfo(tpb.GetTokenizerInfoRequest())
    assert info.special_tokens["bos_token"] == "<s>"
    assert "<|assistant|>" in info.chat_template
    assert list(info.eos_token_ids)


@pytest.mark.parametrize(
    ("method", "request_", "code", "path"),
    [
        ("Tokenize", tpb.TokenizeRequest(), Code.INVALID_ARGUMENT, "prompt"),
        ("Tokenize", tpb.TokenizeRequest(chat=pb.ChatPrompt()), Code.INVALID_ARGUMENT, "chat.messages"),
        ("Tokenize", tpb.TokenizeRequest(text="the fox " * 200_000), Code.OUT_OF_RANGE, "at least"),
        ("Tokenize", tpb.TokenizeRequest(text="x" * (2**21 + 1)), Code.INVALID_ARGUMENT, "text"),
        (
            "Tokenize",
            tpb.TokenizeRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage()] * 20_000)),
            Code.INVALID_ARGUMENT,
            "more than 10240 fields",
        ),
        ("Tokenize", tpb.TokenizeRequest(text="x", return_bytes=True), Code.INVALID_ARGUMENT, "return_bytes: "),
        ("Detokenize", tpb.DetokenizeRequest(token_ids=[1, 2**31]), Code.INVALID_ARGUMENT, "token_ids[1]"),
        ("Detokenize", tpb.DetokenizeRequest(token_ids=[1] * 2**20), Code.OUT_OF_RANGE, "1048576"),
        ("Detokenize", tpb.DetokenizeRequest(token_ids=[1] * (2**20 + 1)), Code.INVALID_ARGUMENT, "numbers"),
    ],
)
async def test_bad_requests_are_refused_and_the_next_is_served(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, method: str, request_: Any, code: grpc.StatusCode, path: str
) -> None:
    monkeypatch.setattr(tokenization_server, "MAX_TOKENS_WITH_BYTES", 1)
    stub = TokenizationStub((await servers.start()).channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(stub, method)(request_)
    assert caught.value.code() is code
    assert path in (caught.value.details() or "")
    assert (await stub.Tokenize(tpb.TokenizeRequest(text="fox"))).token_ids
