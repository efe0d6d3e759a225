"""delayed_update on a GPU: one program an operand, one launch for all, where torch's operators take some twenty.

Bytes moved: the windows, read and written once. Divisions round to nearest, and every choice is a comparison that NaN
fails, as in the reference.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.launcher import Launcher
from octavo.kernels.layout import SCALE_ALIGNMENT
from octavo.scaling.rules import LARGEST_MULTIPLIER, SMALLEST_MULTIPLIER

_WARPS = 4


@triton.jit(
    do_not_specialize=("length", "stride_scale", "first"),
    do_not_specialize_on_alignment=("history", "scale", "last", "new_history", "new_scale"),
)
def delayed_update_kernel(
    history,
    scale,
    last,
    new_history,
    new_scale,
    length,
    stride_scale,
    first,
    MOST_RECENT: tl.constexpr,
    HEADROOM: tl.constexpr,
    FIRST_MAX: tl.constexpr,
    OTHER_MAX: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    GAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One operand: history [n, length], scale [n] (with strides), last [n] -> new_history, new_scale (GAP apart).

    The first `first` operands are of a format up to FIRST_MAX, the others of one up to OTHER_MAX.
    """
    operand = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    row = operand * length + place
    newest = tl.load(last + operand)
    # 1. The past; position 0 is ignored.
    past = tl.load(history + row, mask=(place > 0) & (place < length), other=0.0)
    # 2. The amax to provide for: NaN in the window makes it NaN.
    amax = newest
    usable = (newest > 0.0) & (newest < float("inf"))
    takes_part = usable
    if not MOST_RECENT:
        amax = tl.maximum(newest, tl.max(past, axis=0))
        has_nan = tl.max((past != past).to(tl.int32), axis=0) > 0
        usable = usable & (amax > 0.0) & (amax < float("inf")) & (has_nan == 0)
    # 3. Its scale.
    format_max = tl.where(operand < first, FIRST_MAX, OTHER_MAX).to(tl.float32)
    fresh = tl.div_rn(amax * HEADROOM, format_max)
    fresh = tl.where(fresh < SMALLEST, SMALLEST, fresh)
    fresh = tl.where(fresh > LARGEST, LARGEST, fresh)
    kept = tl.load(scale + operand * stride_scale)
    tl.store(new_scale + operand * GAP, tl.where(usable, fresh, kept))
    # 4. Roll: the oldest leaves, the newest enters at the end, position 0 becomes 0.
    following = tl.load(history + row + 1, mask=place < length - 1, other=0.0)
    rolled = tl.where(place == length - 1, newest, following)
    rolled = tl.where(takes_part, rolled, past)
    tl.store(new_history + row, tl.where(place == 0, 0.0, rolled), mask=place < length)


_launch_kernel = Launcher(delayed_update_kernel)


def delayed_update_triton(
    history: Tensor,
    scale: Tensor,
    last: Tensor,
    maxima: tuple[float, float],
    first: int,
    margin: int,
    algorithm: str,
) -> tuple[Tensor, Tensor]:
    """As `octavo.kernels.delayed_update.delayed_update`, for what has no `unsupported_reasons`.

    The scales come out 16 bytes apart, as cuBLASLt reads them.
    """
    count, length = history.shape
    history, last = history.contiguous(), last.contiguous()
    gap = SCALE_ALIGNMENT // last.element_size()
    new_history = torch.empty_like(history)
    new_scale = last.new_empty((count, gap))
    constants = (
        algorithm == "most_recent",
        2.0**margin,
        *maxima,
        SMALLEST_MULTIPLIER,
        LARGEST_MULTIPLIER,
        gap,
        triton.next_power_of_2(length),
    )
    tensors = (history, scale, last, new_history, new_scale)
    _launch_kernel(count, constants, tensors, (length, scale.stride(0), first), constants, _WARPS)
    return new_history, new_scale[:, 0]
