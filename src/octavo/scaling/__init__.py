"""From values to a scale: granularity, amax, scale rules, amax history. Pure functions of plain tensors."""

from octavo.scaling.amax import block_amax
from octavo.scaling.granularity import (
    BLOCK_1X128,
    BLOCK_128X1,
    BLOCK_128X128,
    COLUMN,
    MX,
    PRODUCT_BLOCKS,
    ROW,
    TENSOR,
    Granularity,
    as_matrix,
    expand_scale,
    granularity_named,
)
from octavo.scaling.history import AmaxComputeAlgo, resized_history, updated_history
from octavo.scaling.rules import (
    ScaleRounding,
    multiplier_from_amax,
    mx_multiplier,
    mx_scale,
    scale_from_multiplier,
)

__all__ = [
    "BLOCK_1X128",
    "BLOCK_128X1",
    "BLOCK_128X128",
    "COLUMN",
    "MX",
    "PRODUCT_BLOCKS",
    "ROW",
    "TENSOR",
    "AmaxComputeAlgo",
    "Granularity",
    "ScaleRounding",
    "as_matrix",
    "block_amax",
    "expand_scale",
    "granularity_named",
    "multiplier_from_amax",
    "mx_multiplier",
    "mx_scale",
    "resized_history",
    "scale_from_multiplier",
    "updated_history",
]
