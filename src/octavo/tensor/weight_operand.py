"""An operand of a matrix that exists in FP8 alone: its codes are taken as they are wherever their scale allows."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels import pad_matrix, pad_row_scale
from octavo.scaling import ROW, TENSOR
from octavo.tensor.quantized_tensor import QuantizedTensor, values
from octavo.tensor.quantizer import Operand, Quantizer


def operand_of(q: QuantizedTensor, quantizer: Quantizer, rowwise: bool, columnwise: bool) -> Operand:
    """Operand of a matrix q [M, K] in the layouts asked for.

    One scale a tensor serves both layouts. One scale a row serves the row-wise layout; the other one is quantized anew
    by `quantizer`, from the decoded values, as is everything of any other granularity.
    """
    codes = scale = codes_t = scale_t = None
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


def _pad(codes: Tensor) -> Tensor:
    return pad_matrix(codes.contiguous().view(torch.uint8)).view(codes.dtype)
