"""`scaled_mm` for people: QuantizedTensors, or plain float8 tensors with their scales, multiplied as `torch.mm`."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.formats import format_of
from octavo.kernels import Accumulation, cast_transpose, pad_matrix, pad_row_scale
from octavo.kernels import scaled_mm as scaled_mm_kernel
from octavo.kernels.scaled_mm import with_bias
from octavo.scaling import COLUMN, ROW, TENSOR
from octavo.tensor.quantized_tensor import QuantizedTensor

_HIGH = (torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out_scale: Tensor | None = None,
    accumulate: Accumulation = "fast",
) -> Tensor | tuple[Tensor, Tensor]:
    """a [M, K] @ b [K, N] -> [M, N]; value = code * scale for each operand. No gradient passes.

    Any extents (padding happens inside) and any strides. One scale a tensor, or a by row with b by column; finer
    granularities are decoded and multiplied in float32.

    Args:
        a, b: QuantizedTensors, or float8 tensors with `scale_a`, `scale_b` (float32: [], or [M, 1] and [1, N]).
        bias: [N], added in float32 before the output is rounded.
        out_dtype: float32, bfloat16, float16; or an FP8 dtype, which needs `out_scale`.
        out_scale: [], value = code * out_scale of the FP8 output.
        accumulate: "fast" or "precise", see `octavo.kernels.scaled_mm`.

    Returns:
        the product; with an FP8 out_dtype (codes, amax of the values before the cast).

    Raises:
        ValueError: shapes, scales or dtypes do not fit.
    """
    if accumulate not in ("fast", "precise"):
        raise ValueError(f"accumulate is {accumulate!r}: expected 'fast' or 'precise'")
    if out_dtype not in _HIGH:
        return _scaled_mm_to_fp8(a, b, scale_a, scale_b, bias, out_dtype, out_scale, accumulate)
    if out_scale is not None:
        raise ValueError(f"out_scale belongs to an FP8 out_dtype, found {out_dtype}: leave it out")
    qa, qb = _quantized(a, scale_a, "a"), _quantized(b, scale_b, "b")
    _check_shapes(qa, qb, bias)
    rows, columns = qa.shape[0], qb.shape[1]
    if (qa.granularity, qb.granularity) not in ((TENSOR, TENSOR), (ROW, COLUMN)):
        out = qa.dequantize(torch.float32) @ qb.dequantize(torch.float32)
        return with_bias(out, bias, out_dtype)
    padded_bias = bias
    codes_a, codes_b = _padded(qa.codes), _padded(qb.codes.t())
    if bias is not None and codes_b.shape[0] != columns:
        padded_bias = torch.nn.functional.pad(bias, (0, codes_b.shape[0] - columns))
    scale_b = qb.scale if qb.granularity is TENSOR else pad_row_scale(qb.scale.reshape(-1, 1))
    out = scaled_mm_kernel(codes_a, codes_b, pad_row_scale(qa.scale), scale_b, padded_bias, out_dtype, accumulate)
    return out[:rows, :columns].contiguous()


def _scaled_mm_to_fp8(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    out_scale: Tensor | None,
    accumulate: Accumulation,
) -> tuple[Tensor, Tensor]:
    """Product in float32, then one cast: the amax of what was cast comes with it."""
    format = format_of(out_dtype)
    if out_scale is None:
        raise ValueError(f"out_dtype {out_dtype} needs out_scale, with value = code * out_scale")
    high = scaled_mm(a, b, scale_a, scale_b, bias, torch.float32, None, accumulate)
    assert isinstance(high, Tensor), "a float32 product is one tensor"
    largest = torch.zeros((), dtype=torch.float32, device=high.device)
    codes = cast_transpose(high, format, out_scale.float().reshape(()), None, gathered=largest).codes
    assert codes is not None, "the row-wise layout was asked for"
    return codes[: high.shape[0], : high.shape[1]].contiguous(), largest


def _padded(codes: Tensor) -> Tensor:
    return pad_matrix(codes.contiguous().view(torch.uint8)).view(codes.dtype)


def _quantized(x: Tensor, scale: Tensor | None, name: str) -> QuantizedTensor:
    if isinstance(x, QuantizedTensor):
        if scale is not None:
            raise ValueError(f"{name} is a QuantizedTensor and holds its scale: leave scale_{name} out")
        return x
    if x.dtype.itemsize != 1 or not x.is_floating_point():
        raise ValueError(
            f"{name} is a plain {x.dtype} tensor: quantize it first, or give float8 codes with their scale"
        )
    if scale is None:
        raise ValueError(f"{name} is a plain {x.dtype} tensor: give scale_{name}, with value = code * scale")
    if scale.numel() == 1:
        return QuantizedTensor(x, scale.float().reshape(()), TENSOR, torch.float32)
    expected, granularity = ((x.shape[0], 1), ROW) if name == "a" else ((1, x.shape[-1]), COLUMN)
    if tuple(scale.shape) != expected:
        raise ValueError(f"scale_{name} has shape {tuple(scale.shape)}: expected [] or {list(expected)}")
    return QuantizedTensor(x, scale.float(), granularity, torch.float32)


def _check_shapes(a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None) -> None:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        turned = a.dim() == b.dim() == 2 and a.shape[1] == b.shape[1]
        raise ValueError(
            f"scaled_mm multiplies [M, K] by [K, N], found {tuple(a.shape)} and {tuple(b.shape)}"
            f"{': give b.t()' if turned else ''}"
        )
    if bias is not None and tuple(bias.shape) != (b.shape[1],):
        raise ValueError(f"bias has shape {tuple(bias.shape)}: expected [{b.shape[1]}]")
