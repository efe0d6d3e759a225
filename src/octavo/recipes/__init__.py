"""Which format and scaling for which operand of which matrix product: frozen data."""

from octavo.recipes.block import BlockScaling
from octavo.recipes.current import CurrentScaling
from octavo.recipes.custom import CustomRecipe
from octavo.recipes.delayed import DelayedScaling
from octavo.recipes.mxfp8 import MXFP8Scaling
from octavo.recipes.recipe import (
    HYBRID,
    Accumulate,
    DelayedUpdate,
    FormatPair,
    Gemm,
    LinearSpecs,
    OperandName,
    Recipe,
    check_recipe,
)
from octavo.recipes.rowwise import RowwiseScaling
from octavo.recipes.static import StaticScaling
from octavo.tensor import QuantizeSpec

__all__ = [
    "HYBRID",
    "Accumulate",
    "BlockScaling",
    "CurrentScaling",
    "CustomRecipe",
    "DelayedScaling",
    "DelayedUpdate",
    "FormatPair",
    "Gemm",
    "LinearSpecs",
    "MXFP8Scaling",
    "OperandName",
    "QuantizeSpec",
    "Recipe",
    "RowwiseScaling",
    "StaticScaling",
    "check_recipe",
]
