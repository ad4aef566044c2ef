"""Rotary position embeddings: the angle by which each pair of dimensions is turned at each position.

RoPE: Su et al., RoFormer, 2021. A scaling is a value (one of the dataclasses below) that yields two tables. All tables
are functions of the position alone, as paging, prefix sharing and recomputation require. In two of the scalings the
angles originally depend on the length of the sequence; their docstrings say how that is resolved.

Frequencies are computed in float32 and in the same order as in `transformers`, so that both agree to the bit.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from executor.errors import CheckpointError


class Rope(Protocol):
    """One scaling of the rotary embedding."""

    @property
    def max_context_len(self) -> int:
        """Returns the maximum context length that this scaling is meant for."""
        ...

    def tables(self, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
        """Returns cos[num_positions, head_dim / 2] and sin of the same shape, float32, attention factor included.

        Raises CheckpointError for angles that are not finite.
        """
        ...


@dataclass(frozen=True, slots=True)
class DefaultRope:
    """No scaling: pair i turns by theta ** (-2 i / head_dim) per token."""

    theta: float
    max_context_len: int

    def tables(self, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
        return _tables(_frequencies(self.theta, head_dim), num_positions)


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Position interpolation (Chen et al., 2023): positions are divided by `factor`."""

    theta: float
    factor: float
    max_position_embeddings: int

    @property
    def max_context_len(self) -> int:
        return int(self.max_position_embeddings * self.factor)

    def tables(self, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
        return _tables(_frequencies(self.theta, head_dim) / self.factor, num_positions)


@dataclass(frozen=True, slots=True)
class DynamicNtkRope:
    """NTK-aware scaling whose base grows with the sequence.

    A token at position p is turned as in a sequence that ends with it: unscaled below `max_position_embeddings`, and
    with the base for p + 1 tokens from there on. Token-by-token generation in `transformers` gives the same angles.
    For prompts longer than `max_position_embeddings` the angles differ: `transformers` derives those of all tokens from
    the number of tokens that are computed in one pass.
    """

    theta: float
    factor: float
    max_position_embeddings: int

    @property
    def max_context_len(self) -> int:
        return int(self.max_position_embeddings * self.factor)

    def tables(self, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
        lengths = torch.arange(1, num_positions + 1).clamp(min=self.max_position_embeddings)
        growth = self.factor * lengths / self.max_position_embeddings - (self.factor - 1)
        bases = self.theta * growth ** (head_dim / (head_dim - 2))
        return _tables(1.0 / bases.unsqueeze(1) ** _exponents(head_dim), num_positions)


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1: frequencies of long wavelengths are divided by `factor`, short ones kept, those between blended."""

    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    max_context_len: int

    def tables(self, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
        frequencies = _frequencies(self.theta, head_dim)
        wavelengths = 2 * math.pi / frequencies
        turns = self.original_max_position_embeddings / wavelengths
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        slowed = frequencies / self.factor
        scaled = torch.where(
            wavelengths > self.original_max_position_embeddings / self.low_freq_factor, slowed, frequencies
        )
        between = (turns >= self.low_freq_factor) & (turns <= self.high_freq_factor)
        blended = (1 - blend) * frequencies / self.factor + blend * frequencies
        return _tables(torch.where(between, blended, scaled), num_positions)


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN (Peng et al., 2023): fast pairs are kept, slow pairs interpolated, with a linear ramp between them."""

    theta: float
    factor: float
    original_max_position_embeddings: int
    max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @property
    def max_context_len(self) -> int:
        return max(self.max_position_embeddings, int(self.original_max_position_embeddings * self.factor))

    def tables(self, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
        periods = self.theta ** _exponents(head_dim)
        extrapolated = 1.0 / periods
        interpolated = 1.0 / (self.factor * periods)
        keep = 1 - self._ramp(head_dim)
        return _tables(interpolated * (1 - keep) + extrapolated * keep, num_positions, self.attention_factor)

    def _ramp(self, head_dim: int) -> Tensor:
        """Returns 0 for pairs with more than beta_fast turns in the original context, 1 for fewer than beta_slow."""
        low, high = self._pair_turning(self.beta_fast, head_dim), self._pair_turning(self.beta_slow, head_dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low if high != low else 0.001
        return ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)

    def _pair_turning(self, num_turns: float, head_dim: int) -> float:
        """Returns the (fractional) pair that turns `num_turns` times over the original context."""
        wavelength_ratio = self.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return head_dim * math.log(wavelength_ratio) / (2 * math.log(self.theta))


@dataclass(frozen=True, slots=True)
class LongRope:
    """LongRoPE (Ding et al., 2024): one divisor for each pair, with a set for short contexts and a set for long ones.

    The set must not change within a sequence: an executor whose max_model_len is within the original context uses the
    short set, all others the long set.
    """

    theta: float
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    max_context_len: int
    attention_factor: float

    def tables(self, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
        is_long = num_positions > self.original_max_position_embeddings
        divisors = torch.tensor(self.long_factor if is_long else self.short_factor, dtype=torch.float32)
        frequencies = 1.0 / (divisors * self.theta ** _exponents(head_dim))
        return _tables(frequencies, num_positions, self.attention_factor)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Returns YaRN's temperature on the attention logits, as a factor of cos and sin."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope_attention_factor(factor: float, original_max_position_embeddings: int) -> float:
    return math.sqrt(1 + math.log(factor) / math.log(original_max_position_embeddings)) if factor > 1 else 1.0


def _exponents(head_dim: int) -> Tensor:
    """Returns 2 i / head_dim for each pair i."""
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim


def _frequencies(theta: float, head_dim: int) -> Tensor:
    return 1.0 / theta ** _exponents(head_dim)


def _tables(frequencies: Tensor, num_positions: int, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns cos and sin for frequencies[head_dim / 2], or for [num_positions, head_dim / 2] where they vary.

    Raises CheckpointError if an angle overflows, because of an extreme base or factor.
    """
    angles = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1) * frequencies
    if not torch.isfinite(angles).all():
        raise CheckpointError("config.json: the rotary embedding has angles that are not finite (rope_theta, factor)")
    return angles.cos() * factor, angles.sin() * factor
