"""The same layers one after the other, with copies of a fused layer's parameters: what it must equal to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.functional import activate
from octavo.modules.layernorm_mlp import ACTIVATIONS
from octavo.recipes import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipe,
    RowwiseScaling,
    StaticScaling,
)

# None: no FP8 at all.
RECIPES: dict[str, Recipe | None] = {
    "delayed": DelayedScaling(amax_history_len=4),
    "delayed, measured first": DelayedScaling(amax_history_len=4, initialise_from_first_batch=True),
    "delayed, high precision backward": DelayedScaling(backward="high_precision"),
    "delayed, input kept": DelayedScaling(saved_input="high_precision"),
    "current": CurrentScaling(),
    "delayed, weight kept": DelayedScaling(saved_weight="high_precision"),
    "current, input kept": CurrentScaling(saved_input="high_precision", power_of_two_scales=True),
    "rowwise": RowwiseScaling(),
    "rowwise, high precision wgrad": RowwiseScaling(high_precision_wgrad=True),
    "block": BlockScaling(),
    "static": StaticScaling(input_scale=0.01, weight_scale=0.001),
    "none": None,
}
BF16 = torch.bfloat16
FEW = ("delayed", "current", "block", "none")


class Composition(nn.Module):
    """Norm and Linear; of an MLP the activation and a second Linear too."""

    def __init__(self, fused: octavo.LayerNormLinear | octavo.LayerNormMLP) -> None:
        super().__init__()
        kind = octavo.LayerNorm if fused.normalization == "LayerNorm" else octavo.RMSNorm
        weight = fused.layer_norm_weight
        features = fused.in_features if isinstance(fused, octavo.LayerNormLinear) else fused.hidden_size
        affine = weight is not None
        self.norm = kind(features, fused.eps, affine, zero_centered_gamma=fused.zero_centered_gamma)
        self.norm.weight = cloned(weight)
        self.norm.bias = cloned(fused.layer_norm_bias)
        self.activation = ACTIVATIONS[fused.activation] if isinstance(fused, octavo.LayerNormMLP) else None
        if self.activation is None:
            self.fc1 = linear_of(fused.weight, fused.bias, fused.recipe)
        else:
            self.fc1 = linear_of(fused.fc1_weight, fused.fc1_bias, fused.recipe)
            self.fc2 = linear_of(fused.fc2_weight, fused.fc2_bias, fused.recipe)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(y, n)"""
        n = self.norm(x)
        y = self.fc1(n)
        if self.activation is not None:
            y = self.fc2(activate(y, self.activation))
        return y, n


def cloned(parameter: nn.Parameter | None) -> nn.Parameter | None:
    if parameter is None:
        return None
    return nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)


def linear_of(weight: nn.Parameter, bias: nn.Parameter | None, recipe: Recipe | None) -> octavo.Linear:
    layer = octavo.Linear(weight.shape[1], weight.shape[0], bias is not None, recipe=recipe)
    layer.weight, layer.bias = cloned(weight), cloned(bias)
    return layer


def state_of(model: nn.Module) -> list[Tensor]:
    """Scales, histories and gathered amaxes of every operand, in the order of the layers."""
    states = [module.delayed_state for module in model.modules() if hasattr(module, "delayed_state")]
    return [t.clone() for state in states for o in state.operands for t in (o.scale, o.history, o.gathered)]


def under(recipe: Recipe | None) -> octavo.autocast:
    return octavo.autocast(enabled=recipe is not None, recipe=recipe)


def jittered(layer: nn.Module) -> nn.Module:
    """A layer whose normalisation is not the identity, in place."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith("layer_norm"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return layer


def assert_same_steps(
    fused: nn.Module, composed: nn.Module, recipe: Recipe | None, inputs: list[Tensor], returns_norm: bool = False
) -> None:
    """Forward, gradients and state are the same bits in every step of both."""
    for number, x in enumerate(inputs):
        outcomes = []
        for model in (fused, composed):
            leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
            with under(recipe):
                out = model(leaf)
            y, n = out if isinstance(out, tuple) else (out, None)
            loss = y.float().square().sum()
            if returns_norm:
                loss = loss + n.float().pow(3).sum()
            loss.backward()
            gradients = [p.grad for p in model.parameters()]
            outcomes.append([y, *([n] if returns_norm else []), leaf.grad, *gradients, *state_of(model)])
            model.zero_grad()
        assert len(outcomes[0]) == len(outcomes[1])
        for place, (a, b) in enumerate(zip(*outcomes, strict=True)):
            if a is None or b is None:
                assert a is b, f"step {number}, part {place}"
            else:
                assert a.dtype == b.dtype
                assert torch.equal(a.nan_to_num(1234.5), b.nan_to_num(1234.5)), f"step {number}, part {place}"


# Odd extents, so that everything is padded.
MAKERS: dict[str, Callable[..., Any]] = {
    "linear": lambda **options: octavo.LayerNormLinear(33, 50, **options),
    "mlp": lambda **options: octavo.LayerNormMLP(33, 50, **{"activation": "swiglu", **options}),
}
# For a GPU.
BIG: dict[str, Callable[..., Any]] = {
    "linear": lambda **options: octavo.LayerNormLinear(512, 768, dtype=BF16, **options),
    "mlp": lambda **options: octavo.LayerNormMLP(512, 768, dtype=BF16, **{"activation": "swiglu", **options}),
}
every_layer = pytest.mark.parametrize("kind", MAKERS)


def steps(*shape: int, dtype: torch.dtype = torch.float32, number: int = 3) -> list[Tensor]:
    """Inputs that grow, so that scales of the past saturate."""
    return [(torch.randn(*shape) * 1.7**step).to(dtype) for step in range(number)]
