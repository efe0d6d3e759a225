"""`transformer_engine.common.recipe`: formats and recipes of Transformer Engine, each with the Octavo recipe it means.

A recipe here is TE's mutable dataclass; whenever it is made or changed it is translated into one of `octavo.recipes`.
What Octavo cannot do yet is kept as the reason, and raised as NotImplementedError where the recipe is used.

Source: transformer_engine/common/recipe/__init__.py of Transformer Engine 2.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from octavo import formats, recipes


class _Limits(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    """Formats of forward and backward operands, by their largest values."""

    E4M3 = _Limits(formats.E4M3.max, formats.E4M3.max)
    E5M2 = _Limits(formats.E5M2.max, formats.E5M2.max)
    HYBRID = _Limits(formats.E4M3.max, formats.E5M2.max)


_FORMATS: dict[Format, recipes.FormatPair] = {
    Format.E4M3: recipes.FormatPair(formats.E4M3, formats.E4M3),
    Format.HYBRID: recipes.HYBRID,
}


@dataclass(frozen=True)
class MMParams:
    """How a product sums; True promotes partial sums to float32 ("precise")."""

    use_split_accumulator: bool = True

    @property
    def accumulation(self) -> Literal["fast", "precise"]:
        """Octavo's word for it."""
        return "precise" if self.use_split_accumulator else "fast"


@dataclass(frozen=True)
class QParams:
    """How one operand is quantized."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


class Recipe:
    """What all of TE's recipes share: predicates, and the Octavo recipe that they stand for."""

    is_transformer_engines: ClassVar[bool] = True
    _native: recipes.Recipe | None
    _obstacle: str

    @classmethod
    def delayed(cls) -> bool:
        """True for DelayedScaling."""
        return False

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """True for Float8CurrentScaling."""
        return False

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """True for recipes with one scale a tensor."""
        return cls.delayed() or cls.float8_current_scaling()

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """True for Float8BlockScaling."""
        return False

    @classmethod
    def mxfp8(cls) -> bool:
        """True for MXFP8BlockScaling."""
        return False

    @classmethod
    def nvfp4(cls) -> bool:
        """True for four-bit recipes, of which there are none."""
        return False

    @classmethod
    def custom(cls) -> bool:
        """True for recipes made of the user's quantizers, of which there are none."""
        return False

    def __post_init__(self) -> None:
        self._translate_again()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if "_obstacle" in self.__dict__ and name not in ("_native", "_obstacle"):
            self._translate_again()

    @property
    def native(self) -> recipes.Recipe:
        """The Octavo recipe that this one stands for.

        Raises:
            NotImplementedError: it asks for something that Octavo does not do yet; says what.
        """
        if self._native is None:
            raise NotImplementedError(self._obstacle)
        return self._native

    def translate(self) -> recipes.Recipe:
        """The Octavo recipe; NotImplementedError for what there is none for, ValueError for what makes no sense."""
        raise NotImplementedError(f"{type(self).__name__}: Octavo has no such recipe yet")

    def _translate_again(self) -> None:
        try:
            native: recipes.Recipe | None = _standing(self.translate())
            obstacle = ""
        except NotImplementedError as error:
            native, obstacle = None, str(error)
        if native is not None:
            # For `given_recipe`: the context in the runtime knows Octavo's recipe alone.
            object.__setattr__(native, "translated_from", self)
        object.__setattr__(self, "_native", native)
        object.__setattr__(self, "_obstacle", obstacle)

    def _pair(self, chosen: Format) -> recipes.FormatPair:
        if chosen not in _FORMATS:
            raise ValueError(f"{type(self).__name__}: fp8_format is {chosen!r}: expected Format.HYBRID or Format.E4M3")
        return _FORMATS[chosen]

    def _backward(self, override: str | None) -> Literal["fp8", "high_precision"]:
        if override not in (None, "high_precision", "dequantized"):
            raise ValueError(f"backward_override is {override!r}: expected None, 'high_precision' or 'dequantized'")
        if override == "dequantized":
            self._refuse(backward_override=override)
        return "fp8" if override is None else "high_precision"

    def _refuse(self, **wanted: Any) -> None:
        for name, value in wanted.items():
            if value:
                raise NotImplementedError(f"{type(self).__name__}({name}={value!r}): Octavo does not do this yet")


@functools.lru_cache(maxsize=256)
def _standing(native: recipes.Recipe) -> recipes.Recipe:
    """One object for equal recipes: code that makes its recipe anew in every step is not compiled anew for it."""
    return native


def given_recipe(native: recipes.Recipe) -> Any:
    """The recipe here that `native` was translated from; `native` itself if it was made by Octavo's own name."""
    origin = vars(native).get("translated_from")
    return origin if origin is not None and origin._native is native else native


@dataclass(frozen=True)
class _OfHistory:
    """TE's amax_compute_algo, a function of a history [L, n], as Octavo's, a function of one window [L]."""

    function: Callable[[Tensor], Tensor]

    def __call__(self, window: Tensor) -> Tensor:
        return self.function(window.unsqueeze(1)).reshape(())


@dataclass
class DelayedScaling(Recipe):
    """Scales from past amaxes.

    Attributes:
        margin: scales leave 2^margin of headroom.
        fp8_format: Format.HYBRID or Format.E4M3.
        amax_history_len: for how many steps an amax is remembered.
        amax_compute_algo: "max", "most_recent", or a function of the history [L, n] that returns [n].
        scaling_factor_compute_algo: not built.
        reduce_amax: amaxes agree over the group.
        fp8_dpa, fp8_mha: FP8 attention: not built.
        backward_override: None only, as in TE.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] | Callable[[Tensor], Tensor] = "max"
    scaling_factor_compute_algo: Callable[..., Tensor] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    @classmethod
    def delayed(cls) -> bool:
        """True."""
        return True

    def translate(self) -> recipes.Recipe:
        """`octavo.recipes.DelayedScaling`."""
        if self.backward_override is not None:
            raise ValueError(f"backward_override is {self.backward_override!r}: DelayedScaling takes None only")
        algorithm = self.amax_compute_algo
        native = recipes.DelayedScaling(
            format=self._pair(self.fp8_format),
            margin=self.margin,
            amax_history_len=self.amax_history_len,
            amax_compute_algo=algorithm if isinstance(algorithm, str) else _OfHistory(algorithm),
            reduce_amax=self.reduce_amax,
        )
        self._refuse(
            scaling_factor_compute_algo=self.scaling_factor_compute_algo, fp8_dpa=self.fp8_dpa, fp8_mha=self.fp8_mha
        )
        return native


@dataclass
class Float8CurrentScaling(Recipe):
    """Scales measured from the tensor at hand.

    Attributes:
        use_power_2_scales: multipliers are rounded down to powers of two.
        fp8_format: Format.HYBRID or Format.E4M3.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: how each product sums.
        fp8_dpa, fp8_mha: FP8 attention: not built.
        backward_override: None, or "high_precision"; "dequantized" is not built.
        fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad: how each operand is quantized; by default as
            use_power_2_scales says. All alike: one apart from the others is not built.
    """

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    fp8_quant_fwd_inp: QParams | None = field(default=None, kw_only=True)
    fp8_quant_fwd_weight: QParams | None = field(default=None, kw_only=True)
    fp8_quant_bwd_grad: QParams | None = field(default=None, kw_only=True)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """True."""
        return True

    def translate(self) -> recipes.Recipe:
        """`octavo.recipes.CurrentScaling`."""
        params = self._operand()
        native = recipes.CurrentScaling(
            format=self._pair(self.fp8_format),
            power_of_two_scales=params.power_2_scale,
            amax_epsilon=params.amax_epsilon,
            accumulate=recipes.Accumulate(
                fprop=self.fp8_gemm_fprop.accumulation,
                dgrad=self.fp8_gemm_dgrad.accumulation,
                wgrad=self.fp8_gemm_wgrad.accumulation,
            ),
            backward=self._backward(self.backward_override),
        )
        self._refuse(fp8_dpa=self.fp8_dpa, fp8_mha=self.fp8_mha)
        return native

    def _operand(self) -> QParams:
        default = QParams(power_2_scale=self.use_power_2_scales)
        given = self.fp8_quant_fwd_inp, self.fp8_quant_fwd_weight, self.fp8_quant_bwd_grad
        chosen = [default if one is None else one for one in given]
        if len(set(chosen)) > 1:
            raise NotImplementedError(
                "Float8CurrentScaling: fp8_quant_fwd_inp, fp8_quant_fwd_weight and fp8_quant_bwd_grad differ:"
                " Octavo does not do this yet, give all three the same QParams"
            )
        params = chosen[0]
        self._refuse(
            random_hadamard_transform=params.random_hadamard_transform,
            stochastic_rounding=params.stochastic_rounding,
            fp4_2d_quantization=params.fp4_2d_quantization,
        )
        return params


@dataclass
class Float8BlockScaling(Recipe):
    """One scale for 128 neighbours of inputs and gradients, and for each 128 x 128 of weights.

    Attributes:
        use_f32_scales: multipliers are not rounded down to powers of two.
        fp8_format: Format.E4M3; of others the products are emulated.
        x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim: 1, 2 and 1; others are not built.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: products by block always sum with a split accumulator.
        fp8_dpa, fp8_mha: FP8 attention: not built.
        backward_override: None, or "high_precision"; "dequantized" is not built.
    """

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """True."""
        return True

    def translate(self) -> recipes.Recipe:
        """`octavo.recipes.BlockScaling`."""
        for name, built in (("x_block_scaling_dim", 1), ("w_block_scaling_dim", 2), ("grad_block_scaling_dim", 1)):
            if getattr(self, name) != built:
                self._refuse(**{name: getattr(self, name)})
        native = recipes.BlockScaling(
            format=self._pair(self.fp8_format),
            power_of_two_scales=not self.use_f32_scales,
            accumulate=recipes.Accumulate(
                fprop=self.fp8_gemm_fprop.accumulation,
                dgrad=self.fp8_gemm_dgrad.accumulation,
                wgrad=self.fp8_gemm_wgrad.accumulation,
            ),
            backward=self._backward(self.backward_override),
        )
        self._refuse(fp8_dpa=self.fp8_dpa, fp8_mha=self.fp8_mha)
        return native


@dataclass
class MXFP8BlockScaling(Recipe):
    """One power-of-two scale for each 32 values, along K of each product; emulated on every device.

    Attributes:
        margin: 0; others are not built.
        fp8_format: Format.E4M3, or Format.HYBRID for gradients in E5M2.
        fp8_dpa, fp8_mha: FP8 attention: not built.
        backward_override: None, or "high_precision"; "dequantized" is not built.
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    @classmethod
    def mxfp8(cls) -> bool:
        """True."""
        return True

    def translate(self) -> recipes.Recipe:
        """`octavo.recipes.MXFP8Scaling`."""
        native = recipes.MXFP8Scaling(
            format=self._pair(self.fp8_format), backward=self._backward(self.backward_override)
        )
        self._refuse(margin=self.margin, fp8_dpa=self.fp8_dpa, fp8_mha=self.fp8_mha)
        return native
