"""grouped_mm: products of codes, one a group of rows, whose results lie one after the other in one matrix.

    out [M, N], rows of group e = (a_e [m_e, K] @ b_e [N, K]^T) * scale_a_e * scale_b_e + bias_e

`scaled_mm_by_group`: the sizes are known to the host. Each product is an `octavo.kernels.scaled_mm`, to the bit; on FP8
units it writes its rows of the output itself where its library can, so that nothing is copied together afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.block_cast.layout import has_blocks
from octavo.kernels.layout import ALIGNMENT, SCALE_ALIGNMENT
from octavo.kernels.scaled_mm import Accumulation, runs_natively, scaled_mm

# a [m', K'] and b [N', K'], their scales, and a bias [N'] or None: what `octavo.kernels.scaled_mm` takes.
Product = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


def scaled_mm_by_group(
    products: Sequence[Product],
    splits: Sequence[int],
    columns: int,
    out_dtype: torch.dtype,
    accumulate: Sequence[Accumulation],
) -> Tensor:
    """The products, one below the other -> [sum of splits, columns] of `out_dtype`, contiguous.

    Args:
        products: operands of each; their padding is left out of the result.
        splits: rows of each.
        columns: N without its padding.
        out_dtype: float32, bfloat16 or float16.
        accumulate: how each sums.
    """
    if torch.compiler.is_compiling() or not all(
        _writes(product, rows, columns, out_dtype) for product, rows in zip(products, splits, strict=True) if rows
    ):
        parts = []
        for (a, b, scale_a, scale_b, bias), rows, how in zip(products, splits, accumulate, strict=True):
            part = scaled_mm(a, b, scale_a, scale_b, bias, out_dtype, how)
            # Whether rows were padded is not asked while compiling: each answer would be a graph of its own.
            if torch.compiler.is_compiling() or part.shape[0] != rows:
                part = part.narrow(0, 0, rows)
            parts.append(part if part.shape[1] == columns else part[:, :columns])
        return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
    out = products[0][0].new_empty((sum(splits), columns), dtype=out_dtype)
    start = 0
    for product, rows, how in zip(products, splits, accumulate, strict=True):
        if rows:
            _write(out[start : start + rows], product, rows, how)
        start += rows
    return out


def _writes(product: Product, rows: int, columns: int, out_dtype: torch.dtype) -> bool:
    """True if the library writes this product where it is told to, exactly as `scaled_mm` would give it."""
    a, b, scale_a, scale_b, bias = product
    if (
        not (a.numel() and b.numel() and runs_natively(a, b, scale_a))
        or b.shape[0] != columns
        or has_blocks(scale_a, a.shape[0])
    ):
        return False
    if scale_b.dim():
        # Row-wise products write bfloat16, without a bias. Of rows that are no multiple of 16 they were not seen.
        return out_dtype == torch.bfloat16 and bias is None and rows % ALIGNMENT == 0
    return bias is None or (out_dtype != torch.float32 and bias.dtype == out_dtype)


def _write(out: Tensor, product: Product, rows: int, accumulate: Accumulation) -> None:
    a, b, scale_a, scale_b, bias = product
    if scale_b.dim():
        scale_a, scale_b = scale_a[:rows], scale_b.reshape(1, -1)
    scale_a, scale_b = _aligned(scale_a), _aligned(scale_b)
    fast = accumulate == "fast"
    torch._scaled_mm(a[:rows], b.t(), scale_a, scale_b, bias, None, out.dtype, use_fast_accum=fast, out=out)


def _aligned(scale: Tensor) -> Tensor:
    """cuBLASLt reads a scale at such addresses alone."""
    return scale.clone() if scale.data_ptr() % SCALE_ALIGNMENT else scale


__all__ = ["Product", "scaled_mm_by_group"]
