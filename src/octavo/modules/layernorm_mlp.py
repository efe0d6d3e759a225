"""octavo.LayerNormMLP: a normalisation and the MLP of a transformer, as one layer.

    n = norm(x)               LayerNorm or RMSNorm, see `octavo.modules.norm`
    z = n fc1_weight^T + fc1_bias
    a = f(z)                  or f(first half of z) * second half of z
    y = a fc2_weight^T + fc2_bias

x, y [..., hidden]; z [..., ffn], of a gated activation [..., 2 ffn]; a [..., ffn]. With delayed or static scaling n, a
and the gradient of z exist as FP8 codes alone. The layer gives the bits of `octavo.LayerNorm` (or `octavo.RMSNorm`),
`octavo.Linear`, the activation and `octavo.Linear` in turn, gradients and delayed-scaling states included. With
`smooth_swiglu` the channels of a are brought to one size before their cast (`octavo.functional.smoothing`).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from octavo.functional import (
    NormLinear,
    NormMLP,
    Parameters,
    Smoothing,
    activate,
    linear,
    norm_linear,
    norm_mlp,
    smooth_linear,
    smoothing_of,
)
from octavo.kernels.activations import GATED
from octavo.modules.given_input import check_input
from octavo.modules.layernorm_linear import (
    NormalisedInput,
    add_linear,
    check_cached_weight,
    fp8_dtype,
    plain_linear,
    reset_linear,
)
from octavo.modules.linear import CachedWeight
from octavo.modules.mlp_part import MLPPart
from octavo.modules.norm import Normalization
from octavo.modules.options import names_its_options
from octavo.modules.owned_parts import own_parts
from octavo.recipes import Recipe
from octavo.runtime import Call, LinearPlan, checkpoint, init_mode, layer_call
from octavo.runtime.autocast import in_backward
from octavo.runtime.layer_state import UsedScales
from octavo.tensor import Operand, QuantizedTensor

# Transformer Engine's names, and the exact gelu of torch.nn.GELU.
ACTIVATIONS = {
    "gelu": "gelu_tanh",
    "gelu_erf": "gelu_erf",
    "geglu": "geglu_tanh",
    "geglu_erf": "geglu_erf",
    "glu": "glu",
    "qgelu": "qgelu",
    "qgeglu": "qgeglu",
    "relu": "relu",
    "reglu": "reglu",
    "srelu": "srelu",
    "sreglu": "sreglu",
    "silu": "silu",
    "swiglu": "swiglu",
}
SavedInput = Literal["high_precision", "fp8"]


class LayerNormMLP(NormalisedInput):
    """A normalisation and an MLP with FP8 matrix products.

    Args:
        hidden_size: features of the input and the output.
        ffn_hidden_size: features between the two linear parts.
        bias: both linear parts have one.
        device, dtype: of the parameters, which are drawn as those of `nn.Linear`.
        activation: gelu (its tanh form), gelu_erf, qgelu, relu, srelu, silu; gated: geglu, geglu_erf, glu, qgeglu,
            reglu, sreglu, swiglu.
        normalization: "LayerNorm" or "RMSNorm".
        eps: added to the variance, or to the mean of squares.
        zero_centered_gamma: the normalisation scales by 1 + `layer_norm_weight`, which begins at 0.
        elementwise_affine, norm_bias: the normalisation has a weight, and a bias (RMSNorm never has one).
        return_layernorm_output: the forward gives (y, n).
        saved_activation_input: what is kept of z for the backward: "high_precision", or "fp8": E4M3 codes with a scale
            a token, at which the activation's gradient is then taken. Where FP8 is off, z itself is kept.
        checkpoint: keep the input alone and compute n, z and a again in the backward.
        smooth_swiglu: of "swiglu": divide each channel of a by a power of two of its amax, measured in every call,
            before a is cast, and multiply the columns of `fc2_weight` by it: for long trainings, in which outliers of
            single channels grow. Where fc2 runs without FP8 it changes nothing.
        recipe: FP8 with this recipe also outside of `octavo.autocast`.

    Raises:
        ValueError: an unknown activation or normalisation; `checkpoint` with `saved_activation_input="fp8"`;
            `smooth_swiglu` with another activation, or inside `octavo.quantized_init`.
    """

    fc1_weight: nn.Parameter
    fc1_bias: nn.Parameter | None
    fc2_weight: nn.Parameter
    fc2_bias: nn.Parameter | None
    # Also of a layer that was saved before there was the option.
    smooth_swiglu: bool = False

    @names_its_options
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str = "gelu",
        normalization: Normalization = "LayerNorm",
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        elementwise_affine: bool = True,
        norm_bias: bool = True,
        return_layernorm_output: bool = False,
        saved_activation_input: SavedInput = "high_precision",
        checkpoint: bool = False,
        smooth_swiglu: bool = False,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__()
        _check_options(activation, saved_activation_input, checkpoint)
        _check_smoothing(activation, smooth_swiglu)
        _refuse_codes(smooth_swiglu and init_mode() is not None)
        self.hidden_size, self.ffn_hidden_size, self.activation = hidden_size, ffn_hidden_size, activation
        self.return_layernorm_output = return_layernorm_output
        self.saved_activation_input: SavedInput = saved_activation_input
        self.checkpoint, self.smooth_swiglu = checkpoint, smooth_swiglu
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.add_norm(hidden_size, normalization, eps, zero_centered_gamma, (elementwise_affine, norm_bias), **place)
        widened = ffn_hidden_size * (2 if ACTIVATIONS[activation] in GATED else 1)
        add_linear(self, "fc1_", hidden_size, widened, bias, **place)
        add_linear(self, "fc2_", ffn_hidden_size, hidden_size, bias, **place)
        self.fc1, self.fc2 = MLPPart(self, "fc1", recipe), MLPPart(self, "fc2", recipe)

    @property
    def parts(self) -> tuple[MLPPart, MLPPart]:
        """State of the two linear parts, in the order in which they run."""
        return self.fc1, self.fc2

    @property
    def recipe(self) -> Recipe | None:
        """FP8 with this recipe also outside of `octavo.autocast`."""
        return self.fc1.recipe

    @recipe.setter
    def recipe(self, recipe: Recipe | None) -> None:
        for part in self.parts:
            part.recipe = recipe

    @property
    def layer_name(self) -> str | None:
        """Qualified name, for overrides and counts; those of the parts end in ".fc1" and ".fc2"."""
        name = self.fc1.layer_name
        return None if name is None else name.removesuffix(".fc1")

    @layer_name.setter
    def layer_name(self, name: str | None) -> None:
        for part in self.parts:
            part.layer_name = None if name is None else f"{name}.{part.prefix}"

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        self.reset_norm_parameters()
        reset_linear(self.fc1_weight, self.fc1_bias)
        reset_linear(self.fc2_weight, self.fc2_bias)

    def taken_parameters(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """What the products take, fc1's weight and bias and fc2's: here the parameters themselves."""
        return self.fc1_weight, self.fc1_bias, self.fc2_weight, self.fc2_bias

    def forward(self, x: Tensor, *, cached_weight: CachedWeight | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """y [..., hidden_size]; with `return_layernorm_output` (y, n [..., hidden_size]).

        Args:
            x: [..., hidden_size].
            cached_weight: as of `octavo.Linear`, for both weights.
        """
        check_cached_weight(cached_weight)
        check_input(x, self.hidden_size, self, "x")
        if self.checkpoint and torch.compiler.is_compiling():
            # What is computed again is the compiler's to say, which this tells it.
            result: Tensor | tuple[Tensor, Tensor] = checkpoint(lambda x: self._outputs(x, cached_weight, False), x)
            return result
        return self._outputs(x, cached_weight, self.checkpoint)

    def _outputs(
        self, x: Tensor, cached_weight: CachedWeight | None, recomputed: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        y, n = self._run(x, cached_weight, recomputed)
        if not self.return_layernorm_output:
            return y
        assert n is not None, "it was asked for"
        return y, n

    def _run(self, x: Tensor, cached_weight: CachedWeight | None, recomputed: bool) -> tuple[Tensor, Tensor | None]:
        """Decide, normalise, multiply."""
        calls = [layer_call(part.delayed_state, part.recipe, part.layer_name) for part in self.parts]
        if calls[0].recipe is None or calls[1].recipe is None:
            return (self._composed_twice if recomputed else self._composed)(x, calls, cached_weight)
        fc1_weight, fc1_bias, fc2_weight, fc2_bias = self.taken_parameters()
        fc1 = self.fc1.planned(calls[0], fc1_weight)
        fc2 = self.fc2.planned(calls[1], fc2_weight)
        # Whoever wraps a quantizer is told of each cast once.
        watched = self.fc1.observer is not None or self.fc2.observer is not None
        setup = NormMLP(
            self.norm_for(fp8_dtype(x)),
            ACTIVATIONS[self.activation],
            fc1,
            fc2,
            self.return_layernorm_output,
            self.saved_activation_input == "fp8",
            recomputed and not watched,
            self._smoothing(calls[1], fc2, fc2_weight),
        )
        norm = self.layer_norm_weight, self.layer_norm_bias
        parameters = Parameters(*norm, fc1_weight, fc1_bias, fc2_weight, fc2_bias)
        operands = (
            self.fc1.kept_operand(fc1_weight, fc1, cached_weight),
            self._kept_second(fc2_weight, fc2, cached_weight),
        )
        return norm_mlp(x, parameters, setup, operands)

    def _composed(
        self, x: Tensor, calls: list[Call], cached_weight: CachedWeight | None
    ) -> tuple[Tensor, Tensor | None]:
        """One after the other, where a linear part is in high precision."""
        n: Tensor | None
        fc1_weight, fc1_bias, fc2_weight, fc2_bias = self.taken_parameters()
        if calls[0].recipe is None:
            n = self.normalised(x)
            z = plain_linear(n, fc1_weight, fc1_bias, self.fc1.delayed_state, calls[0])
        else:
            plan = self.fc1.planned(calls[0], fc1_weight)
            setup = NormLinear(self.norm_for(fp8_dtype(x)), plan, self.return_layernorm_output)
            norm = self.layer_norm_weight, self.layer_norm_bias
            operand = self.fc1.kept_operand(fc1_weight, plan, cached_weight)
            z, n = norm_linear(x, *norm, fc1_weight, fc1_bias, setup, operand)
        in_fp8 = any(call.recipe is not None for call in calls)
        a = activate(z, ACTIVATIONS[self.activation], in_fp8 and self.saved_activation_input == "fp8")
        if calls[1].recipe is None:
            return plain_linear(a, fc2_weight, fc2_bias, self.fc2.delayed_state, calls[1]), n
        plan = self.fc2.planned(calls[1], fc2_weight)
        operand = self._kept_second(fc2_weight, plan, cached_weight)
        smoothing = self._smoothing(calls[1], plan, fc2_weight)
        if smoothing is not None:
            return smooth_linear(a, fc2_weight, fc2_bias, plan, smoothing, fp8_dtype(a), operand), n
        return linear(a, fc2_weight, fc2_bias, plan, fp8_dtype(a), operand), n

    def _smoothing(self, call: Call, plan: LinearPlan, weight: Tensor) -> Smoothing | None:
        """How fc2's operands are smoothed in this call."""
        if not self.smooth_swiglu:
            return None
        _check_smoothing(self.activation, self.smooth_swiglu)  # a converted layer is told by its attribute
        _refuse_codes(isinstance(weight, QuantizedTensor))
        assert call.recipe is not None, "there is a plan"
        state = self.fc2.delayed_state.input if call.gather and call.recipe.delayed is not None else None
        return smoothing_of(call.recipe, plan, self.fc2.observer, state)

    def _kept_second(self, weight: Tensor, plan: LinearPlan, cached_weight: CachedWeight | None) -> Operand | None:
        """Codes of fc2's weight that are kept; smoothed, they are for the backward alone."""
        if self.smooth_swiglu and not torch.is_grad_enabled():
            return None
        return self.fc2.kept_operand(weight, plan, cached_weight)

    def _composed_twice(
        self, x: Tensor, calls: list[Call], cached_weight: CachedWeight | None
    ) -> tuple[Tensor, Tensor | None]:
        """As `_composed`; all of it is computed again in the backward, with the same scales."""
        # Of this forward alone: what a layer notes is overwritten by the next one.
        first = [call if call.used is None else call._replace(used=UsedScales()) for call in calls]
        again = [
            call if call.used is None else call._replace(gather=False, used=None, repeats=call.used) for call in first
        ]

        def run(x: Tensor) -> tuple[Tensor, Tensor | None]:
            return self._composed(x, again if in_backward() else first, cached_weight)

        result: tuple[Tensor, Tensor | None] = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
        for call, own in zip(calls, first, strict=True):
            if call.used is not None and own.used is not None:
                call.used.input.scale, call.used.weight.scale = own.used.input.scale, own.used.weight.scale
        return result

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        found = [part.taken_out(state_dict, prefix) for part in self.parts]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        for part, (entries, new_weight) in zip(self.parts, found, strict=True):
            part.load(entries, new_weight)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        own_parts(self)

    def extra_repr(self) -> str:
        """Extents and options."""
        options = [f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}"]
        options += [f"bias={self.fc1_bias is not None}, activation={self.activation}, {self.shown_norm()}"]
        if self.saved_activation_input != "high_precision":
            options.append(f"saved_activation_input={self.saved_activation_input}")
        if self.checkpoint:
            options.append("checkpoint=True")
        if self.smooth_swiglu:
            options.append("smooth_swiglu=True")
        return ", ".join(options)


def _check_options(activation: str, saved_activation_input: str, checkpoint: bool) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}: expected one of {', '.join(ACTIVATIONS)}")
    if saved_activation_input not in ("high_precision", "fp8"):
        raise ValueError(f"saved_activation_input is {saved_activation_input!r}: expected 'high_precision' or 'fp8'")
    if checkpoint and saved_activation_input == "fp8":
        raise ValueError(
            "checkpoint=True keeps nothing of the activation's input, which saved_activation_input='fp8' would have"
            " kept as codes: choose one of the two"
        )


def _check_smoothing(activation: str, smooth_swiglu: bool) -> None:
    if smooth_swiglu is not True and smooth_swiglu is not False:
        raise ValueError(f"smooth_swiglu is {smooth_swiglu!r}: expected True or False")
    if smooth_swiglu and activation != "swiglu":
        raise ValueError(
            f"smooth_swiglu=True and activation is {activation!r}: it smooths the channels of 'swiglu'; leave it out,"
            " or use that activation"
        )


def _refuse_codes(there_are: bool) -> None:
    if there_are:
        raise ValueError(
            "smooth_swiglu=True multiplies the columns of fc2_weight before their cast, and inside"
            " octavo.quantized_init there are only codes of it: build the layer outside, or without smooth_swiglu"
        )
