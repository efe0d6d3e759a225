"""scaled_mm under scales by block: 1x128 of both operands, 1x128 by 128x128, or MX, 1x32 of both.

    out [M, N] = sum over the blocks c of K of (a [M, c] @ b [N, c]^T) * scale_a[c, M] * scale_b[c, N] + bias

On Hopper it runs in cuBLASLt (12.9 or later), which promotes the sum of every block of 128 of K to float32 to scale it:
accumulation is precise by nature. Elsewhere it is emulated: values in float32, products and sums in float32; or, as
`octavo.emulation` says, the sums of each block of 128 as Hopper's tensor cores make them.

MX products, whose scales are E8M0, are emulated on every device in this version, on those too that have them
(Blackwell): nothing here has been tried there.

Where both operands have blocks of 1x128, K is long and it takes less time, a product of our own gives the same bits
(`octavo.kernels.scaled_mm.block_product`).

torch takes E4M3 by E4M3 only. `torch._scaled_mm`, the older operator, has no place for the 128x128 scales of a K whose
blocks are no multiple of 4: the newer one is called, `torch._scaled_mm_v2`, which `torch.nn.functional.scaled_mm`
wraps.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from octavo.formats import E4M3, decode
from octavo.kernels.block_cast.layout import BLOCK, MX_BLOCK, block_under, expanded, is_by_row
from octavo.kernels.emulation import current_emulation
from octavo.kernels.layout import ALIGNMENT
from octavo.kernels.library import register
from octavo.kernels.scaled_mm import native
from octavo.kernels.scaled_mm.bias import with_bias
from octavo.kernels.scaled_mm.hopper import hopper_sum
from octavo.kernels.side_stream import is_beside
from octavo.kernels.triton_support import multiprocessors, triton_is_installed

if TYPE_CHECKING:
    from octavo.kernels.scaled_mm.block_product import Form

_CUDA = (12, 9)
_HOPPER = 9
# Blocks of K from which a product of our own may be the faster one: below, its beginning and its end weigh too much.
_LONG = 16
# Whose Gluon `block_product` is written in.
_TRITON = "3.6."
_1X128 = [ScalingType.BlockWise1x128.value]
_128X128 = [ScalingType.BlockWise128x128.value]


@functools.cache
def multiplies_blocks_on(index: int | None) -> bool:
    """True if CUDA device `index` has block-scaled FP8 products."""
    return not device_reasons(torch.device("cuda", index or 0))


def device_reasons(device: torch.device) -> list[str]:
    """Why `device` has no block-scaled FP8 products; empty if it has."""
    if device.type != "cuda":
        return [f"{device.type} has no FP8 matrix units"]
    if not torch.cuda.is_available():
        return ["no CUDA device is available"]
    reasons = []
    major, minor = native._capability(device.index or 0)
    if major != _HOPPER:
        reasons.append(f"compute capability {major}.{minor}: products with float32 scales by block need 9.0 (Hopper)")
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if version < _CUDA:
        reasons.append(f"CUDA {torch.version.cuda}: products with scales by block need 12.9 or later")
    if not hasattr(torch, "_scaled_mm_v2"):
        reasons.append(f"torch {torch.__version__} has no torch.nn.functional.scaled_mm: use 2.11 or later")
    return reasons


def mx_device_reasons(device: torch.device) -> list[str]:
    """Why `device` has no products under MX scales: no device has, in this version."""
    reason = "products under MX scales are emulated on every device in this version"
    return ([] if device.type == "cuda" else [f"{device.type} has no FP8 matrix units"]) + [reason]


def shape_reasons(a: Tensor, b: Tensor) -> list[str]:
    """Why codes a [M, K] and b [N, K] are not multiplied natively on any device."""
    reasons = []
    if not a.dtype == b.dtype == E4M3.dtype:
        reasons.append(f"formats {a.dtype} x {b.dtype}: torch multiplies E4M3 by E4M3 only under scales by block")
    for name, extent, multiple in (
        ("M", a.shape[0], ALIGNMENT),
        ("K", a.shape[1], BLOCK),
        ("N", b.shape[0], ALIGNMENT),
    ):
        if extent % multiple:
            reasons.append(f"{name} = {extent} is no multiple of {multiple}")
    return reasons


def unsupported_reasons(a: Tensor, b: Tensor, scale_a: Tensor | None = None) -> list[str]:
    """Why the product of codes a [M, K] and b [N, K] is emulated; empty if it runs on FP8 units.

    scale_a: of a, which tells MX; None stands for float32 scales.
    """
    if _is_mx(scale_a):
        return mx_device_reasons(a.device)
    return device_reasons(a.device) + shape_reasons(a, b)


def runs_natively(a: Tensor, b: Tensor, scale_a: Tensor | None = None) -> bool:
    """True if `block_scaled_mm` of these codes runs on FP8 units rather than by emulation."""
    return a.is_cuda and not _is_mx(scale_a) and multiplies_blocks_on(a.device.index) and not shape_reasons(a, b)


def _is_mx(scale: Tensor | None) -> bool:
    return scale is not None and block_under(scale) == MX_BLOCK


def block_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Scaled product of codes -> [M, N] of `out_dtype`.

    Args:
        a, b: codes [M, K] and [N, K], contiguous.
        scale_a, scale_b: as `octavo.kernels.block_cast.layout` has them; scale_a 1x128 and scale_b of either kind of
            128, or both MX.
        bias: [N], added in float32 before the output is rounded.
        out_dtype: float32, bfloat16 or float16.
    """
    if torch.compiler.is_compiling():
        result: Tensor = _operator(a, b, scale_a, scale_b, bias, out_dtype)
        return result
    return _launch(a, b, scale_a, scale_b, bias, out_dtype)


def _launch(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    if a.numel() and b.numel() and runs_natively(a, b, scale_a):
        return block_scaled_mm_native(a, b, scale_a, scale_b, bias, out_dtype)
    emulated = block_scaled_mm_hopper if current_emulation() == "hopper" else block_scaled_mm_reference
    return emulated(a, b, scale_a, scale_b, bias, out_dtype)


def block_scaled_mm_native(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """As `block_scaled_mm`, for operands without `unsupported_reasons`."""
    form = _own_form(a, b, scale_a, scale_b, out_dtype) if bias is None else None
    if form is not None:
        from octavo.kernels.scaled_mm.block_product import block_product

        return block_product(a, b, scale_a, scale_b, out_dtype, form)
    # cuBLASLt itself adds a bias of bfloat16 (on an H200 8.3e-4 from the reference, bfloat16's rounding) and none to
    # float32; of float16 it was not seen.
    inside = bias.contiguous() if bias is not None and bias.dtype == out_dtype == torch.bfloat16 else None
    # Any other bias: the float32 accumulator, then the bias, one rounding.
    dtype = out_dtype if bias is None or inside is not None else torch.float32
    kind_b = _1X128 if is_by_row(scale_b, b) else _128X128
    out: Tensor = torch._scaled_mm_v2(
        a, b.t(), [scale_a.t()], _1X128, [], [scale_b.t()], kind_b, [], inside, dtype, (), False
    )  # fmt: skip
    return out if dtype == out_dtype and (bias is None or inside is not None) else with_bias(out, bias, out_dtype)


def _own_form(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Form | None:
    """The form of `block_product` to be preferred for these operands, with the bits of cuBLASLt's; None: cuBLASLt."""
    if a.shape[1] < _LONG * BLOCK or not is_by_row(scale_b, b) or not _has_gluon():
        return None
    from octavo.kernels.scaled_mm.block_product import is_loaded, preferred_form, takes

    index, shape = a.get_device(), (a.shape[0], b.shape[0], multiprocessors(a))
    if torch.cuda.is_current_stream_capturing():
        form = preferred_form(*shape, is_beside())
        if form is not None and not is_loaded(index, out_dtype, form):
            # What would have to be loaded first is left out of a graph.
            form = None
    else:
        form = preferred_form(*shape)
        beside = preferred_form(*shape, True)
        if beside is not None and not is_loaded(index, out_dtype, beside):
            # So one that a graph may prefer later runs once before.
            form = beside
    return form if form is not None and takes(a, b, scale_a, scale_b) else None


@functools.cache
def _has_gluon() -> bool:
    """Whether Triton is there, in the version whose Gluon is known here."""
    if not triton_is_installed():
        return False
    from triton import __version__

    return bool(__version__.startswith(_TRITON))


def block_scaled_mm_reference(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """As `block_scaled_mm` in plain PyTorch, any device: the emulation, and the definition."""
    # 1. Values of the codes, times the scales of their blocks (exact if these are powers of two).  [M, K], [N, K]
    a32, b32 = decode(a) * expanded(scale_a, a), decode(b) * expanded(scale_b, b)
    # 2. Products and sums, in float32 also where torch.autocast is on.  [M, K] @ [K, N] -> [M, N]
    with torch.autocast(a.device.type, enabled=False):
        out = a32 @ b32.t()
    # 3. Bias in float32, one rounding.
    return with_bias(out, bias, out_dtype)


def block_scaled_mm_hopper(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """As `block_scaled_mm`, with the sums of Hopper's tensor cores; any device, any formats.

    Each block's sum is rounded by the addition in float32, and by a scale before that unless it is a power of two. MX,
    which Hopper does not have, is summed as a kernel there would have to: every 32 of K.
    """
    # 1. One scale a row and block of K.  [K / 128 or / 32, M], and N
    block = block_under(scale_a)
    of_a, of_b = (expanded(scale, codes)[:, ::block].t() for scale, codes in ((scale_a, a), (scale_b, b)))
    # 2. Sums of each block in the tensor core's register, scaled and added in float32.  [M, K] @ [K, N] -> [M, N]
    joined = not is_by_row(scale_b, b)
    out = hopper_sum(a, b, promoted=True, scale_a=of_a, scale_b=of_b, period=block, joined=joined)
    # 3. Bias in float32, one rounding.
    return with_bias(out, bias, out_dtype)


_operator = register(
    "block_scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype) -> Tensor",
    _launch,
    lambda a, b, scale_a, scale_b, bias, out_dtype: a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype),
)
