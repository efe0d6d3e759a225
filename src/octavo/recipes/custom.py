"""CustomRecipe: a spec for each operand of each product, for whoever composes a recipe of his own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from octavo.recipes.delayed import DelayedScaling
from octavo.recipes.recipe import GEMMS, Accumulate, DelayedUpdate, Gemm, OperandName, Recipe, all_precise
from octavo.scaling import BLOCK_1X128, BLOCK_128X128, MX, PRODUCT_BLOCKS, ROW, TENSOR, AmaxComputeAlgo, Granularity
from octavo.tensor import QuantizeSpec, needs

# The operands of each product, in the order in which it multiplies them.
_OPERANDS: dict[Gemm, tuple[OperandName, OperandName]] = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad_output", "weight"),
    "wgrad": ("grad_output", "input"),
}
# The two uses of each operand: row-wise, and transposed.
_USES: dict[OperandName, tuple[Gemm, Gemm]] = {
    "input": ("fprop", "wgrad"),
    "weight": ("fprop", "dgrad"),
    "grad_output": ("dgrad", "wgrad"),
}
# Granularities of the operands that are multiplied with one another.
PRODUCTS: tuple[tuple[Granularity, Granularity], ...] = (
    (TENSOR, TENSOR),
    (TENSOR, ROW),
    (ROW, TENSOR),
    (ROW, ROW),
    (BLOCK_1X128, BLOCK_1X128),
    (BLOCK_1X128, BLOCK_128X128),
    (MX, MX),
)
# How a spec is given each.
_AS_GIVEN = {
    TENSOR: "'tensor'",
    ROW: "'row'",
    BLOCK_1X128: "(1, 128)",
    BLOCK_128X128: "(128, 128)",
    MX: "'mx'",
}
_OF_HISTORIES = ("margin", "amax_history_len", "amax_compute_algo", "reduce_amax", "initialise_from_first_batch")


def _needed(missing: list[str]) -> str:
    """Which specs, and in what stead None will do."""
    listed = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
    without = [gemm for gemm in GEMMS[1:] if all(f"{gemm}_{operand}" in missing for operand in _OPERANDS[gemm])]
    each = "a QuantizeSpec each" if len(missing) > 1 else "a QuantizeSpec"
    if not without:
        return f"{listed}: {each}"
    return f"{listed}: {each}, or None for both operands to run {' or '.join(without)} in high precision"


@needs(_needed)
@dataclass(frozen=True, kw_only=True)
class CustomRecipe(Recipe):
    """A `QuantizeSpec` for each operand of each product: format, granularity, scaling, rounding.

    The two uses of an operand may have different specs; it is then cast for each. None for both operands of dgrad, or
    of wgrad, runs that product in high precision. ±inf of a gradient becomes NaN, whatever its spec says.

    What can be multiplied, the first operand by the second: one scale a tensor or a row of each, in any mixture; 1x128
    by 1x128 or by 128x128; MX by MX. The formats are E4M3 and E5M2 in any mixture. Native are those pairs that
    `octavo.kernels.scaled_mm` says, the others are emulated.

    Attributes:
        fprop_input, fprop_weight: of the output, x w^T.
        dgrad_grad_output, dgrad_weight: of the input's gradient, dy w; or None and None.
        wgrad_grad_output, wgrad_input: of the weight's gradient, dy^T x; or None and None.
        accumulate: how each product sums; those by block are precise.
        margin, amax_history_len, amax_compute_algo, reduce_amax, initialise_from_first_batch: of the operands that are
            scaled with delay, as of `DelayedScaling`. Such an operand has one spec in both its uses.
    """

    fprop_input: QuantizeSpec
    fprop_weight: QuantizeSpec
    dgrad_grad_output: QuantizeSpec | None
    dgrad_weight: QuantizeSpec | None
    wgrad_grad_output: QuantizeSpec | None
    wgrad_input: QuantizeSpec | None
    accumulate: Accumulate = field(default_factory=all_precise)
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: AmaxComputeAlgo = "max"
    reduce_amax: bool = True
    initialise_from_first_batch: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_shared_fields()
        for gemm, operands in _OPERANDS.items():
            for operand in operands:
                self._check_spec(gemm, operand)
            self._check_product(gemm)
        for operand in _USES:
            self._check_uses(operand)
        self._check_histories()
        self.complete()

    def spec(self, gemm: Gemm, operand: OperandName) -> QuantizeSpec | None:
        """As it was given."""
        spec: QuantizeSpec | None = getattr(self, f"{gemm}_{operand}")
        return spec

    def histories(self) -> DelayedUpdate | None:
        """How those of the operands that are scaled with delay are updated; None if there are none."""
        return self._update() if self._is_delayed() else None

    def _update(self) -> DelayedUpdate:
        # Which checks the fields, too.
        return DelayedScaling(**{name: getattr(self, name) for name in _OF_HISTORIES}).histories()

    def __repr__(self) -> str:
        """What differs from the defaults: fields of all recipes that the specs have the say of never do."""
        known = sorted(dataclasses.fields(self), key=lambda one: one.name in Recipe.__dataclass_fields__)
        usual = {one.name: one.default for one in known} | {"accumulate": all_precise()}
        shown = [name for name, default in usual.items() if getattr(self, name) != default]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def _is_delayed(self) -> bool:
        specs = [self.spec(gemm, operand) for gemm, operands in _OPERANDS.items() for operand in operands]
        return any(spec is not None and spec.scaling == "delayed" for spec in specs)

    def _check_shared_fields(self) -> None:
        """Raise ValueError if a field of all recipes is set that the specs have the say of."""
        if self.backward != "fp8":
            raise ValueError(
                "backward='high_precision': a CustomRecipe says so product by product, give None for"
                " dgrad_grad_output, dgrad_weight, wgrad_grad_output and wgrad_input and leave backward out"
            )
        if self.grad_output_rounding != "nearest":
            raise ValueError(
                "grad_output_rounding='stochastic': a CustomRecipe says so operand by operand, give"
                " QuantizeSpec(rounding='stochastic') for dgrad_grad_output or wgrad_grad_output and leave"
                " grad_output_rounding out"
            )

    def _check_spec(self, gemm: Gemm, operand: OperandName) -> None:
        """Keep the spec of one operand of one product, or raise ValueError if it is none."""
        name, spec = f"{gemm}_{operand}", self.spec(gemm, operand)
        if spec is None and gemm != "fprop":
            return
        if not isinstance(spec, QuantizeSpec):
            or_none = ", or None for high precision" if gemm != "fprop" else "; the forward always runs in FP8"
            raise ValueError(
                f"{name} is {spec!r}: expected a QuantizeSpec, such as QuantizeSpec(format='E4M3'){or_none}"
            )
        if operand == "grad_output":
            object.__setattr__(self, name, dataclasses.replace(spec, inf_to_nan=True))

    def _check_product(self, gemm: Gemm) -> None:
        """Raise ValueError unless the two operands of a product can be multiplied."""
        first, second = _OPERANDS[gemm]
        a, b = self.spec(gemm, first), self.spec(gemm, second)
        if a is None and b is None:
            return
        if a is None or b is None:
            raise ValueError(
                f"{gemm}_{first} is {a} and {gemm}_{second} is {b}: a product runs in high precision in both operands"
                " or in none, give two specs or None and None"
            )
        if (a.granularity, b.granularity) not in PRODUCTS:
            of_first = [other for one, other in PRODUCTS if one == a.granularity]
            of_second = [one for one, other in PRODUCTS if other == b.granularity]
            raise ValueError(
                f"{gemm} cannot multiply {gemm}_{first} {a} by {gemm}_{second} {b}:"
                f" {_goes_with(f'{gemm}_{first}', a.granularity, f'{gemm}_{second}', of_first)};"
                f" {_goes_with(f'{gemm}_{second}', b.granularity, f'{gemm}_{first}', of_second)}"
            )
        if a.granularity in PRODUCT_BLOCKS and getattr(self.accumulate, gemm) == "fast":
            raise ValueError(
                f"accumulate.{gemm} is 'fast' and {gemm}_{first} has granularity {a.granularity}: products by block sum"
                f" precisely, give accumulate=Accumulate({gemm}='precise', ...), or one scale a tensor or a row"
            )

    def _check_uses(self, operand: OperandName) -> None:
        """Raise ValueError if one of the two uses of an operand rules out the other, or how it is kept for it."""
        first, second = (f"{gemm}_{operand}" for gemm in _USES[operand])
        a, b = getattr(self, first), getattr(self, second)
        if a is not None and b is not None and a != b and "delayed" in (a.scaling, b.scaling):
            raise ValueError(
                f"{first} is {a} and {second} is {b}: an operand that is scaled with delay has one history and one"
                " scale, so one spec in both its uses; give both the same, or scale both with 'current'"
            )
        saved = f"saved_{operand}"
        if b is not None and b.rounding == "stochastic" and getattr(self, saved, "fp8") == "high_precision":
            raise ValueError(
                f"{saved}='high_precision' makes codes again in the backward, and {second} rounds stochastically, which"
                f" would give others: leave {saved} out, or use rounding='nearest'"
            )

    def _check_histories(self) -> None:
        """Raise ValueError if a field of histories is wrong, or set where there are none."""
        self._update()
        if self._is_delayed():
            return
        for one in dataclasses.fields(self):
            if one.name in _OF_HISTORIES and getattr(self, one.name) != one.default:
                raise ValueError(
                    f"{one.name} is {getattr(self, one.name)!r}, and no operand is scaled with delay: leave it out, or"
                    " give an operand QuantizeSpec(scaling='delayed')"
                )


def _goes_with(field: str, granularity: Granularity, other: str, others: list[Granularity]) -> str:
    """Of one operand's granularity, which ones of the other it is multiplied with."""
    known = " or ".join(_AS_GIVEN[one] for one in others)
    return (
        f"{field} with granularity {_AS_GIVEN[granularity]} goes with {f'{other} with {known}' if others else 'none'}"
    )


assert tuple(_OPERANDS) == GEMMS, "every product has its operands"
