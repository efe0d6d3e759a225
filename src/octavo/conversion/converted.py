"""The FP8 class of a linear layer's class: what a layer becomes in place, and what it came from.

`nn.Linear` becomes `octavo.Linear`. A subclass of it that keeps its forward becomes a class derived from that
subclass, so that `isinstance` still finds it; so does `Conv1D` of transformers, a Linear whose weight is stored as
[in, out].
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from octavo.modules import CachedWeight, FixedProduct, FP8LinearMixin, Linear


def is_conv1d(module: nn.Module) -> bool:
    """True for transformers' Conv1D (GPT-2), converted or not; by name, so that transformers need not be installed."""
    kind: type[nn.Module] = type(module).__dict__.get("converted_from", type(module))
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers")


class _Rows(FP8LinearMixin):
    """Forward of a subclass of nn.Linear."""

    def forward(self, input: Tensor, *, cached_weight: CachedWeight | None = None) -> Tensor:
        """As `octavo.Linear.forward`."""
        return self.run(input, cached_weight)

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind = type(self)
        return _rebuild, (original_class(kind), issubclass(kind, _Columns)), self.__getstate__()


class _Columns(_Rows):
    """Forward of a Conv1D, whose weight is [in, out]."""

    def matrix(self) -> Tensor:
        """The weight as [out, in]."""
        weight: Tensor = self.weight.t()
        return weight


_CLASSES: dict[type[nn.Module], type[FP8LinearMixin]] = {nn.Linear: Linear}


def fp8_class(kind: type[nn.Module], transposed: bool) -> type[FP8LinearMixin]:
    """The FP8 class of layers of class `kind`; `transposed` if its weight is stored as [in, out]."""
    if kind not in _CLASSES:
        base = _Columns if transposed else _Rows
        namespace = {"__doc__": f"{kind.__name__} with FP8 matrix products.", "converted_from": kind}
        _CLASSES[kind] = type(f"FP8{kind.__name__}", (base, kind), namespace)
    return _CLASSES[kind]


def runs_plainly(module: object) -> bool:
    """True for an FP8 layer that does nothing but its matrix product, so that others may compute that for it."""
    if isinstance(module, FixedProduct):
        return module.is_plain
    return isinstance(module, FP8LinearMixin) and type(module).forward in (Linear.forward, _Rows.forward)


def original_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that a layer of FP8 class `kind` had before, or has when it is converted back.

    A class of somebody's own, derived from an FP8 one, stays what it is.
    """
    found: type[nn.Module] = kind.__dict__.get("converted_from", nn.Linear if kind is Linear else kind)
    return found


def _rebuild(kind: type[nn.Module], transposed: bool) -> nn.Module:
    return nn.Module.__new__(fp8_class(kind, transposed))
