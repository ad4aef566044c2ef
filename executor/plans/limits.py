"""The limits that every plan must obey."""

from dataclasses import dataclass

from executor.checkpoints.model_config import ModelConfig
from executor.config import ExecutorConfig
from executor.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """Sizes of this executor, fixed for the life of the process.

    vocab_size is the width of the logits: every token id is below it. num_blocks includes the null block (id 0).
    max_model_len bounds the tokens of one sequence, max_num_batched_tokens those of one step.
    """

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)


def resolve_max_model_len(config: ExecutorConfig, model: ModelConfig) -> int:
    """Returns the configured length, else the checkpoint's.

    Raises ConfigError if the configured length exceeds what the checkpoint's rotary embedding supports.
    """
    if config.max_model_len is None:
        return model.max_position_embeddings
    if config.max_model_len > model.rope.max_context_len:
        raise ConfigError(
            f"max_model_len: {config.max_model_len} is more than the {model.rope.max_context_len} tokens"
            " this checkpoint was made for"
        )
    return config.max_model_len


def resolve_max_num_seqs(config: ExecutorConfig, on_cpu: bool) -> int:
    return config.max_num_seqs or (64 if on_cpu else 256)


def resolve_limits(
    config: ExecutorConfig, model: ModelConfig, max_model_len: int, num_blocks: int, on_cpu: bool
) -> PlanLimits:
    """Returns the limits, with the defaults of the device for settings that are not configured.

    Raises ConfigError if one step could not hold a token of each sequence.
    """
    max_num_seqs = resolve_max_num_seqs(config, on_cpu)
    max_num_batched_tokens = config.max_num_batched_tokens or max(512 if on_cpu else 8192, max_num_seqs)
    if max_num_batched_tokens < max_num_seqs:
        raise ConfigError(f"max_num_batched_tokens: {max_num_batched_tokens} is less than max_num_seqs {max_num_seqs}")
    return PlanLimits(
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
