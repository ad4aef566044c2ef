"""Profiles of a serving load beside the mixed trace: what long prompts, a system prompt and samples do to a server.

rag            prompts of 3,000 to 4,000 tokens, 64 tokens of output, 8 clients
long           one prompt of 12,000 tokens at a time
mixed-long     chats of 50 tokens with outputs of 200; every sixth request is a prompt of 8,000. 8 clients
system-prompt  the mixed trace behind one system prompt of 1,024 tokens, 32 clients
sampled        the mixed trace at temperature 0.8 and top-p 0.95, 32 clients
n4             four samples of each request of the mixed trace, at the same temperature, 8 clients
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """A load. `num_requests` is that of one turn; the other fields are those of a trace (bench/trace.py)."""

    num_clients: int
    num_requests: int
    lengths: str = "mixed"
    num_shared_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    num_samples: int = 1


PROFILES = {
    "rag": Profile(8, 24, lengths="rag"),
    "long": Profile(1, 4, lengths="long"),
    "mixed-long": Profile(8, 48, lengths="mixed-long"),
    "system-prompt": Profile(32, 128, num_shared_tokens=1024),
    "sampled": Profile(32, 128, temperature=0.8, top_p=0.95),
    "n4": Profile(8, 32, temperature=0.8, top_p=0.95, num_samples=4),
}
