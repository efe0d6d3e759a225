"""FP16 under torch.amp.GradScaler: with every recipe overflowing steps are skipped, and nothing is left of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import octavo
from octavo.recipes import (
    BlockScaling,
    CurrentScaling,
    CustomRecipe,
    DelayedScaling,
    MXFP8Scaling,
    QuantizeSpec,
    Recipe,
    RowwiseScaling,
    StaticScaling,
)
from octavo.recipes.recipe import OPERANDS

FORWARD = QuantizeSpec(format="E4M3")
DELAYED_GRADIENT = QuantizeSpec(format="E5M2", scaling="delayed", inf_to_nan=True)

RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=8),
    "delayed, most recent": DelayedScaling(amax_compute_algo="most_recent"),
    "delayed, high precision backward": DelayedScaling(backward="high_precision"),
    "current": CurrentScaling(),
    "current, powers of two": CurrentScaling(power_of_two_scales=True),
    "row": RowwiseScaling(),
    "row, high precision wgrad": RowwiseScaling(high_precision_wgrad=True),
    "block": BlockScaling(),
    "mx": MXFP8Scaling(),
    "static": StaticScaling(input_scale=0.01, weight_scale=0.001),
    "delayed, stochastic": DelayedScaling(amax_history_len=8, grad_output_rounding="stochastic"),
    "current, stochastic": CurrentScaling(grad_output_rounding="stochastic"),
    "block, stochastic": BlockScaling(grad_output_rounding="stochastic"),
    "custom": CustomRecipe(
        fprop_input=FORWARD,
        fprop_weight=QuantizeSpec(format="E4M3", granularity="row"),
        dgrad_grad_output=DELAYED_GRADIENT,
        dgrad_weight=FORWARD,
        wgrad_grad_output=DELAYED_GRADIENT,
        wgrad_input=FORWARD,
    ),
}
# A product that takes each operand.
USES: dict[str, Any] = {name: ("dgrad" if name == "grad_output" else "fprop", name) for name in OPERANDS}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
STEPS, OVERFLOWS = 16, (4, 5, 11)


def network(kind: str, device: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "linear":
        model: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    else:
        model = nn.Sequential(octavo.LayerNormLinear(32, 32), octavo.LayerNormMLP(32, 64))
    return model.to(device)


class Run:
    """A model and its scaler; what overflows is the loss, so that every gradient does."""

    def __init__(self, recipe: Recipe | None, device: str, kind: str = "linear", **scaler: Any) -> None:
        self.model, self.recipe, self.device = network(kind, device), recipe, device
        if recipe is not None:
            octavo.convert(self.model, recipe, filter="all")
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-2)
        options = {"init_scale": 2.0**8, "growth_interval": 4} | scaler
        self.scaler = torch.amp.GradScaler(device, **options)

    def step(self, number: int, overflow: float = 1.0, clip: bool = False) -> float:
        torch.manual_seed(number % 4)
        x = torch.randn(16, 32).to(self.device)
        with torch.autocast(self.device, torch.float16):
            y = self.model(x)
            assert y.dtype == torch.float16
        loss = (y.float() - x.flip(1)).square().mean() * overflow
        self.scaler.scale(loss).backward()
        if clip:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        octavo.update_scales(self.model) if self.recipe is not None else None
        self.optimizer.zero_grad()
        return loss.item()

    def parameters(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def states(self) -> dict[str, torch.Tensor]:
        """Scales and histories, but for a scale of an operand without delayed scaling, which stays unknown."""
        entries = {k: v.clone() for k, v in self.model.state_dict().items() if k.endswith(("_scale", "_amax_history"))}
        specs = {} if self.recipe is None else {name: self.recipe.spec(*use) for name, use in USES.items()}
        unknown = tuple(f"{name}_scale" for name, spec in specs.items() if spec is None or spec.scaling != "delayed")
        return {k: v for k, v in entries.items() if not k.endswith(unknown)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["linear", "fused"])
def test_overflows_are_skipped_and_the_factor_moves_as_with_plain_modules(kind: str, recipe: str, device: str) -> None:
    plain, mine = Run(None, device, kind), Run(RECIPES[recipe], device, kind)
    losses = []
    for number in range(STEPS):
        overflow = float("inf") if number in OVERFLOWS else 1.0
        before = mine.parameters()
        plain.step(number, overflow)
        losses.append(mine.step(number, overflow))
        assert mine.scaler.get_scale() == plain.scaler.get_scale(), f"step {number}"
        changed = [not torch.equal(a, b) for a, b in zip(before, mine.parameters(), strict=True)]
        assert not any(changed) if number in OVERFLOWS else all(changed), f"step {number}"
        assert all(bool(value.isfinite().all()) for value in mine.states().values())
    assert losses[-1] < 0.8 * losses[3]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name.startswith("delayed")])
def test_gradients_without_a_finite_value_leave_no_trace_in_delayed_scaling(recipe: str, device: str) -> None:
    run = Run(RECIPES[recipe], device)
    for number in range(4):
        run.step(number)
    before = run.states()
    for number in range(4, 8):
        run.step(number, float("nan") if number % 2 else float("inf"))
    for key, value in run.states().items():
        if "grad_output" in key:
            assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_that_is_partly_infinite_counts_with_its_largest_finite_value(device: str) -> None:
    run = Run(RECIPES["delayed"], device)
    run.step(0)
    layer: Any = run.model[2]  # type: ignore[index]
    x = torch.randn(16, 64, device=device)
    with torch.autocast(device, torch.float16):
        y = layer(x)
    gradient = torch.full_like(y, 3.0)
    gradient[3, 5], gradient[7] = float("inf"), float("nan")
    y.backward(gradient)
    assert not bool(layer.weight.grad.isfinite().all()), "the scaler must see it"
    octavo.update_scales(run.model)
    history = layer.delayed_state.grad_output.history
    assert history[-1].item() == 3.0
    assert bool(history.isfinite().all())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_factor_that_is_too_large_comes_down_and_training_begins(recipe: str) -> None:
    run = Run(RECIPES[recipe], "cpu", init_scale=2.0**30, growth_interval=1000)
    losses = [run.step(number) for number in range(40)]
    assert run.scaler.get_scale() < 2.0**30
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_larger_factor_alone_changes_no_step(recipe: str) -> None:
    """Powers of two pass a floating-point cast and its scale: without overflow two factors train alike."""
    one, other = (Run(RECIPES[recipe], "cpu", init_scale=2.0**power, growth_interval=1000) for power in (8, 12))
    for number in range(6):
        assert one.step(number) == pytest.approx(other.step(number), rel=0.02)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_unscaling_and_clipping_first(recipe: str) -> None:
    run = Run(RECIPES[recipe], "cpu")
    for number in range(8):
        before = run.parameters()
        run.step(number, float("inf") if number == 4 else 1.0, clip=True)
        same = all(torch.equal(a, b) for a, b in zip(before, run.parameters(), strict=True))
        assert same == (number == 4)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_the_context_ends_the_step_too(recipe: str) -> None:
    run = Run(None, "cpu")
    octavo.convert(run.model, RECIPES[recipe])
    for number in range(6):
        before = copy.deepcopy(run.states())
        with octavo.autocast(recipe=RECIPES[recipe]):
            run.step(number, float("inf") if number == 3 else 1.0)
        assert all(bool(v.isfinite().all()) for v in run.states().values())
        if number == 3:
            grads = [k for k in before if "grad_output" in k]
            assert all(torch.equal(before[k], run.states()[k]) for k in grads)
