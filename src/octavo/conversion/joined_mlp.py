"""The MLP of somebody's model, computed as one: its class in place, its children, names and states kept.

A derived class calls `octavo.functional.mlp` with the parameters and FP8 states of the layers that it holds. Where
these cannot run as one (FP8 is off, a layer was replaced, somebody listens to an inner module by a hook, dropout is on
between them, a class was patched) the forward of the class before runs, which calls them one by one.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from octavo.conversion.converted import runs_plainly
from octavo.conversion.known_parts import activation_name, is_replaced
from octavo.conversion.structures import MLPS, MLPStructure, Path, is_unchanged, part
from octavo.functional.mlp import MLP, Layer, mlp
from octavo.modules import OUT_DTYPES, FixedProduct, FP8LinearMixin, LayerProduct
from octavo.modules.fixed_product import refusing_gradient
from octavo.modules.layernorm_linear import fp8_dtype
from octavo.modules.norm import handed_on_dtype
from octavo.runtime import layer_call


class JoinedMLP(nn.Module):
    """What the derived classes of all MLPs share.

    Attributes:
        structure, paths: where its parts are.
        fused_from: the class that it was.
        one_by_one: it stays of this class, and its layers run one by one all the same.
    """

    structure: ClassVar[MLPStructure]
    paths: ClassVar[tuple[Path, ...]]
    fused_from: ClassVar[type[nn.Module]]
    one_by_one: bool = False

    def joined(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """The output of the method that is computed as one; None if the layers have to run one by one."""
        if len(args) != 1 or kwargs or self.one_by_one or _somebody_listens_to_all():
            return None
        x, structure = args[0], self.structure
        parts = [part(self, path) for path in self.paths]
        if running_reason(structure, parts) or not is_unchanged(structure, self, self.fused_from):
            return None
        count = len(structure.first) + 1
        fixed = isinstance(parts[0], FixedProduct)
        products = _fixed_products(parts[:count], x) if fixed else _products(parts[:count], x)
        if products is None:
            return None
        made = [Layer(product.weight, product.bias, product.operand) for product in products]
        activation = activation_name(parts[count])
        assert activation is not None, "looked at before"
        setup = MLP(activation, tuple(product.plan for product in products[:-1]), products[-1].plan, fp8_dtype(x))
        if not fixed:
            return structure.finish(self, mlp(x, tuple(made[:-1]), made[-1], setup), x)
        with torch.no_grad():
            y = mlp(x, tuple(made[:-1]), made[-1], setup)
        return structure.finish(self, refusing_gradient(x, y), x)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self.fused_from, self.structure.classes), self.__getstate__()


def _products(layers: list[FP8LinearMixin], x: Any) -> list[LayerProduct] | None:
    """What the layers compute with; None where FP8 is off, or where x does not fit: that error is the layer's own."""
    weights = [layer.matrix() for layer in layers]
    if x.shape[-1:] != weights[0].shape[1:]:
        return None
    calls = [layer_call(layer.delayed_state, layer.recipe, layer.layer_name) for layer in layers]
    if any(call.recipe is None for call in calls):
        return None
    plans = [layer.planned(call, weight) for layer, call, weight in zip(layers, calls, weights, strict=True)]
    return [
        LayerProduct(plan, weight, layer.added_bias(), layer.kept_operand(weight, plan, None))
        for layer, weight, plan in zip(layers, weights, plans, strict=True)
    ]


def _fixed_products(layers: list[FixedProduct], x: Any) -> list[LayerProduct] | None:
    """The same of layers that cast an input as it comes: not under a torch.autocast that would give another dtype."""
    if not isinstance(x, Tensor) or x.dtype not in OUT_DTYPES or handed_on_dtype(x) != x.dtype:
        return None
    found = [layer.product(x.dtype) for layer in layers]
    made = [product for product in found if product is not None]
    return made if len(made) == len(layers) and x.shape[-1:] == made[0].weight.shape[1:] else None


class _JoinedForward(JoinedMLP):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As before."""
        y = self.joined(*args, **kwargs)
        return super().forward(*args, **kwargs) if y is None else y


class _JoinedChunk(JoinedMLP):
    # (Whoever calls it counts its arguments.)
    def feed_forward_chunk(self, attention_output: Tensor) -> Any:
        """As before."""
        y = self.joined(attention_output)
        return super().feed_forward_chunk(attention_output) if y is None else y  # type: ignore[misc]


_BY_METHOD: dict[str, type[JoinedMLP]] = {"forward": _JoinedForward, "feed_forward_chunk": _JoinedChunk}
_CLASSES: dict[type[nn.Module], type[JoinedMLP]] = {}


def joined_class(kind: type[nn.Module], structure: MLPStructure) -> type[JoinedMLP]:
    """The class that a module of class `kind`, recognised as `structure`, becomes."""
    if kind not in _CLASSES:
        # Of the same name: blocks are also looked for by the names of their classes.
        namespace = {
            "__doc__": f"{kind.__name__} whose layers run as one in FP8.",
            "__qualname__": kind.__qualname__,
            "fused_from": kind,
            "structure": structure,
            "paths": structure.parts,
        }
        _CLASSES[kind] = type(kind.__name__, (_BY_METHOD[structure.method], kind), namespace)
    return _CLASSES[kind]


def running_reason(structure: MLPStructure, parts: list[Any]) -> str:
    """Why the layers have to run one by one as things stand; empty if they may run as one.

    parts: the modules at the structure's `parts`.
    """
    for path, module in zip(structure.parts, parts, strict=True):
        if is_listened_to(module):
            return f"a hook listens to {'.'.join(path)}, or its forward was replaced"
    count = len(structure.first) + 1
    for layer in parts[:count]:
        if not runs_plainly(layer):
            return "a layer is not in FP8"
        if isinstance(layer, FixedProduct) != isinstance(parts[0], FixedProduct):
            return "some layers are frozen, and others are not"
    if activation_name(parts[count]) is None:
        return "the activation is not known"
    for between in parts[count + 1 : count + 1 + len(structure.between)]:
        if not _is_without_effect(between):
            return f"a {type(between).__name__} lies between the activation and the last layer"
    return ""


def is_listened_to(module: Any) -> bool:
    """True if somebody would notice that a module is not called."""
    return isinstance(module, nn.Module) and bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or is_replaced(module)
    )


def _somebody_listens_to_all() -> bool:
    """True if hooks are registered for whatever module is called. (Compiled code calls none.)"""
    return not torch.compiler.is_compiling() and _has_any_global_hook()


def _is_without_effect(module: Any) -> bool:
    kind = type(module)
    return kind is nn.Identity or (kind is nn.Dropout and (module.p == 0 or not module.training))


def _rebuild(kind: type[nn.Module], classes: tuple[str, ...]) -> nn.Module:
    structure = next(structure for structure in MLPS if structure.classes == classes)
    return nn.Module.__new__(joined_class(kind, structure))
