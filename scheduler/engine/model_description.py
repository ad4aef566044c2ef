"""What is served: the executor's word, narrowed by the operator's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler.core import ExecutorNotOurs

if TYPE_CHECKING:
    from scheduler.engine.plan_wire import ExecutorDescription

_IDENTITY = (
    "model_name",
    "dtype",
    "vocab_size",
    "max_model_len",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
)

_LEAST = {
    "vocab_size": 1,
    "max_model_len": 2,  # a token of the prompt, and one to follow it
    "block_size": 1,
    "num_blocks": 2,  # the null block, and one to use
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
}
_LAST_EPOCH = 2**64 - 1  # what the plan stream's field holds


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """`num_blocks` are those that sequences can use: the null block is not counted.

    Not the `ExecutorDescription` with other numbers, though most fields are the same: there the null block counts, and
    bounds are the executor's, so a mix-up of the two is one that the type checker finds.
    """

    model_name: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @classmethod
    def narrowed(
        cls, executor: ExecutorDescription, max_num_seqs: int | None, max_num_batched_tokens: int | None
    ) -> ModelDescription:
        """None leaves the executor's own bound. A token budget narrows the batch too: each sequence that runs needs
        one token a step.

        Raises ExecutorNotOurs for an executor that by its own word can serve nothing.
        """
        if faults := _faults(executor):
            raise ExecutorNotOurs(f"the executor cannot be used, by what it says of itself: {', and '.join(faults)}")
        num_tokens = min(max_num_batched_tokens or executor.max_num_batched_tokens, executor.max_num_batched_tokens)
        num_seqs = min(max_num_seqs or executor.max_num_seqs, executor.max_num_seqs)
        return cls(
            model_name=executor.model_name,
            dtype=executor.dtype,
            device=executor.device,
            vocab_size=executor.vocab_size,
            max_model_len=executor.max_model_len,
            block_size=executor.block_size,
            num_blocks=executor.num_blocks - 1,
            max_num_seqs=min(num_seqs, num_tokens),
            max_num_batched_tokens=num_tokens,
        )

    def differences(self, other: ModelDescription) -> list[str]:
        """Of what must stay the same when an executor is replaced under running requests: what does not."""
        return [
            f"{name} {getattr(other, name)}, not {getattr(self, name)}"
            for name in _IDENTITY
            if getattr(other, name) != getattr(self, name)
        ]


def _faults(executor: ExecutorDescription) -> list[str]:
    faults = [
        f"{name} {getattr(executor, name)}, where at least {least} is needed"
        for name, least in _LEAST.items()
        if getattr(executor, name) < least
    ]
    if executor.epoch >= _LAST_EPOCH:
        faults.append(f"epoch {executor.epoch}, after which there is none")
    return faults
