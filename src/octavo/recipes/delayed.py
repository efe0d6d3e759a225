"""DelayedScaling: scales from the amaxes of past steps; one pass over memory a cast."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.recipes.recipe import (
    HYBRID,
    DelayedUpdate,
    FormatChoice,
    Gemm,
    OperandName,
    Recipe,
    keep_format,
    operand_spec,
)
from octavo.scaling import AmaxComputeAlgo
from octavo.tensor import QuantizeSpec

# Beyond this a scale of ordinary data would leave float32's range.
_LARGEST_MARGIN = 64


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(Recipe):
    """Delayed scaling of all three operands, one scale a tensor.

    Attributes:
        format: HYBRID (E4M3 forward, E5M2 gradients), E4M3 or E5M2.
        margin: scales leave 2^margin of headroom.
        amax_history_len: L, for how many updates an amax is remembered; scales by "most_recent" are the same with any.
        amax_compute_algo: "max" of the window, its "most_recent", or a function of the window [L] (the current step at
            position 0) that returns a scalar tensor.
        reduce_amax: with torch.distributed, amaxes agree over the group.
        initialise_from_first_batch: until the first update, scales are measured from the data instead of being 1.
    """

    format: FormatChoice = HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: AmaxComputeAlgo = "max"
    reduce_amax: bool = True
    initialise_from_first_batch: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_format(self)
        if type(self.amax_history_len) is not int or self.amax_history_len < 1:
            raise ValueError(f"amax_history_len is {self.amax_history_len!r}: expected an integer of 1 or more")
        if type(self.margin) is not int or abs(self.margin) > _LARGEST_MARGIN:
            raise ValueError(
                f"margin is {self.margin!r}: expected an integer from {-_LARGEST_MARGIN} to {_LARGEST_MARGIN},"
                " headroom is 2^margin"
            )
        if not (self.amax_compute_algo in ("max", "most_recent") or callable(self.amax_compute_algo)):
            raise ValueError(
                f"amax_compute_algo is {self.amax_compute_algo!r}: expected 'max', 'most_recent' or a function"
            )
        self.complete()

    def spec(self, gemm: Gemm, operand: OperandName) -> QuantizeSpec | None:
        """One scale a tensor, from its history, the same in every product."""
        return operand_spec(self, gemm, operand, scaling="delayed")

    def histories(self) -> DelayedUpdate:
        """How they are updated."""
        return DelayedUpdate(
            amax_history_len=self.amax_history_len,
            algorithm=self.amax_compute_algo,
            margin=self.margin,
            reduce_amax=self.reduce_amax,
            initialise_from_first_batch=self.initialise_from_first_batch,
        )
