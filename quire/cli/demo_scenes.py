"""The requests of the demonstration: several kinds that overlap in time."""

from dataclasses import dataclass, field

from quire.events import ChatMessage, Prompt
from quire.options import GenerateOptions

# Two requests begin with this: the second one finds its blocks in the prefix cache.
_SHARED_BEGINNING = (
    "Once upon a time, in the village, there lived a patient robin named Oscar. More than anything, Oscar loved his "
    "old lamp. One warm summer day, the lamp was gone. He looked on the stone wall, but it was not there. He looked "
    "under the bridge, but it was not there either."
)


@dataclass(frozen=True, slots=True)
class Scene:
    """One request of the demonstration.

    name           short; also the request id
    about          the feature that it shows
    start_after_s  seconds after the first requests
    """

    name: str
    about: str
    prompt: Prompt
    options: GenerateOptions = field(default_factory=lambda: GenerateOptions())
    start_after_s: float = 0.0

    @property
    def num_sequences(self) -> int:
        return self.options.get("n") or 1

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str)

    @property
    def named_options(self) -> GenerateOptions:
        """The options, with the name of the scene as request id, so that the block map shows it."""
        named = self.options.copy()
        named["request_id"] = self.name
        return named

    @property
    def shown_prompt(self) -> str:
        """The prompt, or the last message of the chat, as text."""
        if isinstance(self.prompt, str):
            return self.prompt
        last = self.prompt[-1]
        return last.content if isinstance(last, ChatMessage) else str(last)


def _greedy(max_tokens: int) -> GenerateOptions:
    return {"temperature": 0.0, "max_tokens": max_tokens}


def _sampled(max_tokens: int, seed: int, n: int = 1) -> GenerateOptions:
    return {"temperature": 0.8, "seed": seed, "max_tokens": max_tokens, "n": n}


def _chat(request: str) -> list[ChatMessage]:
    return [ChatMessage("user", request)]


SCENES = (
    Scene("mountain", "greedy", "Once upon a time, on the mountain, there lived", _greedy(400)),
    Scene("knight", "a chat", _chat("Tell me a story about a knight and a trumpet."), _greedy(400)),
    Scene(
        "owl",
        "three samples of one prompt",
        "There once was a brave owl named Ella. She lived in a warm cave on the",
        _sampled(400, seed=5, n=3),
    ),
    Scene("hello", "short", _chat("What can you do?"), _greedy(60)),
    Scene("lamp", "a longer prompt", _SHARED_BEGINNING, _sampled(400, seed=1)),
    Scene(
        "endless",
        "goes on after EOS",
        "Luna the horse lived in a round burrow on the hill.",
        {"temperature": 0.8, "seed": 3, "max_tokens": 1500, "ignore_eos": True},
    ),
    Scene(
        "lamp-again",
        "a prefix cache hit",
        _SHARED_BEGINNING + " Soon a",
        _sampled(400, seed=2),
        start_after_s=1.0,
    ),
    Scene("otter", "sampled", _chat("Write a story about an otter."), _sampled(400, 4), start_after_s=1.0),
    Scene("first-words", "20 tokens", "A little robot named", _greedy(20), start_after_s=1.5),
    Scene("drum", "sampled", _chat("Tell me a story about a drum."), _sampled(400, 6), start_after_s=2.0),
    Scene(
        "girl",
        "two samples of one prompt",
        _chat("Please tell me a story about a girl named Ella."),
        _sampled(400, seed=8, n=2),
        start_after_s=2.5,
    ),
    Scene("pig", "sampled", _chat("Can you tell me a story about a pig?"), _sampled(400, 9), start_after_s=3.0),
)
