"""Which of Octavo's layers are more than one matrix product, and what a layer is called in reports."""

from __future__ import annotations

from torch import nn

from octavo.conversion.converted import is_conv1d, original_class
from octavo.modules import FP8LinearMixin, MLPPart
from octavo.modules.split_linear import SplitLinear


def is_fused(module: nn.Module) -> bool:
    """True for a linear part with something before or around it: LayerNormLinear, parts of an MLP, experts."""
    plain = isinstance(module, (nn.Linear, SplitLinear)) or is_conv1d(module)
    return isinstance(module, FP8LinearMixin) and not plain


def kind_of(module: nn.Module) -> str:
    """The name of the class that a layer had before it was converted; of a part, that of the layer it belongs to."""
    if isinstance(module, MLPPart):
        return type(module.owner).__name__
    return (original_class(type(module)) if isinstance(module, FP8LinearMixin) else type(module)).__name__
