"""The description of the served model: the executor's description, narrowed by the operator's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.grammars import FEATURE as GRAMMARS
from quire.plan_stream import FEATURES, OWN, speaks_with, spoken
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
    "max_model_len": 2,  # one prompt token and one output token
    "block_size": 1,
    "num_blocks": 2,  # the null block and one to use
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
}


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The model that is served, and its bounds. `num_blocks` does not count the null block, which no sequence can use.
    `has_grammars`: the executor follows grammars, an optional part of the plan stream.

    Most fields are also in `ExecutorDescription`, where the null block counts and the bounds are the executor's own.
    Two types let the type checker find a mix-up.
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
    weights_digest: str = ""
    has_grammars: bool = False

    @classmethod
    def narrowed(
        cls, executor: ExecutorDescription, max_num_seqs: int | None, max_num_batched_tokens: int | None
    ) -> ModelDescription:
        """Returns the executor's description with the operator's bounds; None keeps the executor's own bound.

        The token budget also bounds the batch, because each running sequence needs a token in every step. Raises
        ExecutorNotOurs if an executor with this description cannot serve any request.
        """
        if faults := _faults(executor):
            raise ExecutorNotOurs(f"the executor cannot be used as it describes itself: {', and '.join(faults)}")
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
            weights_digest=executor.weights_digest,
            has_grammars=GRAMMARS in executor.features,
        )

    def differences(self, other: ModelDescription) -> list[str]:
        """Returns the differences in fields that must be equal for another executor to take over running requests."""
        return [
            f"{name} {getattr(other, name)}, not {getattr(self, name)}"
            for name in _IDENTITY
            if getattr(other, name) != getattr(self, name)
        ]


def _faults(executor: ExecutorDescription) -> list[str]:
    version, least = executor.protocol_version, executor.least_protocol_version
    if not speaks_with(version, least):
        return [
            f"it speaks {spoken(version, least)} of the plan stream, this scheduler {OWN}: run the same release of both"
        ]
    faults = [
        f"{name} {getattr(executor, name)}, where at least {least} is needed"
        for name, least in _LEAST.items()
        if getattr(executor, name) < least
    ]
    if missing := [name for name in FEATURES if name not in executor.features]:
        faults.append(f"it lacks {', '.join(missing)}: run the same release of both")
    return faults
