"""The key of a request keeps prompts together that begin alike."""

from gateway.schedulers.affinity import affinity_key
from quire.v1 import generation_pb2 as pb


def chat(*contents: str, salt: str = "") -> pb.GenerateRequest:
    messages = [pb.ChatMessage(role="user", content=each) for each in contents]
    return pb.GenerateRequest(chat=pb.ChatPrompt(messages=messages), cache_salt=salt)


def test_the_key_is_the_beginning_of_the_prompt() -> None:
    long = "x" * 2000
    assert affinity_key(chat(long, "first")) == affinity_key(chat(long, "second"))
    assert affinity_key(chat("a", "b")) != affinity_key(chat("a", "c"))
    assert affinity_key(chat("a")) != affinity_key(chat("a", salt="s"))
    text = pb.GenerateRequest(text=long + "1")
    assert affinity_key(text) == affinity_key(pb.GenerateRequest(text=long + "2"))
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(300)))
    assert affinity_key(ids) == affinity_key(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[*range(299), 5])))
    assert affinity_key(ids) != affinity_key(pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(1, 301))))
