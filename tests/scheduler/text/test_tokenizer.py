"""The tokenizer does not block the event loop, and limits the texts that wait."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers
from transformers import AutoTokenizer

from scheduler.core import CapacityExceeded, InvalidRequest, QueueFull
from scheduler.text import tokenizer as tokenizer_module
from scheduler.text import turns
from scheduler.text.checkpoint import Checkpoint, CheckpointError
from scheduler.text.tokenizer import Tokenizer
from tests.support.waiting import until

LONG = "hello fox " * 1000


@pytest.fixture
def tokenizer(byte_level: FastTokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tokenizer]:
    monkeypatch.setattr(turns, "MAX_PENDING_CHARACTERS", 25_000)
    tokenizer = Tokenizer(byte_level)
    yield tokenizer
    tokenizer.close()


@pytest.mark.parametrize("text", ["", "hello", "\x00", "<s>a</s>", "你好 🦊", LONG])
async def test_ids_equal_those_of_the_library(tokenizer: Tokenizer, byte_level: FastTokenizer, text: str) -> None:
    assert await tokenizer.encode(text) == byte_level.encode(text).ids
    assert (
        await tokenizer.encode_chat(text.replace("<s>", "").replace("</s>", ""))
        == byte_level.encode(text.replace("<s>", "").replace("</s>", ""), add_special_tokens=False).ids
    )


async def test_truncation_and_padding_of_the_checkpoint_are_disabled(byte_level: FastTokenizer) -> None:
    truncating = FastTokenizer.from_str(byte_level.to_str())
    truncating.enable_truncation(4)
    truncating.enable_padding(length=10)
    tokenizer = Tokenizer(truncating)
    assert await tokenizer.encode("hello fox hello fox") == byte_level.encode("hello fox hello fox").ids
    tokenizer.close()


class SlowEncoder:
    """Replaces the library's tokenizer, and encodes when `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.num_started = 0

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list["SlowEncoder"]:
        self.num_started += 1
        assert self.go.wait(30)
        return [self]

    def __len__(self) -> int:
        return 1

    @property
    def ids(self) -> list[int]:
        return [1]


@pytest.fixture
async def slow(tokenizer: Tokenizer) -> AsyncIterator[SlowEncoder]:
    encoder = SlowEncoder()
    tokenizer._tokenizer = encoder  # type: ignore[assignment]
    yield encoder
    encoder.go.set()


async def test_event_loop_runs_during_encoding(tokenizer: Tokenizer, slow: SlowEncoder) -> None:
    task = asyncio.create_task(tokenizer.encode(LONG))
    await until(lambda: slow.num_started == 1)
    slow.go.set()
    assert await task == [1]


async def test_waiting_text_is_limited_and_released(tokenizer: Tokenizer, slow: SlowEncoder) -> None:
    tasks = [asyncio.create_task(tokenizer.encode(LONG)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await tokenizer.encode(LONG)
    # Cancelled callers do not release texts that threads still hold.
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await until(lambda: slow.num_started == 2)
    with pytest.raises(QueueFull):
        await tokenizer.encode(LONG)
    slow.go.set()
    await until(lambda: tokenizer._turns.size == 0)
    assert await tokenizer.encode(LONG) == [1]


async def test_single_text_beyond_the_limit_is_accepted(tokenizer: Tokenizer, byte_level: FastTokenizer) -> None:
    assert await tokenizer.encode(LONG * 4) == byte_level.encode(LONG * 4).ids


async def test_word_that_the_vocabulary_lacks_is_invalid() -> None:
    words = FastTokenizer(models.WordLevel({"hello": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(words)
    with pytest.raises(InvalidRequest) as caught:
        await tokenizer.encode("fox")
    assert list(caught.value.violations) == ["prompt"]
    tokenizer.close()


async def test_pathological_text_is_encoded(tokenizer: Tokenizer) -> None:
    for text in ("a" * 200_000, " " * 200_000, "\n " * 100_000, "\u0301" * 50_000, "aB1!" * 50_000):
        assert await tokenizer.encode(text)


def test_load_reads_special_tokens(checkpoint: Checkpoint, byte_level: FastTokenizer) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.eos_token_id == byte_level.token_to_id("</s>")
    tokenizer.close()


@pytest.mark.parametrize("is_listed", [False, True])
@pytest.mark.parametrize("config", [{"eos_token": "<s>"}, {"eos_token": None}, {}])
def test_the_file_that_names_the_special_tokens_is_that_of_transformers(
    checkpoint: Checkpoint, config: dict[str, object], is_listed: bool
) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    if is_listed:
        config["added_tokens_decoder"] = {"0": {"content": "<s>", "special": True}}
    (checkpoint.directory / "tokenizer_config.json").write_text(json.dumps(config))
    named = {"eos_token": {"content": "</s>", "lstrip": False}, "bos_token": "<s>"}
    (checkpoint.directory / "special_tokens_map.json").write_text(json.dumps(named))
    (checkpoint.directory / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = Tokenizer.load(checkpoint)
    assert tokenizer.special_tokens == AutoTokenizer.from_pretrained(checkpoint.directory).special_tokens_map
    tokenizer.close()


def test_roles_of_the_checkpoint_itself_are_read(checkpoint: Checkpoint) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "end_token": "<|user|>"}
    config |= {"add_bos_token": True, "added_tokens_decoder": {}, "bos_token": None}
    config |= {"extra_special_tokens": {"think_token": "<|assistant|>", "tool_token": "<s>"}}
    (checkpoint.directory / "tokenizer_config.json").write_text(json.dumps(config))
    (checkpoint.directory / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = Tokenizer.load(checkpoint)
    assert tokenizer.special_tokens == AutoTokenizer.from_pretrained(checkpoint.directory).special_tokens_map
    tokenizer.close()


async def test_tokens_are_read_from_tokenizer_config(checkpoint: Checkpoint, byte_level: FastTokenizer) -> None:
    """Some checkpoints were saved with a tokenizer.json without the tokens that were added last."""
    first = byte_level.get_vocab_size()
    names = {"<s>": byte_level.token_to_id("<s>"), "<|im_start|>": first, "<|im_end|>": first + 1}
    listed = {str(token_id): {"content": name, "special": True} for name, token_id in names.items()}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "added_tokens_decoder": listed}
    byte_level.save(str(checkpoint.directory / "tokenizer.json"))
    (checkpoint.directory / "tokenizer_config.json").write_text(json.dumps(config))
    (checkpoint.directory / "config.json").write_text('{"model_type": "llama"}')
    text = "<|im_start|>hello<|im_end|>"
    tokenizer = Tokenizer.load(checkpoint)
    assert await tokenizer.encode(text) == AutoTokenizer.from_pretrained(checkpoint.directory)(text).input_ids
    assert tokenizer.eos_token_id == first + 1
    assert "<|im_end|>" in [token.text for token in tokenizer.control_tokens]
    tokenizer.close()


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ({"5000": {"content": "<|im_end|>"}}, "instead of 5000 as in tokenizer_config.json"),
        ({"end": {"content": "<|im_end|>"}}, "added_tokens_decoder does not describe tokens"),
        (["<|im_end|>"], "added_tokens_decoder does not describe tokens"),
    ],
)
def test_unusable_tokens_in_tokenizer_config_are_errors(checkpoint: Checkpoint, byte_level, listed, message) -> None:
    byte_level.save(str(checkpoint.directory / "tokenizer.json"))
    (checkpoint.directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(checkpoint)


def test_tokenizer_json_is_required(checkpoint: Checkpoint) -> None:
    (checkpoint.directory / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        Tokenizer.load(checkpoint)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": {"type": "Exec"}}'])
def test_malformed_tokenizer_json_is_an_error(checkpoint: Checkpoint, content: str) -> None:
    (checkpoint.directory / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.load(checkpoint)


class Encoding:
    """An encoding of the library that records how many ids each list had that was made of it."""

    def __init__(self, ids: list[int], made: list[int]) -> None:
        self._ids = ids
        self._made = made
        self.overflowing: list[Encoding] = []

    def __len__(self) -> int:
        return len(self._ids)

    def truncate(self, size: int) -> None:
        parts = [self._ids[start : start + size] for start in range(0, len(self._ids), size)]
        self._ids = parts[0]
        self.overflowing = [Encoding(part, self._made) for part in parts[1:]]

    @property
    def ids(self) -> list[int]:
        self._made.append(len(self._ids))
        return self._ids

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list["Encoding"]:
        return [self]


async def test_no_list_is_made_of_ids_that_are_too_many(tokenizer: Tokenizer) -> None:
    """The library makes a list without releasing the interpreter lock: 10 ms for half a million ids."""
    made: list[int] = []
    tokenizer._tokenizer = Encoding([1] * 101, made)  # type: ignore[assignment]
    with pytest.raises(CapacityExceeded, match=r"^prompt is too long: 101 tokens > 100 maximum$"):
        await tokenizer.encode("x", max_tokens=100)
    assert made == []
    assert await tokenizer.encode("x", max_tokens=101) == [1] * 101


async def test_long_lists_of_ids_are_made_in_parts(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = await tokenizer.encode(LONG)
    monkeypatch.setattr(tokenizer_module, "IDS_AT_ONCE", 100)
    assert await tokenizer.encode(LONG) == expected
    made: list[int] = []
    tokenizer._tokenizer = Encoding(list(range(250)), made)  # type: ignore[assignment]
    assert await tokenizer.encode("x") == list(range(250))
    assert made == [100, 100, 50]


async def test_a_text_of_too_many_tokens_is_invalid(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "MAX_TOKENS_OF_TEXT", 100)
    made: list[int] = []
    for encode in (tokenizer.encode, tokenizer.encode_chat):
        with pytest.raises(InvalidRequest) as caught:
            await encode("\x01" * 101)
        number = 101 if encode == tokenizer.encode_chat else 102  # with the special token of the text
        assert caught.value.violations == {
            "prompt": f"has {number} tokens, a text may have 100: send a longer prompt as token ids"
        }
    assert len(await tokenizer.encode_chat("\x01" * 100)) == 100
    tokenizer._tokenizer = Encoding([1] * 101, made)  # type: ignore[assignment]
    with pytest.raises(CapacityExceeded):  # a text that cannot fit at all is told so, as before
        await tokenizer.encode("x", max_tokens=99)
    with pytest.raises(InvalidRequest):
        await tokenizer.encode("x", max_tokens=101)
    assert made == []


async def test_large_work_is_done_in_a_thread(tokenizer: Tokenizer) -> None:
    threads = [
        await tokenizer.in_turn(threading.current_thread, size, "default")
        for size in (tokenizer_module.MAX_INLINE_SIZE, tokenizer_module.MAX_INLINE_SIZE + 1)
    ]
    assert threads[0] is threading.current_thread()
    assert threads[1].name.startswith("quire-tokenize")


def test_short_texts_are_encoded_at_once() -> None:
    assert len("hello") <= tokenizer_module.MAX_INLINE_SIZE < len(LONG)
