"""The prefix index: a block is found only by its own tokens and all tokens before it."""

from scheduler.core.prefix_index import PrefixIndex
from tests.support.core.letter_tokens import to_ids


def chain_of(index: PrefixIndex, text: str, salt: bytes = b"") -> list[bytes]:
    return index.extend_chain([], to_ids(text), len(text) // index.block_size, salt)


def index_of(*texts: str, salt: bytes = b"") -> PrefixIndex:
    """Returns an index with blocks of two tokens; the texts' blocks are published as 1, 2, 3, …"""
    index, block = PrefixIndex(block_size=2), 0
    for text in texts:
        for digest in chain_of(index, text, salt):
            block += 1
            index.publish(block, digest)
    return index


def test_finds_the_longest_published_prefix() -> None:
    index = index_of("abcdef")
    assert index.longest_match(chain_of(index, "abcdef")) == [1, 2, 3]
    assert index.longest_match(chain_of(index, "abcdefgh")) == [1, 2, 3]
    assert index.longest_match(chain_of(index, "abcdxx")) == [1, 2]
    assert index.longest_match(chain_of(index, "xxcdef")) == []


def test_a_partly_filled_block_has_no_digest() -> None:
    index = PrefixIndex(block_size=2)
    assert len(chain_of(index, "abc")) == 1
    assert chain_of(index, "a") == []


def test_the_same_tokens_after_other_tokens_do_not_match() -> None:
    index = index_of("abcd", "xxcd")
    assert index.longest_match(chain_of(index, "abcd")) == [1, 2]
    assert index.longest_match(chain_of(index, "xxcd")) == [3, 4]


def test_a_match_ends_at_the_first_gap() -> None:
    index = index_of("abcdef")
    index.forget(2)
    assert index.longest_match(chain_of(index, "abcdef")) == [1]


def test_different_salts_or_models_have_different_digests() -> None:
    index = index_of("abcd", salt=b"alice")
    assert index.longest_match(chain_of(index, "abcd", b"alice")) == [1, 2]
    assert index.longest_match(chain_of(index, "abcd", b"bob")) == []
    assert index.longest_match(chain_of(index, "abcd")) == []
    assert chain_of(PrefixIndex(2, "llama"), "ab") != chain_of(PrefixIndex(2, "qwen"), "ab")


def test_token_borders_are_part_of_the_digest() -> None:
    """Token ids are hashed as numbers of a fixed width, not as joined digits."""
    index = PrefixIndex(block_size=2)
    assert index.extend_chain([], [1, 23], 1, b"") != index.extend_chain([], [12, 3], 1, b"")
    assert index.extend_chain([], [256, 0], 1, b"") != index.extend_chain([], [0, 1], 1, b"")


def test_a_chain_grows_in_place_and_only_if_it_is_too_short() -> None:
    index = PrefixIndex(block_size=2)
    chain = chain_of(index, "abcd")
    first = list(chain)
    assert index.extend_chain(chain, to_ids("abcdef"), 3, b"") is chain
    assert chain[:2] == first
    assert chain == chain_of(index, "abcdef")
    assert index.extend_chain(chain, to_ids("abcdef"), 1, b"") == chain_of(index, "abcdef"), "never shortened"


def test_the_first_of_two_blocks_with_the_same_contents_stays_published() -> None:
    index = index_of("ab")
    index.publish(7, chain_of(index, "ab")[0])
    assert index.longest_match(chain_of(index, "ab")) == [1]
    assert 7 not in index
    index.publish(1, chain_of(index, "xy")[0])
    assert len(index) == 1, "a block that is published for one prefix is not published for another"


def test_a_forgotten_block_can_be_published_again() -> None:
    index = index_of("ab")
    index.forget(1)
    index.forget(1)
    assert len(index) == 0
    assert 1 not in index
    index.publish(1, chain_of(index, "xy")[0])
    assert index.items() == [(chain_of(index, "xy")[0], 1)]


def test_counts_hits_since_the_block_was_published() -> None:
    index = index_of("abcd")
    index.count_hits([1, 2])
    index.count_hits([1])
    assert index.hits == {1: 2, 2: 1}
    index.forget(1)
    index.publish(1, chain_of(index, "ab")[0])
    assert index.hits == {1: 0, 2: 1}
