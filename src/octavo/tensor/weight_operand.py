"""An operand of a matrix that exists in FP8 alone: its codes are taken as they are wherever their scale allows."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels import lay_out, pad_matrix, pad_row_scale
from octavo.scaling import BLOCK_128X128, MX, PRODUCT_BLOCKS, ROW, TENSOR, Granularity
from octavo.tensor.quantized_tensor import QuantizedTensor, values
from octavo.tensor.quantizer import Operand, Quantizer


def operand_of(
    q: QuantizedTensor, quantizer: Quantizer, rowwise: bool, columnwise: bool, granularity: Granularity = TENSOR
) -> Operand:
    """Operand of a matrix q [M, K] in the layouts asked for.

    One scale a tensor serves both layouts. One scale a row serves the row-wise layout; the other one is quantized anew
    by `quantizer`, from the decoded values, as is everything of any other granularity. Blocks of 128x128 serve both
    layouts of a product by blocks, and MX blocks the row-wise one.

    Args:
        q: the matrix.
        quantizer: of the operand.
        rowwise, columnwise: the layouts.
        granularity: of what `quantizer` makes. A product is by blocks in both operands or in none.
    """
    codes = scale = codes_t = scale_t = None
    if granularity in PRODUCT_BLOCKS:
        return _by_block(q, quantizer, rowwise, columnwise, granularity)
    if q.granularity is TENSOR:
        padded = _pad(q.codes)
        codes, scale = (padded, q.scale) if rowwise else (None, None)
        codes_t, scale_t = (padded.t().contiguous(), q.scale) if columnwise else (None, None)
        return Operand(codes, scale, codes_t, scale_t)
    if q.granularity is ROW and rowwise:
        codes, scale = _pad(q.codes), pad_row_scale(q.scale)
        rowwise = False
    if rowwise or columnwise:
        fresh = quantizer(values(q.codes, q.scale, q.granularity), rowwise, columnwise)
        codes, scale = (fresh.codes, fresh.scale) if rowwise else (codes, scale)
        codes_t, scale_t = fresh.codes_t, fresh.scale_t
    return Operand(codes, scale, codes_t, scale_t)


def _by_block(
    q: QuantizedTensor, quantizer: Quantizer, rowwise: bool, columnwise: bool, granularity: Granularity
) -> Operand:
    """The operand of a product by block: q's own codes in the layouts that its blocks serve."""
    alike = q.granularity is granularity
    keeps_rows = rowwise and alike and granularity in (BLOCK_128X128, MX)
    keeps_columns = columnwise and alike and granularity is BLOCK_128X128
    codes, scale = lay_out(q.codes, q.scale, granularity) if keeps_rows else (None, None)
    codes_t, scale_t = lay_out(q.codes.t(), q.scale.t(), granularity) if keeps_columns else (None, None)
    if rowwise == keeps_rows and columnwise == keeps_columns:
        return Operand(codes, scale, codes_t, scale_t)
    high = values(q.codes, q.scale, q.granularity)
    fresh = quantizer(high, rowwise and not keeps_rows, columnwise and not keeps_columns)
    return Operand(*(fresh[i] if own is None else own for i, own in enumerate((codes, scale, codes_t, scale_t))))


def _pad(codes: Tensor) -> Tensor:
    return pad_matrix(codes.contiguous().view(torch.uint8)).view(codes.dtype)
