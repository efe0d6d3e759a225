"""FrozenLayerNormMLP: a normalisation and an MLP for serving, with E4M3 codes for both weights.

    n = norm(x)
    z = (codes of n) (codes of w1)^T * scales + b1
    y = (codes of f(z)) (codes of w2)^T * scales + b2

With static scales n and f(z) are made as codes. The bits are those of `octavo.LayerNormMLP` with the same scales. State
dict: `layer_norm_weight`, `layer_norm_bias`, and `fc1_weight`, `fc1_weight_scale`, `fc1_bias`, `fc1_input_scale` (where
activations are static), and as many of fc2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.functional import NormMLP, Parameters, activate, norm_mlp
from octavo.functional.shared_input import as_rows
from octavo.inference.frozen_layer import FrozenLayer, Product
from octavo.inference.frozen_layernorm_linear import handed_out, hold_norm
from octavo.inference.scheme import Scheme
from octavo.modules.given_input import check_input
from octavo.modules.layernorm_linear import NormalisedInput, fp8_dtype
from octavo.modules.layernorm_mlp import ACTIVATIONS, LayerNormMLP

_BUFFERS = Product.prefixed("fc1_"), Product.prefixed("fc2_")


class FrozenLayerNormMLP(FrozenLayer, NormalisedInput):
    """A normalisation, two FP8 weights, FP8 activations, no training.

    Args:
        layer: whose normalisation and activation it has, an `octavo.LayerNormMLP`.
        weights: high-precision values [N, K] and [K', F].
        biases: of either, or None.
        scheme: granularities, and whether activations are static.
        input_scales: of n and of f(z), for a static scheme.
    """

    counted_class = LayerNormMLP

    def __init__(
        self,
        layer: Any,
        weights: tuple[Tensor, Tensor],
        biases: tuple[Tensor | None, Tensor | None],
        scheme: Scheme,
        input_scales: tuple[float | None, float | None] = (None, None),
    ) -> None:
        super().__init__(scheme, _BUFFERS)
        self.hidden_size, self.ffn_hidden_size = layer.hidden_size, layer.ffn_hidden_size
        self.activation: str = layer.activation
        self.return_layernorm_output: bool = layer.return_layernorm_output
        hold_norm(self, layer)
        for names, weight, bias, scale in zip(_BUFFERS, weights, biases, input_scales, strict=True):
            self.hold(names, weight, bias, scale)

    def counted_parts(self) -> tuple[str, ...]:
        """Those of its two products."""
        return ".fc1", ".fc2"

    def forward(self, x: Tensor, *, cached_weight: Any = None) -> Tensor | tuple[Tensor, Tensor]:
        """y [..., hidden_size]; with `return_layernorm_output` (y, n [..., hidden_size]).

        Args:
            x: [..., hidden_size].
            cached_weight: as of `octavo.LayerNormMLP`, whose place the layer takes; its codes are always kept.

        Raises:
            ValueError: the last dimension is not hidden_size, or the dtype none of float32, bfloat16 and float16.
        """
        check_input(x, self.hidden_size, self, "x")
        dtype, kind = fp8_dtype(x), ACTIVATIONS[self.activation]
        with torch.no_grad():
            n: Tensor | None
            if self.is_blockwise:
                n = self.normalised(x)
                a = activate(self.blockwise(0, as_rows(n), dtype, ".fc1"), kind)
                y = self.blockwise(1, a, dtype, ".fc2").reshape(*x.shape[:-1], self.hidden_size)
            else:
                plans = self.plan(0, ".fc1"), self.plan(1, ".fc2")
                setup = NormMLP(self.norm_for(dtype), kind, *plans, self.return_layernorm_output)
                y, n = norm_mlp(x, self._parameters_of(), setup, (self.operand(0), self.operand(1)))
        return handed_out(x, y, n if self.return_layernorm_output else None)

    def _parameters_of(self) -> Parameters:
        norm = self.layer_norm_weight, self.layer_norm_bias
        return Parameters(*norm, self.codes(0), self.bias_of(0), self.codes(1), self.bias_of(1))

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size},"
            f" bias={self.bias_of(0) is not None}, activation={self.activation}, {self.shown_norm()},"
            f" scheme={self.scheme.name}"
        )
