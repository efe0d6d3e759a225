"""Two casts that know nothing of Octavo: `gfloat` (exact arithmetic, saturating) and `ml_dtypes` (not saturating)."""

from __future__ import annotations

import gfloat
import ml_dtypes
import numpy
import torch
from gfloat.formats import format_info_ocp_e4m3, format_info_ocp_e5m2, format_info_ocp_e8m0
from torch import Tensor

from octavo.formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, Format

GFLOAT = {E4M3: format_info_ocp_e4m3, E5M2: format_info_ocp_e5m2, E8M0: format_info_ocp_e8m0}
ML_DTYPES = {
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
    E8M0: ml_dtypes.float8_e8m0fnu,
    E4M3FNUZ: ml_dtypes.float8_e4m3fnuz,
    E5M2FNUZ: ml_dtypes.float8_e5m2fnuz,
}


def saturating_values(x: Tensor, format: Format) -> Tensor:
    """Values (float64) of x cast by gfloat, to nearest even, saturating."""
    rounded = gfloat.round_ndarray(GFLOAT[format], x.double().numpy(), gfloat.RoundMode.TiesToEven, sat=True)
    return torch.from_numpy(numpy.asarray(rounded, dtype=numpy.float64))


def overflowing_codes(x: Tensor, format: Format) -> Tensor:
    """Codes (uint8) of x cast by ml_dtypes, to nearest even, overflow to inf or NaN."""
    wide = x.double().numpy() if x.dtype == torch.float64 else x.float().numpy()
    with numpy.errstate(all="ignore"):
        return torch.from_numpy(wide.astype(ML_DTYPES[format]).view(numpy.uint8))


def decoded(codes: Tensor, format: Format) -> Tensor:
    """Values (float64) of codes (any one-byte dtype) by ml_dtypes."""
    values = codes.view(torch.uint8).numpy().view(ML_DTYPES[format]).astype(numpy.float64)
    return torch.from_numpy(values)


def same_bits_but_for_nan(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise: equal float64 values with equal signs, or both NaN."""
    return ((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())
