"""Operations on plain tensors: for each a contract, a PyTorch reference that defines it, and a Triton twin."""

from octavo.kernels.amax import amax, amax_by_row_and_column, partial_amax
from octavo.kernels.block_cast import block_cast, expanded, has_blocks, lay_out
from octavo.kernels.cast_transpose import CastOutput, ScaleRule, cast_transpose
from octavo.kernels.delayed_update import delayed_update, delayed_update_in_place
from octavo.kernels.emulation import Emulation, current_emulation, emulation
from octavo.kernels.layout import ALIGNMENT, SCALE_ALIGNMENT, pad_matrix, pad_row_scale, padded
from octavo.kernels.row_cast import row_cast
from octavo.kernels.scaled_mm import Accumulation, runs_natively, scaled_mm
from octavo.kernels.stochastic_cast import stochastic_cast

__all__ = [
    "ALIGNMENT",
    "SCALE_ALIGNMENT",
    "Accumulation",
    "CastOutput",
    "Emulation",
    "ScaleRule",
    "amax",
    "amax_by_row_and_column",
    "block_cast",
    "cast_transpose",
    "current_emulation",
    "delayed_update",
    "delayed_update_in_place",
    "emulation",
    "expanded",
    "has_blocks",
    "lay_out",
    "pad_matrix",
    "pad_row_scale",
    "padded",
    "partial_amax",
    "row_cast",
    "runs_natively",
    "scaled_mm",
    "stochastic_cast",
]
