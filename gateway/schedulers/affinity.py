"""The key of a request by which the ring chooses: requests whose prompts begin alike have the same one."""

from quire.v1 import generation_pb2 as pb

PREFIX_CHARACTERS = 1024
PREFIX_TOKENS = 256


def affinity_key(request: pb.GenerateRequest) -> bytes:
    """Returns the beginning of the prompt, with its salt: requests with different salts share nothing."""
    match request.WhichOneof("prompt"):
        case "text":
            start = request.text[:PREFIX_CHARACTERS]
        case "token_ids":
            start = str(request.token_ids.ids[:PREFIX_TOKENS])
        case _:
            parts, num_left = [], PREFIX_CHARACTERS
            for message in request.chat.messages:
                parts.append(f"{message.role}:{message.content[:num_left]}")
                num_left -= len(message.content)
                if num_left <= 0:
                    break
            start = "\n".join(parts)
    return f"{request.cache_salt}\0{start}".encode(errors="replace")
