"""scaled_mm: the product of two matrices of codes, scaled.

    out [M, N] = (a [M, K] @ b [N, K]^T) * scale_a * scale_b + bias

Both operands are K-major, as Hopper's FP8 units take them. Where the device multiplies FP8 the product runs in cuBLASLt
through `torch._scaled_mm`; elsewhere it is emulated: codes decoded to float32, products and sums in float32, then the
same scaling and the same single rounding of the output. Under `octavo.emulation("hopper")` sums are those of Hopper's
tensor cores, bit by bit: `scaled_mm.hopper`.

Scales by block, in the layout of `octavo.kernels.block_cast`, are told by their shape: `scaled_mm.blockwise`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from octavo.kernels.block_cast.layout import has_blocks
from octavo.kernels.launcher import Prepared
from octavo.kernels.layout import SCALE_ALIGNMENT
from octavo.kernels.library import register
from octavo.kernels.scaled_mm import blockwise
from octavo.kernels.scaled_mm.bias import with_bias
from octavo.kernels.scaled_mm.native import (
    device_reasons,
    multiplies,
    multiplies_on,
    scaled_mm_native,
    shape_reasons,
    unsupported_reasons,
)
from octavo.kernels.scaled_mm.reference import scaled_mm_emulated, scaled_mm_hopper, scaled_mm_reference

Accumulation = Literal["fast", "precise"]

# Whether products run on FP8 units, by all that decides on it.
_NATIVE = Prepared()


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulate: Accumulation = "fast",
) -> Tensor:
    """Scaled product of codes -> [M, N] of `out_dtype`.

    Args:
        a: codes [M, K], contiguous.
        b: codes [N, K], contiguous.
        scale_a: float32, [] or [M, 1], or by block [K / 128, M]; or E8M0 of MX blocks, [K / 32, M].
        scale_b: float32, [] or [N, 1], whichever scale_a is. To blocks of scale_a belong [K / 128, N], or
            for blocks of 128x128 [ceil(N / 128), K / 128 rounded up to a multiple of 4]; to MX blocks [K / 32, N].
        bias: [N], added in float32 before the output is rounded.
        out_dtype: float32, bfloat16 or float16.
        accumulate: "fast" sums all of K in the tensor core's own accumulator (about 14 significant bits on Hopper);
            "precise" promotes partial sums to float32. Emulation sums in float32 either way unless `octavo.emulation`
            says "hopper", and scales by block are always precise.
    """
    if scale_a.dim() == 2 and has_blocks(scale_a, a.shape[0]):
        return blockwise.block_scaled_mm(a, b, scale_a, scale_b, bias, out_dtype)
    if torch.compiler.is_compiling():
        if a.is_cuda and multiplies(a.device.index) and not shape_reasons(a, b):
            # Inductor knows torch's own operator and calls it without a detour.
            return scaled_mm_native(a, b, scale_a, scale_b, bias, out_dtype, accumulate)
        result: Tensor = _operator(a, b, scale_a, scale_b, bias, out_dtype, accumulate)
        return result
    return _launch(a, b, scale_a, scale_b, bias, out_dtype, accumulate)


def runs_natively(a: Tensor, b: Tensor, scale_a: Tensor | None = None) -> bool:
    """True if `scaled_mm` of these codes runs on FP8 units rather than by emulation.

    Args:
        a, b: codes [M, K] and [N, K].
        scale_a: of a, which tells products by block; None stands for one scale, or one a row.
    """
    if scale_a is not None and has_blocks(scale_a, a.shape[0]):
        return blockwise.runs_natively(a, b, scale_a)
    return a.is_cuda and multiplies_on(a.device.index) and not shape_reasons(a, b)


def _launch(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    accumulate: Accumulation,
) -> Tensor:
    if a.is_cuda:
        # A training multiplies the same few shapes again and again.
        key = (a.dtype, b.dtype, a.shape, b.shape, a.get_device())
        native = _NATIVE.get(key)
        if native is None:
            native = _NATIVE.keep(key, bool(a.numel() and b.numel() and runs_natively(a, b)))
        if native:
            # cuBLASLt reads a scale there: a view into other numbers may begin anywhere, unlike what a cast gives.
            if scale_a.data_ptr() % SCALE_ALIGNMENT:
                scale_a = scale_a.clone()
            if scale_b.data_ptr() % SCALE_ALIGNMENT:
                scale_b = scale_b.clone()
            if bias is None and scale_a.dim() == scale_b.dim() == 0:
                # What `scaled_mm_native` would do, of the commonest products without another call.
                return torch._scaled_mm(a, b.t(), scale_a, scale_b, None, None, out_dtype, accumulate == "fast")
            return scaled_mm_native(a, b, scale_a, scale_b, bias, out_dtype, accumulate)
    return scaled_mm_emulated(a, b, scale_a, scale_b, bias, out_dtype, accumulate)


def _fake(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    accumulate: str,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


_operator = register(
    "scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype, str accumulate)"
    " -> Tensor",
    _launch,
    _fake,
)

__all__ = [
    "Accumulation",
    "device_reasons",
    "runs_natively",
    "scaled_mm",
    "scaled_mm_emulated",
    "scaled_mm_hopper",
    "scaled_mm_reference",
    "unsupported_reasons",
    "with_bias",
]
