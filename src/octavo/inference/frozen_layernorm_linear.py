"""FrozenLayerNormLinear: a normalisation and a Linear for serving, with E4M3 codes for the weight.

    n = norm(x)
    y = (codes of n) (codes of w)^T * scales + b

With static scales n is made as codes, in one pass over x. The bits are those of `octavo.LayerNormLinear` with the same
scales. State dict: `layer_norm_weight`, `layer_norm_bias`, and what `octavo.inference.FrozenLinear` has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.functional import NormLinear, norm_linear
from octavo.functional.shared_input import as_rows
from octavo.inference.frozen_layer import FrozenLayer, Product
from octavo.inference.scheme import Scheme
from octavo.modules.fixed_product import refusing_gradient
from octavo.modules.given_input import check_input
from octavo.modules.layernorm_linear import NormalisedInput, fp8_dtype

_BUFFERS = Product.prefixed("")


class FrozenLayerNormLinear(FrozenLayer, NormalisedInput):
    """A normalisation, an FP8 weight, FP8 activations, no training.

    Args:
        layer: whose normalisation it has, an `octavo.LayerNormLinear`.
        weight: high-precision values [N, K].
        bias: [N] or None.
        scheme: granularities, and whether activations are static.
        input_scale: value = code * input_scale of n, for a static scheme.
    """

    def __init__(
        self, layer: Any, weight: Tensor, bias: Tensor | None, scheme: Scheme, input_scale: float | None = None
    ) -> None:
        super().__init__(scheme, (_BUFFERS,))
        self.out_features, self.in_features = weight.shape
        self.return_layernorm_output: bool = layer.return_layernorm_output
        hold_norm(self, layer)
        self.hold(_BUFFERS, weight, bias, input_scale)

    def forward(self, x: Tensor, *, cached_weight: Any = None) -> Tensor | tuple[Tensor, Tensor]:
        """y [..., N]; with `return_layernorm_output` (y, n [..., K]).

        Args:
            x: [..., K].
            cached_weight: as of `octavo.LayerNormLinear`, whose place the layer takes; its codes are always kept.

        Raises:
            ValueError: the last dimension is not K, or the dtype none of float32, bfloat16 and float16.
        """
        check_input(x, self.in_features, self, "x")
        dtype = fp8_dtype(x)
        with torch.no_grad():
            n: Tensor | None
            if self.is_blockwise:
                n = self.normalised(x)
                y = self.blockwise(0, as_rows(n), dtype).reshape(*x.shape[:-1], self.out_features)
            else:
                setup = NormLinear(self.norm_for(dtype), self.plan(0), self.return_layernorm_output)
                norm = self.layer_norm_weight, self.layer_norm_bias
                y, n = norm_linear(x, *norm, self.codes(0), self.bias_of(0), setup, self.operand(0))
        return handed_out(x, y, n if self.return_layernorm_output else None)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias_of(0) is not None},"
            f" {self.shown_norm()}, scheme={self.scheme.name}"
        )


def hold_norm(frozen: Any, layer: NormalisedInput) -> None:
    """Give a frozen layer the normalisation of another one."""
    frozen.normalization, frozen.eps = layer.normalization, layer.eps
    frozen.zero_centered_gamma = layer.zero_centered_gamma
    frozen.hold_copy("layer_norm_weight", layer.layer_norm_weight)
    frozen.hold_copy("layer_norm_bias", layer.layer_norm_bias)


def handed_out(x: Tensor, y: Tensor, n: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    """y, or (y, n); none of which passes a gradient."""
    y = refusing_gradient(x, y)
    return y if n is None else (y, refusing_gradient(x, n))
