"""FrozenLinear: a Linear for serving, with E4M3 codes for its weight.

    y = (codes of x) (codes of w)^T * scales + b

State dict: `weight` (float8 codes [N, K]), `weight_scale` (float32, E8M0 codes for MX), `bias`, and `input_scale`
(float32 []) where activations are static; value = code * scale. All else is as of `FrozenLayer`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octavo.functional.products import unpadded
from octavo.functional.shared_input import as_rows, quantize_input
from octavo.inference.frozen_layer import FrozenLayer, Product
from octavo.inference.scheme import Scheme
from octavo.kernels import padded, runs_natively, scaled_mm
from octavo.modules.fixed_product import FixedProduct, LayerProduct, refusing_gradient
from octavo.modules.given_input import check_input

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BUFFERS = Product.prefixed("")


class FrozenLinear(FrozenLayer, FixedProduct):
    """FP8 weight, FP8 activations, no training.

    Args:
        weight: high-precision values [N, K].
        bias: [N] or None.
        scheme: granularities, and whether activations are static.
        input_scale: value = code * input_scale of the activations, for a static scheme.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    input_scale: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, scheme: Scheme, input_scale: float | None = None) -> None:
        super().__init__(scheme, (_BUFFERS,))
        self.out_features, self.in_features = weight.shape
        self.hold(_BUFFERS, weight, bias, input_scale)

    @property
    def is_native(self) -> bool:
        """True if its product runs on FP8 units here."""
        codes, _ = self.operand(0).row_wise
        return not self.is_blockwise and runs_natively(codes, codes)

    @property
    def is_plain(self) -> bool:
        """As `FixedProduct.is_plain`; a product by blocks is emulated, which others do not do for it."""
        return type(self).forward is FrozenLinear.forward and not self.is_blockwise

    def forward(self, input: Tensor, *, cached_weight: Any = None) -> Tensor:
        """y [..., N] of x [..., K], in x's dtype, or in that of torch.autocast.

        Args:
            input: [..., K].
            cached_weight: as of `octavo.Linear`, whose place the layer takes; its codes are always kept.

        Raises:
            ValueError: the last dimension is not K, or the dtype none of float32, bfloat16 and float16.
        """
        dtype = self._checked_dtype(input)
        with torch.no_grad():
            out = self.blockwise(0, as_rows(input), dtype) if self.is_blockwise else self._scaled(input, dtype)
            out = out.reshape(*input.shape[:-1], self.out_features)
        return refusing_gradient(input, out)

    def _checked_dtype(self, input: Tensor) -> torch.dtype:
        """The dtype of the output, of an input that fits."""
        check_input(input, self.in_features, self)
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        if dtype not in _DTYPES:
            raise ValueError(f"input has dtype {dtype}: a frozen layer takes float32, bfloat16 or float16")
        return dtype

    def _scaled(self, input: Tensor, dtype: torch.dtype) -> Tensor:
        """One scale a tensor, or one a row of each; codes that another layer made of this input are taken."""
        codes, scale = quantize_input(input, self.plan(0), input.dtype, False).row_wise
        weight, weight_scale = self.operand(0).row_wise
        bias = self.bias
        if bias is not None and padded(self.out_features) != self.out_features:
            bias = nn.functional.pad(bias, (0, padded(self.out_features) - self.out_features))
        if not torch.compiler.is_compiling():
            self.count(self.shown_name, "fp8" if runs_natively(codes, weight, scale) else "fp8 emulated")
        out = scaled_mm(codes, weight, scale, weight_scale, bias, dtype, "fast")
        return unpadded(out, input.shape[:-1].numel(), self.out_features, torch.compiler.is_compiling())

    def product(self, dtype: torch.dtype) -> LayerProduct | None:
        """As `FixedProduct.product`; a bias that is wider or narrower than the output only the layer itself adds."""
        if self.bias is not None and self.bias.dtype != dtype:
            return None
        return LayerProduct(self.plan(0), self.codes(0), self.bias, self.operand(0))

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None},"
            f" scheme={self.scheme.name}"
        )
