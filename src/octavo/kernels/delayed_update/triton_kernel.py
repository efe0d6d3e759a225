"""delayed_update on a GPU: one program an operand, one launch for all, where torch's operators take some twenty.

There are two kernels of one rule: one makes new tensors, the other writes where the operands lie, by their addresses.
Bytes moved: the windows, read and written once. Divisions round to nearest, and every choice is a comparison that NaN
fails, as in the reference.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.launcher import Launcher
from octavo.kernels.layout import SCALE_ALIGNMENT
from octavo.scaling.rules import LARGEST_MULTIPLIER, SMALLEST_MULTIPLIER

_WARPS = 4


@triton.jit
def _scale_after(
    newest,
    past,
    kept,
    format_max,
    MOST_RECENT: tl.constexpr,
    HEADROOM: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """(scale, whether the operand takes part) of one operand with the scale `kept`."""
    # 1. The amax to provide for: NaN in the window makes it NaN.
    amax = newest
    usable = (newest > 0.0) & (newest < float("inf"))
    takes_part = usable
    if not MOST_RECENT:
        amax = tl.maximum(newest, tl.max(past, axis=0))
        has_nan = tl.max((past != past).to(tl.int32), axis=0) > 0
        usable = usable & (amax > 0.0) & (amax < float("inf")) & (has_nan == 0)
    # 2. Its scale.
    fresh = tl.div_rn(amax * HEADROOM, format_max)
    fresh = tl.where(fresh < SMALLEST, SMALLEST, fresh)
    fresh = tl.where(fresh > LARGEST, LARGEST, fresh)
    return tl.where(usable, fresh, kept), takes_part


@triton.jit
def _rolled(newest, past, following, takes_part, place, length):
    """The window of an operand afterwards, of what each place holds and of what the next one does."""
    rolled = tl.where(place == length - 1, newest, following)
    rolled = tl.where(takes_part, rolled, past)
    return tl.where(place == 0, 0.0, rolled)


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
    # 2. Its scale, and whether it takes part.
    format_max = tl.where(operand < first, FIRST_MAX, OTHER_MAX).to(tl.float32)
    kept = tl.load(scale + operand * stride_scale)
    fresh, takes_part = _scale_after(newest, past, kept, format_max, MOST_RECENT, HEADROOM, SMALLEST, LARGEST)
    tl.store(new_scale + operand * GAP, fresh)
    # 3. Roll: the oldest leaves, the newest enters at the end, position 0 becomes 0.
    following = tl.load(history + row + 1, mask=place < length - 1, other=0.0)
    rolled = _rolled(newest, past, following, takes_part, place, length)
    tl.store(new_history + row, rolled, mask=place < length)


@triton.jit(do_not_specialize=("length", "first"), do_not_specialize_on_alignment=("addresses",))
def delayed_update_in_place_kernel(
    addresses,
    length,
    first,
    MOST_RECENT: tl.constexpr,
    HEADROOM: tl.constexpr,
    FIRST_MAX: tl.constexpr,
    OTHER_MAX: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One operand: addresses [n, 3] of its history [length], scale [] and gathered amax [], which becomes 0."""
    operand = tl.program_id(0).to(tl.int64)
    history = tl.load(addresses + operand * 3).to(tl.pointer_type(tl.float32))
    scale = tl.load(addresses + operand * 3 + 1).to(tl.pointer_type(tl.float32))
    gathered = tl.load(addresses + operand * 3 + 2).to(tl.pointer_type(tl.float32))
    place = tl.arange(0, BLOCK)
    # 1. All that is there; position 0 is ignored. Nothing may be written before every thread has read.
    newest = tl.load(gathered)
    kept = tl.load(scale)
    past = tl.load(history + place, mask=(place > 0) & (place < length), other=0.0)
    following = tl.load(history + place + 1, mask=place < length - 1, other=0.0)
    tl.debug_barrier()
    # 2. As of new tensors.
    format_max = tl.where(operand < first, FIRST_MAX, OTHER_MAX).to(tl.float32)
    fresh, takes_part = _scale_after(newest, past, kept, format_max, MOST_RECENT, HEADROOM, SMALLEST, LARGEST)
    tl.store(scale, fresh)
    tl.store(history + place, _rolled(newest, past, following, takes_part, place, length), mask=place < length)
    # 3. The next step gathers anew.
    tl.store(gathered, 0.0)


_launch_kernel = Launcher(delayed_update_kernel)
_launch_in_place = Launcher(delayed_update_in_place_kernel)


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


def in_place_launch(
    addresses: Tensor, length: int, maxima: tuple[float, float], first: int, margin: int, algorithm: str
) -> Callable[[], None]:
    """What launches the update of n operands where they lie.

    Args:
        addresses: int64 [n, 3], of each operand's history, scale and gathered amax.
        length: of the histories.
        maxima, first, margin, algorithm: as of `octavo.kernels.delayed_update.delayed_update`.
    """
    constants = (
        algorithm == "most_recent",
        2.0**margin,
        *maxima,
        SMALLEST_MULTIPLIER,
        LARGEST_MULTIPLIER,
        triton.next_power_of_2(length),
    )
    count = addresses.shape[0]

    def launch() -> None:
        _launch_in_place(count, constants, (addresses,), (length, first), constants, _WARPS)

    return launch
