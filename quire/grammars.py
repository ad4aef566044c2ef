"""Reads grammars of structured output. The scheduler and the executor both use it, so that they agree on each grammar.

Grammars are in the JSON form of llguidance (https://github.com/guidance-ai/llguidance), which follows a grammar by an
Earley parser over lexemes and computes masks by a walk through the trie of the vocabulary.
"""

from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_GRAMMAR_BYTES = 256 << 10
"""Maximum size of a grammar in llguidance's JSON form."""

COMPILER_STACK_BYTES = 4 << 20
"""Stack of the process that compiles a grammar first. llguidance recurses: 1,200 rules deep in this stack."""

FOLLOWER_STACK_BYTES = 4 * COMPILER_STACK_BYTES
"""Stack of the threads that use the grammar afterwards. Running out of it would end the executor, so they have more."""

FEATURE = "grammars"
"""The name of the optional part of the plan stream that carries grammars."""

_LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=300_000,
    step_max_items=50_000,
    max_lexer_states=50_000,  # 1 to 2 KB each
    max_grammar_size=200_000,
    verbose_errors=False,  # an error names the problem, and no text of the client
)


def grammar_tokenizer(tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Returns the vocabulary as matchers need it, for logits of this width.

    tokenizer_json  the contents of the checkpoint's tokenizer.json
    eos_token_ids   those that tokenizer.json lacks, because only tokenizer_config.json names them, are left out
    Raises ValueError if llguidance cannot use this tokenizer, and for EOS ids that have no logit.
    """
    if any(token_id >= vocab_size for token_id in eos_token_ids):
        raise ValueError(f"EOS ids must be below {vocab_size}, not {max(eos_token_ids)}")

    def with_eos(ids: list[int]) -> LLTokenizer:
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=ids or None)

    try:
        return with_eos(list(eos_token_ids))
    except ValueError:
        num_tokens = LLTokenizer(tokenizer_json).vocab_size
        return with_eos([token_id for token_id in eos_token_ids if token_id < num_tokens])


def matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Returns a matcher at the start of the grammar. It never raises: `get_error()` is not empty if it cannot be used.

    The same grammar passes or fails everywhere, because its limits count work and not time.
    """
    return LLMatcher(tokenizer, grammar, limits=_LIMITS, log_level=0)
