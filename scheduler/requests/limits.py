"""The limits that the validator enforces."""

from collections.abc import Set
from dataclasses import dataclass

from scheduler.core import CapacityExceeded


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits that do not depend on the model.

    max_prompt_bytes           text, or all texts of a chat, in UTF-8 before tokenisation
    max_chat_messages          messages of a chat
    max_num_tools              tools of a chat
    template_arguments         names of variables that clients may give a chat template
    max_request_id_bytes       the client's request id
    max_cache_salt_bytes
    max_num_stop               stop strings
    max_stop_bytes             each stop string
    max_num_stop_token_ids
    max_beam_width             the model and max_num_seqs may allow less
    max_length_penalty         absolute value; keeps num_tokens ** length_penalty within a float
    max_num_logprobs           most probable tokens reported with each token
    max_num_logit_bias         entries of logit_bias
    max_logit_bias             absolute value
    max_num_allowed_token_ids
    max_grammar_bytes          the definition of a grammar; all choices together
    max_num_choices            choices of a grammar
    """

    max_prompt_bytes: int = 2 * 2**20
    max_chat_messages: int = 1024
    max_num_tools: int = 128
    template_arguments: Set[str] = frozenset()
    max_request_id_bytes: int = 256
    max_cache_salt_bytes: int = 256
    max_num_stop: int = 16
    max_stop_bytes: int = 256
    max_num_stop_token_ids: int = 64
    max_beam_width: int = 64
    max_length_penalty: float = 10.0
    max_num_logprobs: int = 20
    max_num_logit_bias: int = 1024
    max_logit_bias: float = 100.0
    max_num_allowed_token_ids: int = 65536
    max_grammar_bytes: int = 256 * 2**10
    max_num_choices: int = 1024


@dataclass(frozen=True, slots=True)
class ModelBounds:
    """Bounds that come from the served model.

    vocab_size                width of the logits; every token id is below it
    max_num_seqs              sequences that can run at once
    max_tokens_per_sequence   prompt and output together, as the model and the pool allow
    has_chat_template
    max_model_len             prompt and output together, as the model allows
    model_digest              identifies the model and its weights; empty: unknown
    has_grammars              the executor can follow grammars
    """

    vocab_size: int
    max_num_seqs: int
    max_tokens_per_sequence: int
    has_chat_template: bool = False
    max_model_len: int = 2**31
    model_digest: str = ""
    has_grammars: bool = False

    def check_capacity(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Raises CapacityExceeded if one sequence can never hold so many tokens.

        Clients of Anthropic's API read the numbers in its words: they ask again for less output, or shorten the prompt.
        """
        most = self.max_tokens_per_sequence
        if num_prompt_tokens > (most_of_prompt := most - min(1, num_output_tokens)):
            raise CapacityExceeded(f"prompt is too long: {num_prompt_tokens} tokens > {most_of_prompt} maximum")
        if num_prompt_tokens + num_output_tokens > most:
            total = f"{num_prompt_tokens} + {num_output_tokens}"
            raise CapacityExceeded(f"input length and `max_tokens` exceed context limit: {total} > {most}")
