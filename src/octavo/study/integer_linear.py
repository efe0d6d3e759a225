"""INT8 and INT4 linear layers, for comparison with FP8 only: this is the study's, not a part of the library's offer.

INT8: weights symmetric, one scale an output channel; activations symmetric, one scale a token, found as they come.

    codes = round(x / s),  s = max|x| / 127,  y = (codes_x @ codes_wᵀ) * s_x * s_w + bias

INT4: weights asymmetric in groups of 128 along the input, activations left in 16 bits; the weight is decoded for each
product.

    codes = round(w / s) + z in 0..15,  s = (max - min) / 15,  w ≈ (codes - z) * s

Integer products run in `torch._int_mm` on a GPU. On a CPU they are emulated by an fp32 GEMM: codes and products are
exact in fp32, and so is the sum while it stays below 2^24 (1,040 products of the largest codes); larger sums are
rounded to fp32, as the GPU's int32 sums are when they are scaled.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

GROUP = 128
_INT8_MAX, _INT4_LEVELS = 127, 15
_MIN_ROWS, _MULTIPLE = 17, 8  # what torch._int_mm asks of the rows, and of the other two sizes


def quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of x [M, K] as int8 codes [M, K] and fp32 scales [M, 1]; a row of zeros gets scale 1."""
    values = x.float()
    amax = values.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(amax > 0, amax / _INT8_MAX, torch.ones_like(amax))
    return (values / scale).round().clamp(-_INT8_MAX, _INT8_MAX).to(torch.int8), scale


def quantize_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Groups of 128 along the rows of weight [N, K]: packed codes uint8 [N, G, 64], fp16 scales and offsets [N, G, 1].

    K is padded with zeros to whole groups; the last group may be short.
    """
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % GROUP)).view(rows, -1, GROUP)
    low = padded.amin(dim=-1, keepdim=True).clamp(max=0.0)  # zero stays exactly representable
    high = padded.amax(dim=-1, keepdim=True).clamp(min=0.0)
    scale = ((high - low) / _INT4_LEVELS).clamp(min=2.0**-14).half()  # 2^-14: the smallest normal fp16
    offset = (-low / scale.float()).round().clamp(0, _INT4_LEVELS).half()
    codes = ((padded / scale.float()).round() + offset.float()).clamp(0, _INT4_LEVELS).to(torch.uint8)
    return codes[..., ::2] | (codes[..., 1::2] << 4), scale, offset


def dequantize_int4(codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, columns: int) -> torch.Tensor:
    """The fp32 weight [N, columns] of what `quantize_int4` gave."""
    unpacked = torch.stack((codes & 15, codes >> 4), dim=-1).view(*codes.shape[:-1], GROUP)
    values = (unpacked.float() - offset.float()) * scale.float()
    return values.view(codes.shape[0], -1)[:, :columns]


class Int8Linear(nn.Module):
    """A served linear layer with int8 weights and activations."""

    def __init__(self, linear: nn.Linear) -> None:
        """Quantize `linear`'s weight; its bias is kept."""
        super().__init__()
        codes, scale = quantize_int8(linear.weight.detach())
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale.t().contiguous())  # [1, N], as the product needs it
        self.register_buffer("bias", _detached(linear.bias))
        self.bias: torch.Tensor | None
        self.codes: torch.Tensor
        self.scale: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N] in x's dtype."""
        codes, scale = quantize_int8(x.reshape(-1, x.shape[-1]))
        y = int8_product(codes, self.codes) * scale * self.scale
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], -1)


class Int4Linear(nn.Module):
    """A served linear layer with int4 weights, decoded for each product; products in x's dtype."""

    def __init__(self, linear: nn.Linear) -> None:
        """Quantize `linear`'s weight; its bias is kept."""
        super().__init__()
        codes, scale, offset = quantize_int4(linear.weight.detach())
        self.columns = linear.in_features
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("offset", offset)
        self.register_buffer("bias", _detached(linear.bias))
        self.bias: torch.Tensor | None
        self.codes: torch.Tensor
        self.scale: torch.Tensor
        self.offset: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N] in x's dtype."""
        weight = dequantize_int4(self.codes, self.scale, self.offset, self.columns).to(x.dtype)
        return F.linear(x, weight, self.bias)


def int8_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Product [M, N] in fp32 of int8 codes a [M, K] and b [N, K], the second transposed."""
    if not int8_is_native(a.device):
        return a.float() @ b.float().t()
    rows, columns = a.shape
    if columns % _MULTIPLE or b.shape[0] % _MULTIPLE:
        raise ValueError(f"int8 products need sizes that are multiples of {_MULTIPLE}, found {tuple(b.shape)}")
    if rows < _MIN_ROWS:
        a = F.pad(a, (0, 0, 0, _MIN_ROWS - rows))
    return torch._int_mm(a, b.t())[:rows].float()


def int8_is_native(device: torch.device) -> bool:
    """Whether int8 products run on int8 hardware here."""
    return device.type == "cuda"


def _detached(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.detach().clone()
