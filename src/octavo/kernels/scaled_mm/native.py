"""scaled_mm on FP8 units, through `torch._scaled_mm` (cuBLASLt and CUTLASS)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from octavo.formats import E4M3, E5M2
from octavo.kernels.layout import ALIGNMENT
from octavo.kernels.scaled_mm.bias import with_bias

_PAIRS = {(E4M3.dtype, E4M3.dtype), (E4M3.dtype, E5M2.dtype), (E5M2.dtype, E4M3.dtype)}


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def device_reasons(device: torch.device) -> list[str]:
    """Why `device` has no FP8 products; empty if it has."""
    if device.type != "cuda":
        return [f"{device.type} has no FP8 matrix units"]
    if not torch.cuda.is_available():
        return ["no CUDA device is available"]
    major, minor = _capability(device.index or 0)
    if (major, minor) < (8, 9):
        return [f"compute capability {major}.{minor}: FP8 products need 8.9 (Ada) or later"]
    return []


@functools.cache
def multiplies_on(index: int | None) -> bool:
    """True if CUDA device `index` has FP8 products."""
    return not device_reasons(torch.device("cuda", index or 0))


def multiplies(index: int | None) -> bool:
    """`multiplies_on` for code that is being traced."""
    return multiplies_on(index)


# Dynamo runs it while it traces. (torch.compiler.assume_constant_result sets this, and imports Dynamo to do so.)
multiplies._dynamo_marked_constant = True  # type: ignore[attr-defined]


def unsupported_reasons(a: Tensor, b: Tensor) -> list[str]:
    """Why the product of codes a [M, K] and b [N, K] is emulated; empty if it runs on FP8 units."""
    return device_reasons(a.device) + shape_reasons(a, b)


def shape_reasons(a: Tensor, b: Tensor) -> list[str]:
    """Those of `unsupported_reasons` that lie in the operands."""
    if (a.dtype, b.dtype) in _PAIRS and a.shape[1] % ALIGNMENT == 0 and b.shape[0] % ALIGNMENT == 0:
        return []
    reasons = []
    if a.dtype not in (E4M3.dtype, E5M2.dtype) or b.dtype not in (E4M3.dtype, E5M2.dtype):
        reasons.append(f"formats {a.dtype} x {b.dtype}: FP8 units multiply E4M3 and E5M2")
    elif a.dtype == b.dtype == E5M2.dtype:
        reasons.append("E5M2 x E5M2: cuBLASLt has no such product, one operand must be E4M3")
    for name, extent in (("K", a.shape[1]), ("N", b.shape[0])):
        if extent % ALIGNMENT:
            reasons.append(f"{name} = {extent} is no multiple of {ALIGNMENT}")
    return reasons


def _by_row(scale: Tensor, codes: Tensor) -> Tensor:
    """[M, 1] of codes [M, K] whose scale is [] or [M, 1]."""
    return scale if scale.dim() else scale.expand(codes.shape[0], 1).contiguous()


def scaled_mm_native(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    accumulate: str,
) -> Tensor:
    """As `octavo.kernels.scaled_mm.scaled_mm`, for operands without `unsupported_reasons` and with aligned scales."""
    fast = accumulate == "fast"
    if scale_a.dim() != scale_b.dim():
        # cuBLASLt takes one scale of both operands, or one a row of both.
        scale_a, scale_b = _by_row(scale_a, a), _by_row(scale_b, b)
    if scale_b.dim() == 0:
        if bias is None:
            return torch._scaled_mm(a, b.t(), scale_a, scale_b, None, None, out_dtype, fast)
        # cuBLASLt takes a bias of the output's dtype, and none with a float32 output.
        if out_dtype != torch.float32 and bias.dtype == out_dtype:
            return torch._scaled_mm(a, b.t(), scale_a, scale_b, bias, None, out_dtype, fast)
        out = torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.float32, use_fast_accum=fast)
        return with_bias(out, bias, out_dtype)
    row, column = scale_a, scale_b.reshape(1, -1)
    if out_dtype == torch.bfloat16 and bias is None:
        return torch._scaled_mm(a, b.t(), row, column, out_dtype=out_dtype, use_fast_accum=fast)
    # Row-wise products write bf16 only. Anything else: the float32 accumulator, then scales and bias, one rounding.
    one = torch.ones((), dtype=torch.float32, device=a.device)
    out = torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32, use_fast_accum=fast) * (row * column)
    return with_bias(out, bias, out_dtype)
