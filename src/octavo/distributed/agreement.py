"""Amaxes agree across ranks: one all-reduce MAX a step, over one vector that holds those of all layers.

With data parallelism each rank sees other data. Scales must be the same on all of them, or the same weight would become
different codes; the maximum is what one process on the joined batch would have measured.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.runtime import set_agreement


class ProcessGroupAgreement:
    """Agreement over a group of torch.distributed; the default group if None is given."""

    def needed(self, group: object | None) -> bool:
        """True if torch.distributed is set up with more than one rank in the group."""
        if not (dist.is_available() and dist.is_initialized()):
            return False
        return dist.get_world_size(group) > 1  # type: ignore[arg-type]

    def reduce(self, amaxes: Tensor, group: object | None) -> Tensor:
        """The maximum over the group, float32 [n]; compiled code goes through torch's functional collective."""
        if torch.compiler.is_compiling():
            from torch.distributed import _functional_collectives as functional

            chosen: Any = dist.group.WORLD if group is None else group
            agreed: Tensor = functional.all_reduce(amaxes, "max", chosen)
            return agreed
        dist.all_reduce(amaxes, dist.ReduceOp.MAX, group)  # type: ignore[arg-type, unused-ignore]
        return amaxes


set_agreement(ProcessGroupAgreement())
