"""scale_from_amax on a GPU: the rule of `octavo.scaling.rules` in one launch.

Both divisions round to nearest (`div_rn`): Triton's `/` compiles to an approximation that is off by up to 2 ulp.
Every choice is a comparison that NaN fails, so that NaN passes through, as in the reference.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import Format
from octavo.scaling.rules import LARGEST_MULTIPLIER, SMALLEST_MULTIPLIER

_BLOCK = 256
_WARPS = 4


# An amax may be any element of a tensor of amaxes: no second compilation, perhaps within a capture, for its alignment.
@triton.jit(do_not_specialize_on_alignment=("amax",))
def scale_from_amax_kernel(
    amax,
    multiplier,
    scale,
    count,
    epsilon,
    FORMAT_MAX: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """multiplier, scale [count] of amax [count]; an epsilon of -inf leaves every amax alone."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    # 1. m = M / max(amax, epsilon), 1 where that is 0.
    raised = tl.load(amax + index, mask=inside, other=1.0)
    raised = tl.where(raised < epsilon, epsilon, raised)
    m = tl.div_rn(tl.full([BLOCK], FORMAT_MAX, tl.float32), raised)
    m = tl.where(raised == 0.0, 1.0, m)
    # 2. Clamped, so that it and its reciprocal are normal numbers.
    m = tl.where(m < SMALLEST, SMALLEST, m)
    m = tl.where(m > LARGEST, LARGEST, m)
    # 3. Without its fraction, a normal float32 is the power of two below.
    if POWER_OF_TWO:
        m = (m.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
    tl.store(multiplier + index, m, mask=inside)
    tl.store(scale + index, tl.div_rn(tl.full([BLOCK], 1.0, tl.float32), m), mask=inside)


def scale_from_amax_triton(
    amax: Tensor, format: Format, epsilon: float = 0.0, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """As `octavo.kernels.scale_from_amax.scale_from_amax`, for at least one amax, on a device of Triton's."""
    amax = amax.contiguous()
    multiplier, scale = torch.empty_like(amax), torch.empty_like(amax)
    count = amax.numel()
    scale_from_amax_kernel[(triton.cdiv(count, _BLOCK),)](
        amax, multiplier, scale, count, epsilon or -math.inf,
        FORMAT_MAX=format.max, SMALLEST=SMALLEST_MULTIPLIER, LARGEST=LARGEST_MULTIPLIER,
        POWER_OF_TWO=power_of_two, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    return multiplier, scale
