"""Recipe: which format and scaling for which operand of which matrix product. Frozen data, complete when built.

A Linear runs three products, and each names its operands:

    fprop   y  = x w^T     input, weight
    dgrad   dx = dy w      grad_output, weight
    wgrad   dw = dy^T x    grad_output, input

A recipe answers one question, `spec(gemm, operand)`; nobody asks it its name. None means that the product runs in high
precision, and then it does so for both operands.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from octavo.formats import E4M3, E5M2, Format, Rounding, format_given
from octavo.kernels import Accumulation
from octavo.tensor import FieldsByName, QuantizeSpec

Gemm = Literal["fprop", "dgrad", "wgrad"]
OperandName = Literal["input", "weight", "grad_output"]
GEMMS: tuple[Gemm, ...] = ("fprop", "dgrad", "wgrad")
OPERANDS: tuple[OperandName, ...] = ("input", "weight", "grad_output")


@dataclass(frozen=True)
class FormatPair:
    """The format of the forward operands and that of the gradients."""

    forward: Format
    backward: Format


HYBRID = FormatPair(E4M3, E5M2)

# As of `octavo.quantize`, a name or a dtype will do.
FormatChoice = FormatPair | Format | torch.dtype | str


@dataclass(frozen=True, kw_only=True)
class Accumulate(FieldsByName):
    """How each product sums: "fast" or "precise", see `octavo.kernels.scaled_mm`.

    wgrad's K is the number of tokens, and a fast sum of that many same-sign products loses several per cent on Hopper.
    """

    fprop: Accumulation = "fast"
    dgrad: Accumulation = "precise"
    wgrad: Accumulation = "precise"

    def __post_init__(self) -> None:
        for gemm in GEMMS:
            if getattr(self, gemm) not in ("fast", "precise"):
                raise ValueError(f"accumulate.{gemm} is {getattr(self, gemm)!r}: expected 'fast' or 'precise'")


class LinearSpecs(NamedTuple):
    """What a recipe says of the three products of a Linear.

    Attributes:
        input, weight, grad_output: the operands' specs as they enter the first of their two products, by rows.
        dgrad_fp8, wgrad_fp8: False runs that product in high precision.
        input_t, weight_t, grad_output_t: their specs as they enter the other one, transposed: input and grad_output
            wgrad, weight dgrad. The same object where there is one spec for both.
    """

    input: QuantizeSpec
    weight: QuantizeSpec
    grad_output: QuantizeSpec
    dgrad_fp8: bool
    wgrad_fp8: bool
    input_t: QuantizeSpec
    weight_t: QuantizeSpec
    grad_output_t: QuantizeSpec

    @property
    def forward_draws(self) -> bool:
        """True if codes that a forward makes are rounded by chance: another forward of the same would make others."""
        return any(spec.rounding == "stochastic" for spec in (self.input, self.input_t, self.weight, self.weight_t))


@dataclass(frozen=True, kw_only=True)
class Recipe(FieldsByName, ABC):
    """What all recipes share.

    Attributes:
        accumulate: how each product sums.
        backward: "fp8", or "high_precision": dgrad and wgrad run in the dtype of the forward.
        saved_input: what a layer keeps of its input for an FP8 wgrad. "fp8": its codes, one byte an element.
            "high_precision": the input itself, cast again in the backward to the same codes. That is less where others
            keep the input anyway (the output of attention), and in compiled code also where the compiler can make it
            again (the output of a norm or an activation); in eager code it is mostly more.
        saved_weight: what a layer keeps of its weight for an FP8 dgrad. "fp8": its codes, one byte a parameter.
            "high_precision": nothing but the weight, which is there anyway, cast again in the backward to the same
            codes.
        grad_output_rounding: of the codes of gradients. "nearest"; or "stochastic", by chance and unbiased, decided by
            torch's seed; see `octavo.kernels.stochastic_cast` for what it costs.
        overrides: regular expressions on layer names, and the recipe of the layers they match (first match wins), None
            for high precision. Given as a mapping or as pairs; kept as pairs. Recipes in it have none themselves.
    """

    accumulate: Accumulate = field(default_factory=Accumulate)
    backward: Literal["fp8", "high_precision"] = "fp8"
    saved_input: Literal["fp8", "high_precision"] = "fp8"
    saved_weight: Literal["fp8", "high_precision"] = "fp8"
    grad_output_rounding: Rounding = "nearest"
    overrides: Any = ()

    # Of each instance, set by `complete`: every call of every layer asks for them.
    linear: ClassVar[LinearSpecs]
    delayed: ClassVar[DelayedUpdate | None]

    def __post_init__(self) -> None:
        for name in ("backward", "saved_input", "saved_weight"):
            if getattr(self, name) not in ("fp8", "high_precision"):
                raise ValueError(f"{name} is {getattr(self, name)!r}: expected 'fp8' or 'high_precision'")
        if self.grad_output_rounding not in ("nearest", "stochastic"):
            raise ValueError(
                f"grad_output_rounding is {self.grad_output_rounding!r}: expected 'nearest' or 'stochastic'"
            )
        for one in fields(self):
            if isinstance(one.default, bool) and not isinstance(getattr(self, one.name), bool):
                raise ValueError(f"{one.name} is {getattr(self, one.name)!r}: expected True or False")
        if not isinstance(self.accumulate, Accumulate):
            raise ValueError(f"accumulate is {self.accumulate!r}: expected an octavo.recipes.Accumulate")
        object.__setattr__(self, "overrides", _checked_overrides(self.overrides))

    def complete(self) -> None:
        """Ask `spec` and `histories` everything once; the last line of every recipe's `__post_init__`."""
        x, w = self.spec("fprop", "input"), self.spec("fprop", "weight")
        dgrad, wgrad = self.spec("dgrad", "grad_output"), self.spec("wgrad", "grad_output")
        if x is None or w is None:
            raise ValueError(
                f"{type(self).__name__}: the forward must be FP8; a layer without FP8 has no recipe at all"
            )
        if wgrad is None and self.saved_input == "high_precision":
            raise ValueError(
                "saved_input='high_precision' says what an FP8 wgrad takes its input from, but this recipe has no FP8"
                " wgrad: the input is kept in high precision anyway, so leave saved_input out"
            )
        if dgrad is None and self.saved_weight == "high_precision":
            raise ValueError(
                "saved_weight='high_precision' says what an FP8 dgrad takes its weight from, but this recipe has no FP8"
                " dgrad: no codes of the weight are kept anyway, so leave saved_weight out"
            )
        if dgrad is wgrad is None and self.grad_output_rounding == "stochastic":
            raise ValueError(
                "grad_output_rounding='stochastic' rounds what the FP8 products of the backward take, but this recipe"
                " has none: leave grad_output_rounding out"
            )
        # A gradient that no FP8 product takes still needs a spec to stand there; it is never used.
        dy = dgrad or wgrad or x
        x_t, w_t, dy_t = self.spec("wgrad", "input") or x, self.spec("dgrad", "weight") or w, wgrad or dy
        specs = LinearSpecs(x, w, dy, dgrad is not None, wgrad is not None, *_same(((x, x_t), (w, w_t), (dy, dy_t))))
        object.__setattr__(self, "linear", specs)
        object.__setattr__(self, "delayed", self.histories())

    @abstractmethod
    def spec(self, gemm: Gemm, operand: OperandName) -> QuantizeSpec | None:
        """How `operand` enters `gemm`; None if that product runs in high precision."""

    def rounding(self, operand: OperandName) -> Rounding:
        """How codes of `operand` are rounded: `grad_output_rounding` of a gradient, else to nearest."""
        return self.grad_output_rounding if operand == "grad_output" else "nearest"

    def histories(self) -> DelayedUpdate | None:
        """How amax histories are updated; None for a recipe without them."""
        return None

    @property
    def weight_spec(self) -> QuantizeSpec | None:
        """How a weight is stored that exists in FP8 alone."""
        return self.spec("fprop", "weight")

    def for_layer(self, name: str | None) -> Recipe | None:
        """The recipe of the layer called `name`: this one, or that of the first override that matches."""
        if self.overrides and name is None:
            raise ValueError(
                "the recipe has overrides by name, and this layer has none: octavo.convert(model) names the layers of a"
                " model, or set layer.layer_name"
            )
        for pattern, recipe in self.overrides:
            if re.search(pattern, str(name)):
                chosen: Recipe | None = recipe
                return chosen
        return self

    def replaced(self, **changes: Any) -> Recipe:
        """A copy with some fields changed."""
        for name in changes:
            if name not in self.field_names():
                raise ValueError(self.no_field(name))
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class DelayedUpdate:
    """How one update of amax histories is done, see `octavo.scaling.history`."""

    amax_history_len: int
    algorithm: Any
    margin: int
    reduce_amax: bool
    initialise_from_first_batch: bool


def check_recipe(recipe: Any) -> None:
    """Raise ValueError unless `recipe` is a recipe or None."""
    if not (recipe is None or isinstance(recipe, Recipe)):
        raise ValueError(f"recipe is {recipe!r}: expected one of octavo.recipes, such as DelayedScaling(), or None")


def format_for(format: FormatChoice, operand: OperandName) -> Format:
    """The format of one operand."""
    pair = format if isinstance(format, FormatPair) else FormatPair(format_given(format), format_given(format))
    return pair.backward if operand == "grad_output" else pair.forward


def keep_format(recipe: Any) -> None:
    """Have a recipe keep its `format` as a Format or a FormatPair, by whatever it was named.

    Raises:
        ValueError: no format, or one that cannot be multiplied.
    """
    given = recipe.format
    try:
        if isinstance(given, FormatPair):
            kept: FormatPair | Format = FormatPair(format_given(given.forward), format_given(given.backward))
        else:
            kept = HYBRID if given == "HYBRID" else format_given(given)
    except ValueError as error:
        raise ValueError(
            f"format is {given!r}: expected octavo.HYBRID, octavo.E4M3 or octavo.E5M2, or a name, 'HYBRID', 'E4M3' or"
            " 'E5M2', or the dtype of one, or a FormatPair of two"
        ) from error
    for operand in OPERANDS:
        if format_for(kept, operand) not in (E4M3, E5M2):
            raise ValueError(
                f"format {format_for(kept, operand)} holds no operand of a product: use E4M3, E5M2 or HYBRID"
            )
    object.__setattr__(recipe, "format", kept)


def operand_spec(recipe: Any, gemm: Gemm, operand: OperandName, **scaling: Any) -> QuantizeSpec | None:
    """The spec of an operand of a recipe with a `format`, scaled so; None of the backward in high precision."""
    if gemm != "fprop" and recipe.backward == "high_precision":
        return None
    return QuantizeSpec(
        format=format_for(recipe.format, operand),
        inf_to_nan=operand == "grad_output",
        rounding=recipe.rounding(operand),
        **scaling,
    )


def _same(pairs: tuple[tuple[QuantizeSpec, QuantizeSpec], ...]) -> list[QuantizeSpec]:
    """The second of each pair; where the two are equal, the first itself."""
    return [one if other == one else other for one, other in pairs]


def all_precise() -> Accumulate:
    """The sums of products by block."""
    return Accumulate(fprop="precise", dgrad="precise", wgrad="precise")


def keep_precise(recipe: Recipe, why: str) -> None:
    """Raise ValueError if a product is to sum fast; why it cannot."""
    for gemm in GEMMS:
        if getattr(recipe.accumulate, gemm) != "precise":
            raise ValueError(f"accumulate.{gemm} is 'fast': {why}; leave accumulate out, or use CurrentScaling")


def _checked_overrides(given: Any) -> tuple[tuple[str, Recipe | None], ...]:
    pairs = list(given.items() if isinstance(given, Mapping) else given) if isinstance(given, Iterable) else [given]
    if isinstance(given, str) or not all(isinstance(one, (tuple, list)) for one in pairs):
        raise ValueError(f"overrides are {{pattern: recipe or None}}, found {type(given).__name__}: {given!r}")
    return tuple(_checked_override(pair) for pair in pairs)


def _checked_override(pair: Any) -> tuple[str, Recipe | None]:
    try:
        pattern, recipe = pair
        # Names are str, which a pattern of bytes cannot be looked for in.
        re.compile(pattern).search("")
    except (TypeError, ValueError, re.error) as error:
        raise ValueError(
            f"override {pair!r} is no pair of a regular expression and a recipe or None: {error}"
        ) from None
    if not (recipe is None or isinstance(recipe, Recipe)):
        raise ValueError(f"override {pattern!r} names {recipe!r}: expected a recipe, or None for high precision")
    if recipe is not None and recipe.overrides:
        raise ValueError(
            f"override {pattern!r} names a recipe with overrides of its own, which nobody would look at: give them in"
            " the outer recipe"
        )
    return pattern, recipe
