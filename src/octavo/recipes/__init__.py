"""Which format and scaling for which operand of which matrix product: frozen data."""

from octavo.recipes.block import BlockScaling
from octavo.recipes.current import CurrentScaling
from octavo.recipes.delayed import DelayedScaling
from octavo.recipes.mxfp8 import MXFP8Scaling
from octavo.recipes.recipe import HYBRID, Accumulate, DelayedUpdate, FormatPair, Gemm, OperandName, Recipe, check_recipe
from octavo.recipes.rowwise import RowwiseScaling
from octavo.recipes.static import StaticScaling

__all__ = [
    "HYBRID",
    "Accumulate",
    "BlockScaling",
    "CurrentScaling",
    "DelayedScaling",
    "DelayedUpdate",
    "FormatPair",
    "Gemm",
    "MXFP8Scaling",
    "OperandName",
    "Recipe",
    "RowwiseScaling",
    "StaticScaling",
    "check_recipe",
]
