"""Rotary position embeddings (Su et al., "RoFormer", 2021).

    angle(s, 2i), angle(s, 2i + 1)  =  s * base^(-2i / R) / factor            one angle a pair of features, R of them
    (a, b)  ->  (a cos - b sin, b cos + a sin)

The first R features of a head are turned, the others stay. A pair is features i and i + R/2, or, interleaved, 2i and
2i + 1. To go beyond the length that a model was trained on: "linear" divides every angle by the factor (Chen et al.,
2023); "ntk" widens the base instead, base * factor^(R / (R - 2)), which leaves the fastest angles alone; "llama3"
divides the slow angles, leaves the fast ones, and goes from one to the other between two wavelengths. Angles, sines
and the turning itself are float32, of float64 features float64; the result has the dtype of what was turned.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

RotaryScaling = Literal["none", "linear", "ntk", "llama3"]


class Llama3Scaling(NamedTuple):
    """What "llama3" needs beside the factor: which wavelengths are fast, which slow, of which trained length."""

    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192


def rotary_frequencies(
    features: int,
    base: float = 10000.0,
    scaling: RotaryScaling = "none",
    factor: float = 1.0,
    llama3: Llama3Scaling | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """[R / 2] float32: radians a position.

    Args:
        features: R, how many features are turned; even.
        base, scaling, factor: as above.
        llama3: of scaling "llama3".
    """
    if scaling == "ntk":
        base = base * factor ** (features / (features - 2)) if features > 2 else base
    exponents = torch.arange(0, features, 2, dtype=torch.float32, device=device) / features
    frequencies = 1.0 / base**exponents
    if scaling == "linear":
        return frequencies / factor
    if scaling == "llama3":
        return _llama3(frequencies, factor, llama3 or Llama3Scaling())
    return frequencies


def _llama3(frequencies: Tensor, factor: float, bounds: Llama3Scaling) -> Tensor:
    low, high = bounds.low_frequency_factor, bounds.high_frequency_factor
    # How many turns in the length that the model was trained on: 0 at `low`, 1 at `high`.
    turns = bounds.original_length * frequencies / (2 * math.pi)
    fast = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (fast + (1 - fast) / factor)


def rotary_angles(frequencies: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """[S, R] float32: the angle of each feature of a head, at each position.

    Args:
        frequencies: [R / 2].
        positions: [S].
        interleaved: pairs are neighbours.
    """
    angles = torch.outer(positions.float(), frequencies)
    return angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)


def apply_rotary(x: Tensor, angles: Tensor, interleaved: bool = False) -> Tensor:
    """x with the first R features of each head turned, of x's dtype.

    Args:
        x: [..., D].
        angles: [..., R], broadcasts to x's leading dimensions; R <= D, even.
        interleaved: pairs are neighbours, as when the angles were made.

    Raises:
        ValueError: more angles than features.
    """
    turned = angles.shape[-1]
    if turned > x.shape[-1] or turned % 2:
        raise ValueError(
            f"rotary angles are for {turned} features, heads have {x.shape[-1]}: give an even number of at most those,"
            " RotaryPositionEmbedding(head features, rotary_percent=...)"
        )
    part = x[..., :turned]
    part = part if x.dtype is torch.float64 else part.float()
    angles = angles.to(part.dtype)
    out = (part * angles.cos() + _partners(part, interleaved) * angles.sin()).to(x.dtype)
    return out if turned == x.shape[-1] else torch.cat((out, x[..., turned:]), -1)


def _partners(x: Tensor, interleaved: bool) -> Tensor:
    """What each feature of a pair (a, b) is turned towards: (-b, a)."""
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((-b, a), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def packed_positions(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """[T] int64: the place of each token in its own sequence.

    Args:
        cu_seqlens: [B + 1], where each sequence begins, and where the last one ends.
        num_tokens: T.
    """
    token = torch.arange(num_tokens, device=cu_seqlens.device)
    return token - cu_seqlens.long()[sequence_of(cu_seqlens, token)]


def sequence_of(cu_seqlens: Tensor, token: Tensor) -> Tensor:
    """The sequence of each token; tokens behind the last one count as its."""
    found = torch.searchsorted(cu_seqlens[1:].to(token.dtype), token, right=True)
    return found.clamp(max=cu_seqlens.shape[0] - 2)
