"""scaled_mm in plain PyTorch: the emulation, and the definition that native products are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.formats import decode
from octavo.kernels.emulation import current_emulation
from octavo.kernels.scaled_mm.bias import with_bias
from octavo.kernels.scaled_mm.hopper import hopper_sum


def scaled_mm_reference(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulate: str = "fast",
) -> Tensor:
    """As `octavo.kernels.scaled_mm.scaled_mm`; any device. `accumulate` changes nothing here: sums are float32."""
    # 1. Values of the codes, exact.  [M, K], [N, K]
    a32, b32 = decode(a), decode(b)
    # 2. Products and sums, in float32 also where torch.autocast is on.  [M, K] @ [K, N] -> [M, N]
    with torch.autocast(a.device.type, enabled=False):
        accumulator = a32 @ b32.t()
    # 3. Scales: one factor, or one a row and one a column.
    scaled = accumulator * (scale_a * scale_b.reshape(1, -1) if scale_b.dim() else scale_a * scale_b)
    # 4. Bias in float32, one rounding.
    return with_bias(scaled, bias, out_dtype)


def scaled_mm_hopper(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulate: str = "fast",
) -> Tensor:
    """As `octavo.kernels.scaled_mm.scaled_mm`, with the sums of Hopper's tensor cores; any device, any formats."""
    # 1. and 2. Exact products, summed in the tensor core's register.  [M, K] @ [K, N] -> [M, N]
    accumulator = hopper_sum(a, b, promoted=accumulate != "fast")
    # 3. Scales: one factor; or by row, that of b before that of a, each product rounded, as cuBLASLt has them.
    by_row = scale_a.dim() or scale_b.dim()
    scaled = accumulator * scale_b.reshape(1, -1) * scale_a if by_row else accumulator * (scale_a * scale_b)
    # 4. Bias in float32, one rounding.
    return with_bias(scaled, bias, out_dtype)


def scaled_mm_emulated(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulate: str = "fast",
) -> Tensor:
    """As `octavo.kernels.scaled_mm.scaled_mm`, summed as `octavo.emulation` says in this thread."""
    emulated = scaled_mm_hopper if current_emulation() == "hopper" else scaled_mm_reference
    return emulated(a, b, scale_a, scale_b, bias, out_dtype, accumulate)
