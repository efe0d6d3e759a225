"""What becomes of each kind of layer when it is frozen, and how the inputs of its products are seen beforehand.

    nn.Linear, Conv1D, octavo.Linear, SplitLinear     FrozenLinear             its input
    LayerNormLinear, its weight in parts too          FrozenLayerNormLinear    n = norm(x)
    LayerNormMLP                                      FrozenLayerNormMLP       n and f(z)
    GroupedLinear                                     FrozenGroupedLinear      the tokens of each expert

A weight that is kept in parts is joined; one that exists in FP8 alone is taken by its values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from octavo.conversion.converted import is_conv1d
from octavo.functional import activate
from octavo.functional.grouped_linear import bounds_of
from octavo.functional.grouped_sizes import sizes_on_host
from octavo.inference.frozen_grouped_linear import FrozenGroupedLinear
from octavo.inference.frozen_layer import FrozenLayer
from octavo.inference.frozen_layernorm_linear import FrozenLayerNormLinear
from octavo.inference.frozen_layernorm_mlp import FrozenLayerNormMLP
from octavo.inference.frozen_linear import FrozenLinear
from octavo.inference.scheme import Scheme
from octavo.modules import GroupedLinear, LayerNormLinear, LayerNormMLP, MLPPart
from octavo.modules.layernorm_mlp import ACTIVATIONS
from octavo.modules.split_linear import SplitLinear
from octavo.tensor import QuantizedTensor

# What a layer is called with.
Arguments = tuple[Any, ...]
Keywords = Mapping[str, Any]


class Freezing(ABC):
    """What is known of one kind of layer."""

    @abstractmethod
    def frozen(self, layer: Any, scheme: Scheme, scales: Sequence[float | None]) -> FrozenLayer:
        """Its frozen form; scales are those of the inputs of its products."""

    @abstractmethod
    def inputs(self, layer: Any, arguments: Arguments, keywords: Keywords) -> Iterator[tuple[str, Tensor]]:
        """(what to add to the name of the layer, input of the product) of each of its products."""

    def added_bias(self, part: MLPPart) -> Tensor | None:
        """The bias that the product of one of its parts adds."""
        bias: Tensor | None = part.bias
        return bias


class _Plain(Freezing):
    def frozen(self, layer: Any, scheme: Scheme, scales: Sequence[float | None]) -> FrozenLayer:
        return FrozenLinear(_matrix(layer), layer.bias, scheme, scales[0])

    def inputs(self, layer: Any, arguments: Arguments, keywords: Keywords) -> Iterator[tuple[str, Tensor]]:
        yield "", _first(arguments, keywords)


class _LayerNormLinear(Freezing):
    def frozen(self, layer: Any, scheme: Scheme, scales: Sequence[float | None]) -> FrozenLayer:
        return FrozenLayerNormLinear(layer, _values(layer.weight), layer.bias, scheme, scales[0])

    def inputs(self, layer: Any, arguments: Arguments, keywords: Keywords) -> Iterator[tuple[str, Tensor]]:
        yield "", layer.normalised(_first(arguments, keywords))


class _LayerNormMLP(Freezing):
    def frozen(self, layer: Any, scheme: Scheme, scales: Sequence[float | None]) -> FrozenLayer:
        weights = _values(layer.fc1_weight), _values(layer.fc2_weight)
        biases = layer.fc1_bias, layer.fc2_bias
        return FrozenLayerNormMLP(layer, weights, biases, scheme, (scales[0], scales[1]))

    def inputs(self, layer: Any, arguments: Arguments, keywords: Keywords) -> Iterator[tuple[str, Tensor]]:
        n = layer.normalised(_first(arguments, keywords))
        yield ".fc1", n
        # In high precision, whatever the layer itself runs in.
        z = nn.functional.linear(n, _values(layer.fc1_weight), layer.fc1_bias)
        yield ".fc2", activate(z, ACTIVATIONS[layer.activation])

    def added_bias(self, part: MLPPart) -> Tensor | None:
        owner: Any = part.owner
        _, fc1_bias, _, fc2_bias = owner.taken_parameters()
        bias: Tensor | None = fc1_bias if part.prefix == "fc1" else fc2_bias
        return bias


class _GroupedLinear(Freezing):
    def frozen(self, layer: Any, scheme: Scheme, scales: Sequence[float | None]) -> FrozenLayer:
        return FrozenGroupedLinear([_values(weight) for weight in layer.weights], layer.biases, scheme, scales)

    def inputs(self, layer: Any, arguments: Arguments, keywords: Keywords) -> Iterator[tuple[str, Tensor]]:
        splits = keywords["m_splits"] if "m_splits" in keywords else arguments[1]
        x = _first(arguments, keywords)
        rows = x.reshape(-1, x.shape[-1])
        for index, (start, stop) in enumerate(bounds_of(sizes_on_host(splits, layer.num_gemms, "experts"))):
            # An expert that no token reached is one that no batch reached.
            if stop > start:
                yield f".expert{index}", rows[start:stop]

    def added_bias(self, part: MLPPart) -> Tensor | None:
        owner: Any = part.owner
        bias: Tensor | None = owner.biases[int(part.prefix.removeprefix("expert"))]
        return bias


_PLAIN = _Plain()
_OWN: tuple[tuple[type[nn.Module], Freezing], ...] = (
    (LayerNormLinear, _LayerNormLinear()),
    (LayerNormMLP, _LayerNormMLP()),
    (GroupedLinear, _GroupedLinear()),
)


def freezes(module: nn.Module) -> Freezing | None:
    """How a layer is frozen; None for what is no linear layer, and for parts of one."""
    for kind, freezing in _OWN:
        if isinstance(module, kind):
            return freezing
    return _PLAIN if isinstance(module, (nn.Linear, SplitLinear)) or is_conv1d(module) else None


def frozen_form(module: nn.Module, scheme: Scheme, scales: Sequence[float | None]) -> FrozenLayer:
    """A layer's frozen form.

    Args:
        module: the layer.
        scheme: of serving.
        scales: of the inputs of its products, for a static scheme.
    """
    return (freezes(module) or _PLAIN).frozen(module, scheme, scales)


def _first(arguments: Arguments, keywords: Keywords) -> Tensor:
    """The first tensor that a layer is called with."""
    given = (*arguments, *keywords.values())
    for value in given:
        if isinstance(value, Tensor):
            return value
    shown = ", ".join(f"a {type(value).__name__}" for value in given) or "nothing"
    raise ValueError(
        f"octavo.calibrate: a linear layer is called with {shown}, and its input must be a tensor: look at the batches"
    )


def _matrix(module: Any) -> Tensor:
    """The weight's values [N, K]."""
    values = _values(module.weight)
    return values.t() if is_conv1d(module) else values


def _values(weight: Any) -> Tensor:
    values: Tensor = weight.detach()
    return values.dequantize() if isinstance(values, QuantizedTensor) else values


__all__ = ["Freezing", "freezes", "frozen_form"]
