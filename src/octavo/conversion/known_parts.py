"""Activations and normalisations of torch, transformers and timm that Octavo's kernels know, told by their classes.

Of somebody else's library a class is told by its name and package, so that the library need not be installed. A module
whose forward was replaced, on the instance or in a subclass, is not known.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from octavo.kernels.norm_cast import Norm
from octavo.modules import LayerNorm, RMSNorm
from octavo.modules.norm import norm_of

# (package, class) -> the name of `octavo.kernels.activations`. Each is that function, to float32's rounding.
_ACTIVATIONS = {
    ("torch", "SiLU"): "silu",
    ("torch", "ReLU"): "relu",
    ("torch", "Sigmoid"): "sigmoid",
    ("transformers", "GELUActivation"): "gelu_erf",
    ("transformers", "NewGELUActivation"): "gelu_tanh",
    ("transformers", "GELUTanh"): "gelu_tanh",
    ("transformers", "PytorchGELUTanh"): "gelu_tanh",
    ("transformers", "FastGELUActivation"): "gelu_tanh",
    ("transformers", "QuickGELUActivation"): "qgelu",
    ("transformers", "SiLUActivation"): "silu",
    ("transformers", "ReLUSquaredActivation"): "srelu",
    ("timm", "GELU"): "gelu_erf",
    ("timm", "GELUTanh"): "gelu_tanh",
    ("timm", "QuickGELU"): "qgelu",
}
# Those whose forward is weight * (x / sqrt(mean of squares + variance_epsilon)).
_RMS_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")


class KnownNorm(NamedTuple):
    """A normalisation over the last dimension, as `octavo.modules.norm.norm_of` takes it."""

    normalization: str
    eps: float
    zero_centered: bool

    def through(self, dtype: Any) -> Norm:
        """As the kernels take it, handed on in `dtype`."""
        return norm_of(self.normalization, self.eps, self.zero_centered, dtype)


def package_of(kind: type[Any]) -> str:
    """The library that a class is defined in."""
    return kind.__module__.partition(".")[0]


def is_replaced(module: nn.Module) -> bool:
    """True if the forward was replaced on the instance."""
    return "forward" in module.__dict__


def activation_name(module: Any) -> str | None:
    """The name of `octavo.kernels.activations`, or None of one that is not known."""
    kind = type(module)
    if not isinstance(module, nn.Module) or is_replaced(module):
        return None
    if kind is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu_erf"
    return _ACTIVATIONS.get((package_of(kind), kind.__name__))


def known_norm(module: nn.Module, kind: type[nn.Module] | None = None) -> KnownNorm | None:
    """What a normalisation computes, or None of one that is not known.

    kind: its class; None for that which it has.
    """
    kind = kind or type(module)
    one: Any = module
    if is_replaced(module):
        return None
    name = package_of(kind), kind.__name__
    if kind in (nn.LayerNorm, LayerNorm) or name == ("timm", "LayerNorm"):
        wide = len(one.normalized_shape) == 1
        return KnownNorm("LayerNorm", one.eps, getattr(one, "zero_centered_gamma", False)) if wide else None
    if kind in (nn.RMSNorm, RMSNorm):
        known = len(one.normalized_shape) == 1 and one.eps is not None
        return KnownNorm("RMSNorm", one.eps, getattr(one, "zero_centered_gamma", False)) if known else None
    if name[0] == "transformers" and name[1] in _RMS_NORMS:
        return KnownNorm("RMSNorm", one.variance_epsilon, False)
    return None
