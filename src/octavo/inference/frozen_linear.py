"""FrozenLinear: a Linear for serving, with E4M3 codes for its weight.

    y = (codes of x) (codes of w)^T * scales + b

State dict: `weight` (float8 codes [N, K]), `weight_scale` (float32, E8M0 codes for MX), `bias`, and `input_scale`
(float32 []) where activations are static; value = code * scale. No gradient passes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.formats import E4M3
from octavo.inference.scheme import Scheme
from octavo.kernels import amax, cast_transpose, pad_matrix, pad_row_scale, padded, runs_natively
from octavo.kernels import scale_from_amax as scale_rule
from octavo.kernels import scaled_mm as product
from octavo.scaling import TENSOR, scale_from_multiplier
from octavo.tensor import QuantizedTensor, quantize


class FrozenLinear(nn.Module):
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
        super().__init__()
        if scheme.static and not (input_scale is not None and input_scale > 0):
            raise ValueError(
                f"scheme {scheme.name!r} needs a positive input_scale, found {input_scale}: calibrate the model first"
            )
        self.scheme = scheme
        self.out_features, self.in_features = weight.shape
        q = quantize(weight, E4M3, scheme.weight, power_of_two=scheme.power_of_two)
        self.register_buffer("weight", q.codes)
        self.register_buffer("weight_scale", q.scale)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        scale = torch.tensor(input_scale, dtype=torch.float32, device=weight.device) if scheme.static else None
        self.register_buffer("input_scale", scale)

    @property
    def is_native(self) -> bool:
        """True if its product runs on FP8 units here."""
        codes = self._padded_weight()
        return not self._is_blockwise and runs_natively(codes, codes)

    @property
    def _is_blockwise(self) -> bool:
        return self.scheme.weight.columns not in (None,)

    @torch.no_grad()
    def forward(self, input: Tensor) -> Tensor:
        """y [..., N] of x [..., K], in x's dtype, or in that of torch.autocast."""
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        rows = input.reshape(-1, self.in_features)
        out = self._blockwise(rows, dtype) if self._is_blockwise else self._scaled(rows, dtype)
        return out.reshape(*input.shape[:-1], self.out_features)

    def _scaled(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """One scale a tensor, or one a row of each."""
        granularity = self.scheme.activation
        if self.input_scale is not None:
            scale, multiplier = self.input_scale, scale_from_multiplier(self.input_scale)
        else:
            multiplier, scale = scale_rule(amax(x, granularity), E4M3, 0.0, self.scheme.power_of_two)
        codes = cast_transpose(x, E4M3, multiplier, None).codes
        assert codes is not None, "the row-wise layout was asked for"
        bias = self.bias
        if bias is not None and padded(self.out_features) != self.out_features:
            bias = nn.functional.pad(bias, (0, padded(self.out_features) - self.out_features))
        weight_scale = pad_row_scale(self.weight_scale)
        scale = scale if granularity is TENSOR else pad_row_scale(scale)
        out = product(codes, self._padded_weight(), scale, weight_scale, bias, dtype, "fast")
        return out[: x.shape[0], : self.out_features]

    def _blockwise(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Emulated: values of both operands, exact in bf16 since scales are powers of two, multiplied as such."""
        scheme = self.scheme
        q = quantize(x, E4M3, scheme.activation, power_of_two=scheme.power_of_two)
        inner = torch.float32 if x.device.type == "cpu" else torch.bfloat16
        w = QuantizedTensor(self.weight, self.weight_scale, scheme.weight, inner).dequantize()
        out = nn.functional.linear(q.dequantize(inner), w).float()
        return (out if self.bias is None else out + self.bias.float()).to(dtype)

    def _padded_weight(self) -> Tensor:
        return pad_matrix(self.weight.view(torch.uint8)).view(self.weight.dtype)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"in_features={self.in_features}, out_features={self.out_features}, scheme={self.scheme.name}"
