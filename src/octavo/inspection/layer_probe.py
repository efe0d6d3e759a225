"""What FP8 would do to one linear layer, measured beside a pass in high precision.

The model itself runs as it is; each product y = x w^T of a watched weight is remembered with the place of y in the
graph. Once the gradient g = dL/dy is known, the layer is computed again in FP8, and its error e = y_fp8 - y gives

    shift    sum(g e)                the change of the loss to first order, with its sign: L(y + e) - L(y)
    noise    sqrt(sum(g^2 e^2))      its standard deviation, if the errors of the elements were independent

Both sums run over all elements of y of one batch; e is the difference of two products in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from octavo.functional import linear
from octavo.inspection.statistics import operand_statistics
from octavo.inspection.watch import watched_quantizer
from octavo.modules import OUT_DTYPES
from octavo.recipes import OperandName, Recipe
from octavo.runtime import Call, LayerState, plan_linear
from octavo.runtime.update import update_states
from octavo.tensor import Operand, Quantizer

# Of the channels, the share that counts as outliers: the largest 1/32.
OUTLIERS = 32


@dataclass(frozen=True)
class OperandFigures:
    """What FP8 does to one operand of a layer, the worst of all casts that were measured.

    Attributes:
        operand: "input", "weight" or "grad_output".
        sqnr_db: signal over the noise of the cast, dB.
        rest_sqnr_db: the same with the signal of all channels but the largest 1/32, dB: the noise is still that of all.
            Channels are the columns of the matrix: features of an input and a weight, outputs of a gradient.
        underflow: share of the elements that were not 0 and became 0, from 0 to 1.
        saturation: share of the elements beyond the largest code, from 0 to 1.
        kurtosis: fourth central moment over the squared variance: 3 of normal values, 1 of a constant, about 3 K if one
            of K normal channels is much larger than the others.
    """

    operand: str
    sqnr_db: float
    rest_sqnr_db: float
    underflow: float
    saturation: float
    kurtosis: float

    def worst(self, other: OperandFigures | None) -> OperandFigures:
        """The worse of two figures, each by itself."""
        if other is None:
            return self
        return OperandFigures(
            self.operand,
            min(self.sqnr_db, other.sqnr_db),
            min(self.rest_sqnr_db, other.rest_sqnr_db),
            max(self.underflow, other.underflow),
            max(self.saturation, other.saturation),
            max(self.kurtosis, other.kurtosis),
        )


def kurtosis(x: Tensor) -> float:
    """E[(x - E x)^4] / E[(x - E x)^2]^2 over the finite elements of x, of any shape; 1 of a constant."""
    values = x.detach().double()
    values = values[values.isfinite()]
    if not values.numel():
        return 1.0
    squares = (values - values.mean()).square()
    variance = squares.mean().item()
    return squares.square().mean().item() / variance**2 if variance > 0 else 1.0


def rest_sqnr_db(x: Tensor, sqnr_db: float) -> float:
    """The SQNR, dB, that x [M, K] has beside its largest ceil(K / 32) channels, given that of all; K > 1.

    A floating-point cast rounds an outlier as finely as anything, relative to itself. In a sum over K its absolute
    error stands beside what the other channels have to say: this is how much of that is left.
    """
    energy = x.detach().double().nan_to_num(0.0, 0.0, 0.0).square().sum(0).sort().values
    total, rest = energy.sum().item(), energy[: len(energy) - -(-len(energy) // OUTLIERS)].sum().item()
    if not math.isfinite(sqnr_db) or rest == 0:
        return sqnr_db  # nothing was lost, or there is no rest to be lost
    return sqnr_db + 10 * math.log10(rest / total)


@torch.no_grad()
def operand_figures(operand: OperandName, x: Tensor, result: Operand) -> OperandFigures | None:
    """The figures of one cast of x [M, K]; None of an empty one."""
    seen = operand_statistics(x, result)
    if seen is None:
        return None
    cast = seen[0]
    rest = rest_sqnr_db(x, cast.sqnr_db)
    return OperandFigures(operand, cast.sqnr_db, rest, cast.underflow, cast.saturation, kurtosis(x))


class LayerProbe:
    """The figures of one layer, gathered product by product.

    Args:
        recipe: the layer's.
        device: where its weight lies.

    Attributes:
        operands: figures by operand; those of a gradient that no FP8 product takes are missing.
        changes: of each batch that reached the layer, the larger of |shift| and noise, in units of the loss.
        ran_without_gradients: it has been called where no gradient could be had.
    """

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        # Ranks measure by themselves: one may do so alone.
        alone = recipe.delayed is not None and recipe.delayed.reduce_amax
        self.recipe = recipe.replaced(reduce_amax=False) if alone else recipe
        self.operands: dict[str, OperandFigures] = {}
        self.changes: list[float] = []
        self.ran_without_gradients = False
        self._state = LayerState(device)
        self._state.takes_part = False
        self._state.measure_next()
        self._shift = self._noise = 0.0
        self._reached = False

    @property
    def change(self) -> float:
        """The mean of `changes`; 0 of a layer that no loss depended on."""
        return sum(self.changes) / len(self.changes) if self.changes else 0.0

    @torch.no_grad()
    def measure(self, x: Tensor, weight: Tensor, dtype: torch.dtype, gradient: Tensor) -> None:
        """One product: x [..., K], weight [N, K], the dtype of y, and dL/dy [..., N]."""
        given, g = x.to(dtype).reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        state, delayed = self._state, self.recipe.delayed is not None
        if delayed and not state.follows(self.recipe):
            state.adopt_recipe(self.recipe)
        first = state.input.from_data, state.weight.from_data, state.grad_output.from_data
        plan = plan_linear(Call(self.recipe, delayed, from_data=first), state, "", self._observe)
        error = linear(given, weight, None, plan, torch.float32) - given.float() @ weight.float().t()
        if plan.dgrad_fp8 or plan.wgrad_fp8:
            plan.grad_output(g, plan.dgrad_fp8, plan.wgrad_fp8)
        change = error.double() * g.double()
        self._shift += change.sum().item()
        self._noise += change.square().sum().item()
        self._reached = True

    def end_batch(self) -> None:
        """Close a batch; with delayed scaling, the next one is cast with the scales that follow from it."""
        if self._reached:
            change = max(abs(self._shift), math.sqrt(self._noise))
            self.changes.append(change if math.isfinite(change) else math.inf)
            update_states([self._state], None)
        self._shift = self._noise = 0.0
        self._reached = False

    def _observe(self, operand: OperandName, quantizer: Quantizer) -> Quantizer:
        def record(x: Tensor, result: Operand) -> None:
            figures = operand_figures(operand, x, result)
            if figures is not None:
                self.operands[operand] = figures.worst(self.operands.get(operand))

        return watched_quantizer(quantizer, record)


class WatchedWeight(NamedTuple):
    """A weight whose products are measured: [N, K], or [K, N] as Conv1D of transformers has it."""

    transposed: bool
    probe: LayerProbe


# The ids of the parameters that make up a weight: one, or several that a call joins.
Parts = tuple[int, ...]


class _Product(NamedTuple):
    probe: LayerProbe
    x: Tensor
    weight: Tensor  # [N, K]
    dtype: torch.dtype
    edge: GradientEdge


class ProductRecorder(TorchFunctionMode):
    """Context: remembers each product that a watched weight enters, wherever in the model it is computed.

    Nothing of the model is touched, and neither its numbers nor its graph change, except that an output which needs no
    gradient is given one, so that layers before the first trainable one are measured too.

    Args:
        weights: by the parameters that make them up.
    """

    def __init__(self, weights: Mapping[Parts, WatchedWeight]) -> None:
        super().__init__()
        self._weights = weights
        self._products: list[_Product] = []
        # By id, weights that a call has joined of their parts; held, since an id is one tensor's only as long.
        self._joined: dict[int, tuple[Tensor, WatchedWeight]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, and look whether it was the product of a watched weight."""
        result = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear:
            x, weight = _arguments(("input", "weight"), args, kwargs)
        elif func is torch.addmm:
            _, x, weight = _arguments(("input", "mat1", "mat2"), args, kwargs)
        else:
            if func is torch.cat:
                self._note_joined(_arguments(("tensors",), args, kwargs)[0], result)
            return result
        watched = self._weights.get((id(weight),)) or self._joined.get(id(weight), (None, None))[1]
        if watched is None or watched.transposed is not (func is torch.addmm):
            return result
        if not torch.is_grad_enabled():
            watched.probe.ran_without_gradients = True
            return result
        matrix = weight.detach()
        return self._remembered(watched.probe, x, matrix.t() if watched.transposed else matrix, result)

    def _note_joined(self, parts: Any, result: Tensor) -> None:
        watched = self._weights.get(tuple(id(part) for part in parts)) if isinstance(parts, (tuple, list)) else None
        if watched is not None:
            self._joined[id(result)] = result, watched

    def _remembered(self, probe: LayerProbe, x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        if y.dtype not in OUT_DTYPES or not y.numel():
            return y
        handed_on = y
        if not y.requires_grad:
            y = y.detach().requires_grad_()
            handed_on = y.clone()  # a leaf could not be changed in place
        # The place in the graph stays what it is, also if y is changed in place.
        self._products.append(_Product(probe, x.detach(), weight, y.dtype, get_gradient_edge(y)))
        return handed_on

    def measure(self, loss: Tensor) -> None:
        """Run the backward of `loss`, and measure each product that it depends on."""
        products, self._products = self._products, []
        if not products:
            return
        gradients = torch.autograd.grad(loss, [one.edge for one in products], allow_unused=True)
        for product, gradient in zip(products, gradients, strict=True):
            if gradient is not None:
                product.probe.measure(product.x, product.weight, product.dtype, gradient)


def _arguments(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[Any]:
    return [args[place] if place < len(args) else (kwargs or {}).get(name) for place, name in enumerate(names)]
