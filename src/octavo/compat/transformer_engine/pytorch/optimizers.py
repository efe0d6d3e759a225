"""`transformer_engine.pytorch.optimizers`: none of them is built yet."""

from __future__ import annotations

from octavo.compat.planned import planned_function

FusedAdam = planned_function("transformer_engine.pytorch.optimizers.FusedAdam")
FusedSGD = planned_function("transformer_engine.pytorch.optimizers.FusedSGD")

__all__ = ["FusedAdam", "FusedSGD"]
