"""octavo.LayerNormLinear: a normalisation and an FP8 Linear, as one layer.

    n = norm(x)               LayerNorm or RMSNorm, see `octavo.modules.norm`
    y = n w^T + b             x [..., in], w [out, in], b [out], y [..., out]

With delayed or static scaling n is made as FP8 codes, in one pass over x. The layer gives the bits of
`octavo.LayerNorm` (or `octavo.RMSNorm`) and then `octavo.Linear`, gradients and delayed-scaling state included; so it
does without FP8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octavo.functional import NormLinear, norm_linear, normalise
from octavo.kernels import amax
from octavo.kernels.norm_cast import Norm
from octavo.modules.given_input import check_input
from octavo.modules.linear import OUT_DTYPES, CachedWeight, FP8LinearMixin, quantize_parameter
from octavo.modules.norm import (
    Normalization,
    check_epsilon,
    check_normalization,
    handed_on_dtype,
    norm_of,
    reset_norm,
)
from octavo.modules.options import names_its_options
from octavo.recipes import Recipe
from octavo.runtime import Call, LayerState, layer_call
from octavo.runtime.autocast import in_backward
from octavo.tensor import QuantizedTensor


class NormalisedInput(nn.Module):
    """What layers share that normalise their input first.

    Attributes:
        normalization: "LayerNorm" or "RMSNorm".
        eps: added to the variance, or to the mean of squares.
        zero_centered_gamma: the weight is kept as its distance from 1.
        layer_norm_weight, layer_norm_bias: [in] or None.
    """

    normalization: Normalization
    eps: float
    zero_centered_gamma: bool
    layer_norm_weight: nn.Parameter | None
    layer_norm_bias: nn.Parameter | None

    def add_norm(
        self,
        features: int,
        normalization: Normalization,
        eps: float,
        zero_centered: bool,
        affine: tuple[bool, bool],
        **place: Any,
    ) -> None:
        """Give the layer its normalisation; `affine`: with a weight, with a bias (which RMSNorm never has)."""
        check_normalization(normalization)
        check_epsilon(eps)
        self.normalization, self.eps, self.zero_centered_gamma = normalization, eps, zero_centered
        with_weight = affine[0]
        with_bias = affine[0] and affine[1] and normalization == "LayerNorm"
        for name, present in (("layer_norm_weight", with_weight), ("layer_norm_bias", with_bias)):
            self.register_parameter(name, nn.Parameter(torch.empty(features, **place)) if present else None)
        self.reset_norm_parameters()

    def reset_norm_parameters(self) -> None:
        """Begin at the identity."""
        reset_norm(self.layer_norm_weight, self.layer_norm_bias, self.zero_centered_gamma)

    def norm_for(self, dtype: torch.dtype) -> Norm:
        """The normalisation as functions take it."""
        return norm_of(self.normalization, self.eps, self.zero_centered_gamma, dtype)

    def normalised(self, x: Tensor) -> Tensor:
        """n in high precision."""
        return normalise(x, self.norm_for(handed_on_dtype(x)), self.layer_norm_weight, self.layer_norm_bias)

    def shown_norm(self) -> str:
        """For `extra_repr`."""
        centred = ", zero_centered_gamma=True" if self.zero_centered_gamma else ""
        return f"normalization={self.normalization}, eps={self.eps}{centred}"


class LayerNormLinear(NormalisedInput, FP8LinearMixin):
    """A normalisation and a Linear with FP8 matrix products.

    Args:
        in_features, out_features, bias, device, dtype: as `nn.Linear`, initialisation included.
        normalization: "LayerNorm" or "RMSNorm".
        eps: added to the variance, or to the mean of squares.
        zero_centered_gamma: the normalisation scales by 1 + `layer_norm_weight`, which begins at 0.
        elementwise_affine, norm_bias: the normalisation has a weight, and a bias (RMSNorm never has one).
        return_layernorm_output: the forward gives (y, n).
        recipe: FP8 with this recipe also outside of `octavo.autocast`.
    """

    beside_the_weight = ("bias", "layer_norm_weight", "layer_norm_bias")
    in_features: int
    out_features: int

    @names_its_options
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        normalization: Normalization = "LayerNorm",
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        elementwise_affine: bool = True,
        norm_bias: bool = True,
        return_layernorm_output: bool = False,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.return_layernorm_output = return_layernorm_output
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.add_norm(in_features, normalization, eps, zero_centered_gamma, (elementwise_affine, norm_bias), **place)
        add_linear(self, "", in_features, out_features, bias, **place)
        self.become_fp8(recipe)
        quantize_parameter(self)

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        self.reset_norm_parameters()
        reset_linear(self.weight, self.bias)

    def forward(self, x: Tensor, *, cached_weight: CachedWeight | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """y [..., out_features]; with `return_layernorm_output` (y, n [..., in_features]).

        Args:
            x: [..., in_features].
            cached_weight: as of `octavo.Linear`.
        """
        check_cached_weight(cached_weight)
        weight = self.matrix()
        check_input(x, weight.shape[1], self, "x")
        call = layer_call(self.delayed_state, self.recipe, self.layer_name)
        if call.recipe is None:
            n = self.normalised(x)
            y = plain_linear(n, weight, self.added_bias(), self.delayed_state, call)
            return (y, n) if self.return_layernorm_output else y
        plan = self.planned(call, weight)
        setup = NormLinear(self.norm_for(fp8_dtype(x)), plan, self.return_layernorm_output)
        operand = self.kept_operand(weight, plan, cached_weight)
        y, normed = norm_linear(
            x, self.layer_norm_weight, self.layer_norm_bias, weight, self.added_bias(), setup, operand
        )
        if not self.return_layernorm_output:
            return y
        assert normed is not None, "it was asked for"
        return y, normed

    def extra_repr(self) -> str:
        """Extents and options, and the recipe that is on without a context."""
        shown = (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None},"
            f" {self.shown_norm()}"
        )
        return shown if self.recipe is None else f"{shown}, recipe={type(self.recipe).__name__}"


def add_linear(module: nn.Module, prefix: str, num_in: int, num_out: int, bias: bool, **place: Any) -> None:
    """Give a module `<prefix>weight` [num_out, num_in] and `<prefix>bias` [num_out] or None, drawn as `nn.Linear`'s."""
    linear: Any = nn.Linear(num_in, num_out, bias, **place)
    module.register_parameter(f"{prefix}weight", linear.weight)
    module.register_parameter(f"{prefix}bias", linear.bias)


@torch.no_grad()
def reset_linear(weight: Tensor, bias: Tensor | None) -> None:
    """Draw the parameters of a Linear as `nn.Linear` does."""
    nn.init.kaiming_uniform_(weight, a=5**0.5)
    if bias is not None:
        bound = weight.shape[1] ** -0.5 if weight.shape[1] else 0.0
        nn.init.uniform_(bias, -bound, bound)


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState, call: Call) -> Tensor:
    """A linear part in high precision; its amaxes are gathered if the call says so."""
    if isinstance(weight, QuantizedTensor):
        weight = weight.dequantize()
    # A recompute in the backward has been seen before.
    if call.gather and not in_backward():
        state.input.gather(amax(x.detach().reshape(x.shape[:-1].numel(), x.shape[-1])))
        state.weight.gather(amax(weight.detach()))
    return nn.functional.linear(x, weight, bias)


def check_cached_weight(cached_weight: Any) -> None:
    """Raise ValueError unless it is a mode that is known."""
    if cached_weight not in (None, "refresh", "reuse"):
        raise ValueError(f"cached_weight is {cached_weight!r}: expected None, 'refresh' or 'reuse'")


def fp8_dtype(x: Tensor) -> torch.dtype:
    """The dtype of what an FP8 layer makes of x."""
    dtype = handed_on_dtype(x)
    if dtype not in OUT_DTYPES:
        raise ValueError(f"input has dtype {dtype}: an FP8 layer takes float32, bfloat16 or float16")
    return dtype
