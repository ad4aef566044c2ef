"""The division of a model among the ranks of a group: which heads, columns and tokens each of them holds.

    qkv, gate and up    by rows: a rank holds whole heads, and a span of the MLP
    output, down        by columns: each rank's product is a part of a sum over all ranks
    head                by rows: a rank makes the logits of a span of the vocabulary
    embedding, norms    whole on every rank

Megatron-LM (Shoeybi et al., 2019). Spans differ by one where a size does not divide. If there are more ranks than
key-value heads, several ranks hold the same head, and divide the queries that read it::

    6 heads, 3 key-value heads     2 ranks   rank 0: kv 0, q 0 1              rank 1: kv 1 2, q 2 3 4 5
                                   4 ranks   kv 0, q 0 1 │ kv 1, q 2 3 │ kv 2, q 4 │ kv 2, q 5
"""

from dataclasses import dataclass, replace

from executor.checkpoints.model_config import ModelConfig
from executor.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Span:
    """The indices from start to stop, without stop."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def times(self, size: int) -> "Span":
        """Returns the span of the elements of these items, `size` in each."""
        return Span(self.start * size, self.stop * size)

    @classmethod
    def part(cls, number: int, rank: int, size: int) -> "Span":
        """Returns the part of a rank in `number` items, divided as evenly as possible among `size` ranks."""
        return cls(rank * number // size, (rank + 1) * number // size)


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a model that one of `size` ranks holds."""

    rank: int
    size: int
    heads: Span
    kv_heads: Span
    intermediate: Span
    vocab: Span

    @property
    def is_leading(self) -> bool:
        """True for the rank that samples. It also adds the biases that belong to sums over all ranks."""
        return self.rank == 0

    def of(self, model: ModelConfig) -> ModelConfig:
        """Returns the configuration of the part. The vocabulary stays whole: it is that of the embedding."""
        return replace(
            model,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.intermediate),
        )


def share_of(model: ModelConfig, rank: int, size: int) -> Share:
    """Returns the share of a rank. Raises ConfigError if some rank would hold nothing."""
    for name, number in (
        ("attention heads", model.num_heads),
        ("columns of the MLP", model.intermediate_size),
        ("tokens of the vocabulary", model.vocab_size),
    ):
        if number < size:
            raise ConfigError(f"tensor_parallel_size: {size} ranks cannot share {number} {name}")
    kv_heads, heads = _heads(model, rank, size)
    return Share(
        rank=rank,
        size=size,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=Span.part(model.intermediate_size, rank, size),
        vocab=Span.part(model.vocab_size, rank, size),
    )


def _heads(model: ModelConfig, rank: int, size: int) -> tuple[Span, Span]:
    """Returns the key-value heads of a rank and the heads that read them."""
    num_kv_heads, group = model.num_kv_heads, model.num_heads // model.num_kv_heads
    if size <= num_kv_heads:
        kv_heads = Span.part(num_kv_heads, rank, size)
        return kv_heads, kv_heads.times(group)
    kv_head = next(each for each in range(num_kv_heads) if rank < Span.part(size, each, num_kv_heads).stop)
    holders = Span.part(size, kv_head, num_kv_heads)
    own = Span.part(group, rank - holders.start, len(holders))
    first = kv_head * group
    return Span(kv_head, kv_head + 1), Span(first + own.start, first + own.stop)
