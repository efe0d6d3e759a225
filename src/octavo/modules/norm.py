"""octavo.LayerNorm and octavo.RMSNorm: normalised rows, computed in float32 and rounded once.

    y = (x - mean) / sqrt(variance + eps) * weight + bias         RMSNorm: x / sqrt(mean of squares + eps) * weight

With `zero_centered_gamma` the weight is kept as its distance from 1: weight decay then pulls towards 1, and bf16 keeps
more of what a training changes. These layers hold nothing in FP8; `LayerNormLinear` and `LayerNormMLP` give their bits.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from octavo.functional import normalise
from octavo.kernels.norm_cast import Norm

Normalization = Literal["LayerNorm", "RMSNorm"]
_KINDS = {"LayerNorm": "layer", "RMSNorm": "rms"}


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` with an optional zero-centred weight.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as `nn.LayerNorm`, initialisation included.
        zero_centered_gamma: the layer scales by 1 + weight; the weight begins at 0.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_gamma: bool = False,
    ) -> None:
        self.zero_centered_gamma = zero_centered_gamma
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        check_epsilon(eps)

    def reset_parameters(self) -> None:
        """Begin at the identity."""
        if self.elementwise_affine:
            reset_norm(self.weight, self.bias, self.zero_centered_gamma)

    def forward(self, input: Tensor) -> Tensor:
        """Normalised input, of its shape -> its dtype, or that of `torch.autocast` where it is on.

        Args:
            input: [..., *normalized_shape], any floating dtype.
        """
        return _over_shape(self, input, "LayerNorm", self.bias)

    def extra_repr(self) -> str:
        """As before, and the weight's meaning where it is not the usual one."""
        return _shown(super().extra_repr(), self.zero_centered_gamma)


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` with an optional zero-centred weight; `eps` is a number, 1e-5 by default.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as `nn.RMSNorm`, initialisation included.
        zero_centered_gamma: the layer scales by 1 + weight; the weight begins at 0.
    """

    eps: float

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_gamma: bool = False,
    ) -> None:
        self.zero_centered_gamma = zero_centered_gamma
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        check_epsilon(eps)

    def reset_parameters(self) -> None:
        """Begin at the identity."""
        if self.elementwise_affine:
            reset_norm(self.weight, None, self.zero_centered_gamma)

    def forward(self, x: Tensor) -> Tensor:
        """Normalised x, of its shape -> its dtype, or that of `torch.autocast` where it is on.

        Args:
            x: [..., *normalized_shape], any floating dtype.
        """
        return _over_shape(self, x, "RMSNorm", None)

    def extra_repr(self) -> str:
        """As before, and the weight's meaning where it is not the usual one."""
        return _shown(super().extra_repr(), self.zero_centered_gamma)


def norm_of(normalization: str, eps: float, zero_centered: bool, dtype: torch.dtype) -> Norm:
    """The normalisation as the kernels take it, whose result is handed on in `dtype`."""
    return Norm(_KINDS[normalization], float(eps).hex(), zero_centered, dtype)


def check_normalization(normalization: str) -> None:
    """Raise ValueError unless it is known."""
    if normalization not in _KINDS:
        raise ValueError(f"normalization is {normalization!r}: expected 'LayerNorm' or 'RMSNorm'")


def check_epsilon(eps: Any) -> None:
    """Raise ValueError unless it is a number that may be added to a variance."""
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < float("inf"):
        raise ValueError(f"eps is {eps!r}: it must be a number, 0 or positive, such as 1e-5")


def handed_on_dtype(x: Tensor) -> torch.dtype:
    """The dtype of what a layer makes of x: that of `torch.autocast` where it is on, else x's."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


@torch.no_grad()
def reset_norm(weight: Tensor | None, bias: Tensor | None, zero_centered: bool) -> None:
    """Fill the parameters of a normalisation with those of the identity."""
    if weight is not None:
        weight.fill_(0.0 if zero_centered else 1.0)
    if bias is not None:
        bias.zero_()


def _over_shape(layer: LayerNorm | RMSNorm, x: Tensor, normalization: str, bias: Tensor | None) -> Tensor:
    shape = tuple(layer.normalized_shape)
    if not isinstance(x, Tensor):
        raise TypeError(f"{normalization}: input is a {type(x).__name__}: expected a tensor [..., {shape[-1]}]")
    if tuple(x.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"input has shape {tuple(x.shape)}: its last dimensions must be normalized_shape = {list(shape)}"
        )
    if not x.is_floating_point():
        raise ValueError(
            f"{normalization}: input has dtype {x.dtype} and shape {tuple(x.shape)}: a normalisation takes a floating"
            " dtype; convert it first, such as x.float()"
        )
    norm = norm_of(normalization, layer.eps, layer.zero_centered_gamma, handed_on_dtype(x))
    weight: Tensor | None = layer.weight
    if len(shape) == 1:
        return normalise(x, norm, weight, bias)
    flat = [None if p is None else p.reshape(-1) for p in (weight, bias)]
    return normalise(x.flatten(-len(shape)), norm, *flat).reshape(x.shape)


def _shown(shown: str, zero_centered: bool) -> str:
    return f"{shown}, zero_centered_gamma=True" if zero_centered else shown
