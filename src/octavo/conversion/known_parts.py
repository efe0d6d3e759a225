"""Activations and normalisations of torch, transformers and timm that Octavo's kernels know, told by their classes.

Of somebody else's library a class is told by its name and package, so that the library need not be installed. A module
whose forward was replaced, on the instance, on its class or in a subclass, is not known.
"""

from __future__ import annotations

import functools
import sys
from types import FunctionType
from typing import Any, NamedTuple

import torch
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
        # (Traced code warns of what is kept by functools.)
        build = norm_of if torch.compiler.is_compiling() else _norm_of
        return build(self.normalization, self.eps, self.zero_centered, dtype)


def package_of(kind: type[Any]) -> str:
    """The library that a class is defined in."""
    return kind.__module__.partition(".")[0]


def is_replaced(module: nn.Module) -> bool:
    """True if the forward was replaced on the instance."""
    # (Read as an attribute first: by that alone compiled code is made to see a later replacement.)
    return getattr(module, "forward", None) is not None and "forward" in module.__dict__


def is_as_written(kind: type[nn.Module], method: str = "forward") -> bool:
    """True if the method of a class is the function that the class's own module defines: nobody patched the class."""
    function = getattr(kind, method, None)
    if function is None or function is _WRITTEN.get((kind, method)):
        return function is not None
    # (In compiled code nothing new is looked at: what is fused has been, when it was converted.)
    if torch.compiler.is_compiling() or not _is_written(kind, method, function):
        return False
    _WRITTEN[kind, method] = function
    return True


def _is_written(kind: type[nn.Module], method: str, function: Any) -> bool:
    owner = next(base for base in kind.__mro__ if method in base.__dict__)
    module = sys.modules.get(owner.__module__)
    return (
        type(function) is FunctionType
        and module is not None
        and function.__globals__ is vars(module)
        and function.__code__.co_filename == getattr(module, "__file__", None)
        and function.__code__.co_name == method
        and function.__qualname__ == f"{owner.__qualname__}.{method}"
        and not hasattr(function, "__wrapped__")
    )


def activation_name(module: Any) -> str | None:
    """The name of `octavo.kernels.activations`, or None of one that is not known."""
    kind = type(module)
    if not isinstance(module, nn.Module) or is_replaced(module) or not is_as_written(kind):
        return None
    if kind is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu_erf"
    return _ACTIVATIONS.get((package_of(kind), kind.__name__))


def known_norm(module: nn.Module, kind: type[nn.Module] | None = None) -> KnownNorm | None:
    """What a normalisation computes, or None of one that is not known.

    kind: its class; None for that which it has.
    """
    kind, one = kind or type(module), module.__dict__
    if kind not in _FORMS:
        _FORMS[kind] = _norm_form(kind)
    form = _FORMS[kind]
    if form is None or "forward" in one or not is_as_written(kind):
        return None
    normalization, eps_name = form
    eps = one[eps_name]
    if eps is None or len(one.get("normalized_shape", (0,))) != 1:
        return None
    return KnownNorm(normalization, eps, one.get("zero_centered_gamma", False))


def _norm_form(kind: type[nn.Module]) -> tuple[str, str] | None:
    """Of a class, which normalisation it is and what its epsilon is called; None of one that is not known."""
    name = package_of(kind), kind.__name__
    if kind in (nn.LayerNorm, LayerNorm) or name == ("timm", "LayerNorm"):
        return "LayerNorm", "eps"
    if kind in (nn.RMSNorm, RMSNorm):
        return "RMSNorm", "eps"
    return ("RMSNorm", "variance_epsilon") if name[0] == "transformers" and name[1] in _RMS_NORMS else None


# The methods that were found as they are written, by class and name.
_WRITTEN: dict[tuple[type[nn.Module], str], Any] = {}
# A training asks for the same few again and again.
_FORMS: dict[type[nn.Module], tuple[str, str] | None] = {}
_norm_of = functools.cache(norm_of)
