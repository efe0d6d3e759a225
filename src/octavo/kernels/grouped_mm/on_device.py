"""Products by group where only the device knows the sizes of the groups.

    by rows      out [M, N]:    rows of group e = (a [M, K] @ b_e [N, K]^T) * scale_a * scale_b_e + bias_e
    over rows    out [E, N, K]: out_e = (a [N, its columns] @ b [K, its columns]^T) * scale_a_e * scale_b_e
    sums         out [E, N]:    sums of the rows of each group, in float32

On Hopper these are one launch each: of codes through `torch._scaled_grouped_mm` (CUTLASS: E4M3 by E4M3, one float32
scale a row of either operand, written in bfloat16) or, with E5M2 in an operand or another output, in Triton; in high
precision through `torch._grouped_mm` (bfloat16). Nothing is emulated on another CUDA device, since a loop over groups
would wait for it: see `device_reasons`. On a CPU a loop over groups is the definition, and exact: each product is
`octavo.kernels.scaled_mm` of the rows of a group, padded as a cast of these alone would pad them.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from octavo.formats import E4M3
from octavo.kernels.layout import padded
from octavo.kernels.library import register
from octavo.kernels.scaled_mm import Accumulation, native, scaled_mm_emulated
from octavo.kernels.triton_support import triton_is_installed

_HOPPER = 9
_BETWEEN = "\n"


def device_reasons(device: torch.device) -> list[str]:
    """Why `device` has no grouped products of codes; empty if it has, or if it is a CPU, where a loop costs nothing."""
    if device.type == "cpu":
        return []
    reasons = _reasons_of(device.type, device.index or 0)
    return reasons.split(_BETWEEN) if reasons else []


def _reasons_of(kind: str, index: int) -> str:
    return _known_reasons(kind, index)


# Dynamo runs it while it traces, which it would not do for what functools.cache makes.
# (torch.compiler.assume_constant_result sets this, and imports Dynamo to do so.)
_reasons_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _known_reasons(kind: str, index: int) -> str:
    reasons = list(native.device_reasons(torch.device(kind, index)))
    if not reasons:
        major, minor = native._capability(index)
        if major != _HOPPER:
            reasons.append(f"compute capability {major}.{minor}: grouped products with a scale a row need 9.0 (Hopper)")
        if not hasattr(torch, "_scaled_grouped_mm"):
            reasons.append(f"torch {torch.__version__} has no torch._scaled_grouped_mm: use 2.8 or later")
        if not triton_is_installed():
            reasons.append("Triton is not installed: pip install octavo[gpu]")
    return _BETWEEN.join(reasons)


def grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    ends: Tensor,
    out_dtype: torch.dtype,
    accumulate: Accumulation,
) -> Tensor:
    """By rows -> [M, N].

    Args:
        a: codes [M, K], contiguous, of groups one after the other.
        b: codes [E, N, K], contiguous.
        scale_a: float32 [M, 1].
        scale_b: float32 [E, N, 1].
        bias: [E, N] or None, added in float32. (With torch's own product to the rounded product, and rounded again.)
        ends: [E] int32, the row after the last of each group.
        out_dtype: float32, bfloat16 or float16.
        accumulate: as of `octavo.kernels.scaled_mm`.
    """
    launch = _by_rows if torch.compiler.is_compiling() else _launch_by_rows
    result: Tensor = launch(a, b, scale_a, scale_b, bias, ends, out_dtype, accumulate)
    return result


def grouped_mm_over_rows(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    ends: Tensor,
    ends_t: Tensor,
    out_dtype: torch.dtype,
    accumulate: Accumulation,
) -> Tensor:
    """Over rows -> [E, N, K].

    Args:
        a, b: codes [N, C] and [K, C], contiguous, whose columns belong to groups, see
            `octavo.kernels.grouped_cast.layout`.
        scale_a, scale_b: float32 [E, N, 1] and [E, K, 1].
        ends, ends_t: [E] int32, where groups end among rows, and among columns.
        out_dtype: float32, bfloat16 or float16.
        accumulate: as of `octavo.kernels.scaled_mm`.
    """
    launch = _over_rows if torch.compiler.is_compiling() else _launch_over_rows
    result: Tensor = launch(a, b, scale_a, scale_b, ends, ends_t, out_dtype, accumulate)
    return result


def plain_grouped_mm(a: Tensor, b: Tensor, bias: Tensor | None, ends: Tensor, transposed: bool) -> Tensor:
    """By rows, in high precision -> [M, N] of a's dtype.

    Args:
        a: [M, K].
        b: of a's dtype, [E, K, N]; `transposed`: [E, N, K].
        bias: [E, N] of a's dtype, or None; of a transposed b.
        ends: [E] int32, the row after the last of each group.
        transposed: which of the two b is.
    """
    launch = _plain_by_rows if torch.compiler.is_compiling() else _launch_plain_by_rows
    result: Tensor = launch(a, b, bias, ends, transposed)
    return result


def plain_grouped_mm_over_rows(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Over rows, in high precision -> [E, N, K] of a's dtype. a [M, N]; b [M, K] of a's dtype."""
    launch = _plain_over_rows if torch.compiler.is_compiling() else _launch_plain_over_rows
    result: Tensor = launch(a, b, ends)
    return result


def grouped_sum(x: Tensor, ends: Tensor) -> Tensor:
    """Sums of the rows of each group of x [M, N] -> float32 [E, N].

    On a GPU a column with an entry that is not finite gives NaN in every group, since it is a product with 0 and 1.
    """
    launch = _sums if torch.compiler.is_compiling() else _launch_sums
    result: Tensor = launch(x, ends)
    return result


def _bounds(ends: Tensor) -> list[tuple[int, int]]:
    after: list[int] = ends.tolist()
    return list(zip([0, *after[:-1]], after, strict=True))


def _launch_by_rows(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    ends: Tensor,
    out_dtype: torch.dtype,
    accumulate: str,
) -> Tensor:
    if not a.is_cuda:
        return _by_rows_reference(a, b, scale_a, scale_b, bias, ends, out_dtype, accumulate)
    if a.shape[0] == 0:
        return a.new_empty((0, b.shape[1]), dtype=out_dtype)
    if not library_takes(a.dtype, b.dtype, out_dtype):
        from octavo.kernels.grouped_mm.triton_kernel import grouped_mm_triton

        return grouped_mm_triton(a, b, scale_a, scale_b, bias, ends, out_dtype, accumulate)
    fast = accumulate == "fast"
    out = torch._scaled_grouped_mm(
        a, b.transpose(-2, -1), scale_a.reshape(-1), scale_b.squeeze(-1), ends, None, None, torch.bfloat16, fast
    )
    return _biased(out, bias, ends)


def _biased(out: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """Rows with the bias of their group, in place."""
    if bias is None:
        return out
    row = torch.arange(out.shape[0], device=out.device)
    group = torch.searchsorted(ends, row.to(ends.dtype), right=True).clamp(max=ends.shape[0] - 1)
    return out.add_(bias.to(out.dtype).index_select(0, group))


def _by_rows_reference(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    ends: Tensor,
    out_dtype: torch.dtype,
    accumulate: str,
) -> Tensor:
    """As `grouped_mm` in plain PyTorch: the emulation, and the definition."""
    out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    for e, (start, stop) in enumerate(_bounds(ends)):
        # 1. The rows of a group, filled up as its own cast would have filled them up.  [m', K]
        fill = (0, 0, 0, padded(stop - start) - (stop - start))
        codes = torch.nn.functional.pad(a[start:stop].view(torch.uint8), fill).view(a.dtype)
        scales = torch.nn.functional.pad(scale_a[start:stop], fill, value=1.0)
        # 2. [m', K] @ [K, N] -> [m', N]
        one = None if bias is None else bias[e]
        product = scaled_mm_emulated(codes, b[e], scales, scale_b[e], one, out_dtype, accumulate)
        # 3. Its rows.  [m, N]
        out[start:stop] = product[: stop - start]
    return out


def _launch_over_rows(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    ends: Tensor,
    ends_t: Tensor,
    out_dtype: torch.dtype,
    accumulate: str,
) -> Tensor:
    if not a.is_cuda:
        return _over_rows_reference(a, b, scale_a, scale_b, ends, ends_t, out_dtype, accumulate)
    if not library_takes(a.dtype, b.dtype, out_dtype):
        from octavo.kernels.grouped_mm.triton_kernel import grouped_mm_over_rows_triton

        return grouped_mm_over_rows_triton(a, b, scale_a, scale_b, ends_t, out_dtype, accumulate)
    fast = accumulate == "fast"
    return torch._scaled_grouped_mm(
        a, b.t(), scale_a.reshape(-1), scale_b.reshape(-1), ends_t, None, None, torch.bfloat16, fast
    )


def _over_rows_reference(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    ends: Tensor,
    ends_t: Tensor,
    out_dtype: torch.dtype,
    accumulate: str,
) -> Tensor:
    """As `grouped_mm_over_rows` in plain PyTorch: the emulation, and the definition."""
    out = a.new_empty((ends.shape[0], a.shape[0], b.shape[0]), dtype=out_dtype)
    for e, ((start, stop), (first, _)) in enumerate(zip(_bounds(ends), _bounds(ends_t), strict=True)):
        # 1. The columns of a group, as many as its own cast would have made.  [N, m'], [K, m']
        last = first + padded(stop - start)
        one, other = a[:, first:last].contiguous(), b[:, first:last].contiguous()
        # 2. [N, m'] @ [m', K] -> [N, K]
        out[e] = scaled_mm_emulated(one, other, scale_a[e], scale_b[e], None, out_dtype, accumulate)
    return out


def _launch_plain_by_rows(a: Tensor, b: Tensor, bias: Tensor | None, ends: Tensor, transposed: bool) -> Tensor:
    if a.is_cuda and a.shape[0]:
        return _biased(torch._grouped_mm(a, b.transpose(-2, -1) if transposed else b, offs=ends), bias, ends)
    out = a.new_empty((a.shape[0], b.shape[1 if transposed else 2]))
    for e, (start, stop) in enumerate(_bounds(ends) if a.shape[0] else []):
        if transposed:
            out[start:stop] = torch.nn.functional.linear(a[start:stop], b[e], None if bias is None else bias[e])
        else:
            out[start:stop] = a[start:stop] @ b[e]
    return out


def _launch_plain_over_rows(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    if a.is_cuda and a.shape[0]:
        return torch._grouped_mm(a.t(), b, offs=ends)
    out = a.new_zeros((ends.shape[0], a.shape[1], b.shape[1]))
    for e, (start, stop) in enumerate(_bounds(ends) if a.shape[0] else []):
        out[e] = a[start:stop].t() @ b[start:stop]
    return out


def _launch_sums(x: Tensor, ends: Tensor) -> Tensor:
    if x.is_cuda and x.shape[0]:
        # Products with 1 are exact; the sums are float32, in an order that does not change.
        row = torch.arange(x.shape[0], device=x.device, dtype=ends.dtype)
        group = torch.searchsorted(ends, row, right=True)
        belongs = (torch.arange(ends.shape[0], device=x.device)[:, None] == group).to(x.dtype)
        return belongs @ x if x.dtype == torch.float32 else torch.mm(belongs, x, out_dtype=torch.float32)
    out = x.new_zeros((ends.shape[0], x.shape[1]), dtype=torch.float32)
    for e, (start, stop) in enumerate(_bounds(ends) if x.shape[0] else []):
        out[e] = x[start:stop].float().sum(0)
    return out


def library_takes(a: torch.dtype, b: torch.dtype, out_dtype: torch.dtype) -> bool:
    """True if torch has the grouped product of codes of these dtypes; then it is taken."""
    return a == b == E4M3.dtype and out_dtype == torch.bfloat16


_by_rows = register(
    "grouped_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, Tensor ends, ScalarType out_dtype,"
    " str accumulate) -> Tensor",
    _launch_by_rows,
    lambda a, b, scale_a, scale_b, bias, ends, out_dtype, accumulate: a.new_empty(
        (a.shape[0], b.shape[1]), dtype=out_dtype
    ),
)
_over_rows = register(
    "grouped_mm_over_rows(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor ends, Tensor ends_t,"
    " ScalarType out_dtype, str accumulate) -> Tensor",
    _launch_over_rows,
    lambda a, b, scale_a, scale_b, ends, ends_t, out_dtype, accumulate: a.new_empty(
        (ends.shape[0], a.shape[0], b.shape[0]), dtype=out_dtype
    ),
)
_plain_by_rows = register(
    "plain_grouped_mm(Tensor a, Tensor b, Tensor? bias, Tensor ends, bool transposed) -> Tensor",
    _launch_plain_by_rows,
    lambda a, b, bias, ends, transposed: a.new_empty((a.shape[0], b.shape[1 if transposed else 2])),
)
_plain_over_rows = register(
    "plain_grouped_mm_over_rows(Tensor a, Tensor b, Tensor ends) -> Tensor",
    _launch_plain_over_rows,
    lambda a, b, ends: a.new_empty((ends.shape[0], a.shape[1], b.shape[1])),
)
_sums = register(
    "grouped_sum(Tensor x, Tensor ends) -> Tensor",
    _launch_sums,
    lambda x, ends: x.new_empty((ends.shape[0], x.shape[1]), dtype=torch.float32),
)
