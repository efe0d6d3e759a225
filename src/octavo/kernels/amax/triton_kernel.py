"""amax on a GPU: one read, a maximum over bits, one atomic a block.

The bits of a non-negative float32 order as the integers they are, so magnitudes are compared as int32: subnormals keep
their order whatever the flushing mode, and everything from the bits of inf upward is not finite.

The matrix is seen as [kept, reduced]; each index of `kept` has a result of its own (of a whole tensor, none has).
Blocks of one result meet in an atomic maximum on memory that starts at zero; one block that covers `reduced` writes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.scaling import COLUMN, TENSOR, Granularity

# Elements of a block: 32 a thread, four 16-byte loads of bf16 in flight.
_BLOCK = 8192
_WARPS = 8
# Results of a block whose reduced dimension is not the contiguous one: 256 bytes of bf16 a row.
_BLOCK_KEPT = 128


@triton.jit
def finite_magnitude_bits(x):
    """Bits of |x| as int32 (x float32, any shape); 0 where x is inf or NaN."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits < 0x7F800000, bits, 0)


@triton.jit
def amax_kernel(
    x,
    out,
    kept,
    reduced,
    stride_kept,
    stride_reduced,
    KEEP: tl.constexpr,
    ATOMIC: tl.constexpr,
    BLOCK_KEPT: tl.constexpr,
    BLOCK_REDUCED: tl.constexpr,
):
    """Largest finite magnitude of one block [BLOCK_KEPT, BLOCK_REDUCED] of x [kept, reduced]."""
    # 1. Which block; 64 bits, since an offset can exceed 2^31.
    tiles_reduced = tl.cdiv(reduced, BLOCK_REDUCED)
    index = (tl.program_id(0) // tiles_reduced).to(tl.int64) * BLOCK_KEPT + tl.arange(0, BLOCK_KEPT)
    along = (tl.program_id(0) % tiles_reduced).to(tl.int64) * BLOCK_REDUCED + tl.arange(0, BLOCK_REDUCED)
    inside = (index < kept)[:, None] & (along < reduced)[None, :]
    offsets = index[:, None] * stride_kept + along[None, :] * stride_reduced
    # 2. The maximum within the block, and among blocks.
    bits = finite_magnitude_bits(tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32))
    if KEEP:
        largest = tl.max(bits, axis=1).to(tl.float32, bitcast=True)
        if ATOMIC:
            tl.atomic_max(out + index, largest, mask=index < kept, sem="relaxed")
        else:
            tl.store(out + index, largest, mask=index < kept)
    else:
        largest = tl.max(tl.max(bits, axis=1), axis=0).to(tl.float32, bitcast=True)
        tl.atomic_max(out, largest, sem="relaxed")


def amax_triton(x: Tensor, granularity: Granularity) -> Tensor:
    """As `octavo.kernels.amax.amax`, for an x of at least one element on a device that Triton compiles for."""
    if x.dtype == torch.float64:
        x = x.float()
    kept, reduced = (x.shape[1], x.shape[0]) if granularity is COLUMN else (x.shape[0], x.shape[1])
    stride_kept, stride_reduced = x.stride()
    if granularity is COLUMN:
        stride_kept, stride_reduced = stride_reduced, stride_kept
    keep = granularity is not TENSOR
    if not keep and (x.is_contiguous() or x.t().is_contiguous()):
        # Without gaps, a matrix is a vector.
        kept, reduced, stride_kept, stride_reduced = 1, x.numel(), x.numel(), 1
    elif not keep and stride_kept < stride_reduced:
        kept, reduced, stride_kept, stride_reduced = reduced, kept, stride_reduced, stride_kept

    block_kept, block_reduced = _block(kept, reduced, stride_kept == 1 and stride_reduced != 1)
    tiles_kept, tiles_reduced = triton.cdiv(kept, block_kept), triton.cdiv(reduced, block_reduced)
    atomic = not keep or tiles_reduced > 1
    shape = () if not keep else (1, kept) if granularity is COLUMN else (kept, 1)
    out = (torch.zeros if atomic else torch.empty)(shape, dtype=torch.float32, device=x.device)
    amax_kernel[(tiles_kept * tiles_reduced,)](
        x, out, kept, reduced, stride_kept, stride_reduced,
        KEEP=keep, ATOMIC=atomic, BLOCK_KEPT=block_kept, BLOCK_REDUCED=block_reduced, num_warps=_WARPS,
    )  # fmt: skip
    return out


def _block(kept: int, reduced: int, kept_is_contiguous: bool) -> tuple[int, int]:
    """Extents of a block, powers of two: long along the contiguous dimension, and no longer than the matrix."""
    if kept_is_contiguous:
        block_kept = min(_BLOCK_KEPT, triton.next_power_of_2(kept))
        return block_kept, min(_BLOCK // block_kept, triton.next_power_of_2(reduced))
    block_reduced = min(_BLOCK, triton.next_power_of_2(reduced))
    return min(_BLOCK // block_reduced, triton.next_power_of_2(kept)), block_reduced
