"""How far a value is from its reference: the measures that tests and their bounds are written in.

Both are computed in float64, so that the measure adds no error of its own, and both refuse what would make a bound
hold by accident: shapes that broadcast, and values that are not finite.
"""

from __future__ import annotations

import torch


def _float64_pair(reference: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert reference.shape == value.shape, f"shapes differ: reference {tuple(reference.shape)}, {tuple(value.shape)}"
    pair = reference.detach().double().cpu(), value.detach().double().cpu()
    for name, tensor in zip(("reference", "value"), pair, strict=True):
        assert tensor.isfinite().all(), f"{name} has {int((~tensor.isfinite()).sum())} values that are not finite"
    return pair


def sqnr_db(reference: torch.Tensor, value: torch.Tensor) -> float:
    """Signal to quantization noise in decibels: 10 log10(sum reference² / sum (reference - value)²).

    `reference` and `value` have one shape, any dtype that converts to float64. Equal tensors give infinity; a
    reference of zeros that is not met gives minus infinity.
    """
    exact, measured = _float64_pair(reference, value)
    noise = (exact - measured).square().sum()
    if noise == 0:
        return float("inf")
    return float(10 * torch.log10(exact.square().sum() / noise))


def relative_error(reference: torch.Tensor, value: torch.Tensor) -> float:
    """Relative Frobenius error: |reference - value| / |reference|. Zero for equal tensors, infinity for a missed zero.

    `reference` and `value` have one shape, any dtype that converts to float64.
    """
    exact, measured = _float64_pair(reference, value)
    noise = (exact - measured).norm()
    return 0.0 if noise == 0 else float(noise / exact.norm())
