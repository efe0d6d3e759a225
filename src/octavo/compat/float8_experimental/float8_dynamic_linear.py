"""Float8DynamicLinear: `octavo.Linear` with current scaling of all three operands, on without any context."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.compat.float8_experimental.float8_linear import Float8Options, refuse_emulation, twin
from octavo.modules import CachedWeight, Linear
from octavo.recipes import CurrentScaling


class Float8DynamicLinear(Linear):
    """`nn.Linear` in FP8, every scale measured from the tensor at hand; no state and no sync."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.become_float8(None, Float8Options())

    def become_float8(self, name: str | None, options: Float8Options) -> None:
        """Give a linear layer of this class its recipe; parameters stay as they are."""
        self.become_fp8(CurrentScaling(), name)
        self.options = options

    @classmethod
    def from_float(cls, mod: nn.Linear, emulate: bool = False) -> Float8DynamicLinear:
        """A Float8DynamicLinear beside `mod`, with the same Parameter objects, hooks and flags."""
        new = twin(mod)
        new.__class__ = cls
        assert isinstance(new, Float8DynamicLinear), "the class it has just been given"
        new.become_float8(None, Float8Options(emulate=emulate))
        return new

    def forward(self, input: Tensor, *, cached_weight: CachedWeight | None = None) -> Tensor:
        """y = x w^T + b -> [..., out_features]."""
        refuse_emulation(self.options.emulate, input)
        return self.run(input, cached_weight)
