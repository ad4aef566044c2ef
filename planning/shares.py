"""The division of a model among the devices of a group, by the rules of `executor.checkpoints.shares`.

Planning has them once more, because it imports no executor; a test compares both, byte by byte.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """The numbers that one device holds: of heads, of kv heads, of columns of the MLP, and of tokens of the head.

    is_leading  it adds the biases that follow a sum over the devices
    """

    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    is_leading: bool


def shares(num_heads: int, num_kv_heads: int, intermediate_size: int, vocab_size: int, size: int) -> list[Share]:
    """Returns the share of each of `size` devices. Parts differ by one where a number does not divide."""
    if size <= num_kv_heads:
        kv_heads = parts(num_kv_heads, size)
        heads = [number * (num_heads // num_kv_heads) for number in kv_heads]
    else:  # several devices hold a kv head, and divide the queries that read it
        kv_heads = [1] * size
        heads = [own for holders in parts(size, num_kv_heads) for own in parts(num_heads // num_kv_heads, holders)]
    columns, tokens = parts(intermediate_size, size), parts(vocab_size, size)
    return [
        Share(heads[rank], kv_heads[rank], columns[rank], tokens[rank], is_leading=rank == 0) for rank in range(size)
    ]


def parts(number: int, size: int) -> list[int]:
    """Returns the sizes of `size` parts of a number."""
    return [(rank + 1) * number // size - rank * number // size for rank in range(size)]
