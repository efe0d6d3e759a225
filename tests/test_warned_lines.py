"""A warning of a public function names the line that called it, not one of Octavo's or torch's."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import octavo
from octavo.compat.float8_experimental.float8_linear import Float8Linear
from octavo.compat.float8_experimental.float8_linear_utils import (
    swap_linear_with_float8_linear,
    sync_float8_amax_and_scale_history,
)
from octavo.compat.transformer_engine import pytorch as te
from octavo.compat.transformer_engine.pytorch.construction import Warned
from octavo.inspection import PrecisionBounds
from octavo.recipes import CurrentScaling, DelayedScaling
from octavo.runtime.cuda_graphs import GraphedForward, _Captured

X = torch.randn(4, 16)


def converted(recipe: octavo.recipes.Recipe | None = None) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16)))
    octavo.convert(model, recipe, filter="all")
    return model


def update_nothing() -> None:
    octavo.update_scales(nn.Linear(4, 4))


def convert_nothing() -> None:
    octavo.convert(nn.Sequential(nn.ReLU()))


def set_no_layers_recipe() -> None:
    octavo.set_recipe(converted(), CurrentScaling(overrides={"head": None}))


def freeze_nothing() -> None:
    octavo.freeze(nn.Sequential(nn.ReLU()))


def freeze_with_a_pattern_of_nothing() -> None:
    octavo.freeze(converted(), exclude="head")


def unconvert_what_was_replaced() -> None:
    model = converted()
    before = model[0].forward
    model[0].forward = lambda *args: before(*args)
    octavo.unconvert(model)


def guard_what_leaves_its_bounds() -> None:
    model = converted()
    with octavo.PrecisionGuard(model, every=1, bounds=PrecisionBounds(sqnr_db=1000.0)) as guard:
        model(X)
        guard.step()


def guard_what_never_ran() -> None:
    with octavo.PrecisionGuard(converted(), every=1) as guard:
        guard.step()


def forget_the_update_of(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        model(X).sum().backward()
        optimizer.step()


def forget_the_update_of_a_layer() -> None:
    forget_the_update_of(octavo.Linear(16, 16, recipe=DelayedScaling()))


def forget_the_update_of_a_model() -> None:
    forget_the_update_of(converted(DelayedScaling()))


def forget_the_update_of_an_mlp() -> None:
    model = octavo.LayerNormMLP(16, 32)
    octavo.convert(model, DelayedScaling(), filter="all")
    forget_the_update_of(model)


def give_a_graphed_module_an_input_with_a_gradient() -> None:
    model = nn.Linear(16, 16)
    captured = _Captured(model.forward, model.forward, True, ((X.shape, X.dtype, False),))
    model.forward = GraphedForward(model, [], captured)
    nn.Sequential(model)(X.clone().requires_grad_())


def predict_moments_of_two_kinds() -> None:
    model = converted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    octavo.predict_weight_scales(model, optimizer, every=4)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    model(X).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["betas"] = (0.8, 0.99)
    optimizer.step()


def sync_nothing() -> None:
    sync_float8_amax_and_scale_history(nn.Linear(4, 4))


def skip_what_is_not_there() -> None:
    swap_linear_with_float8_linear(nn.Sequential(nn.Linear(16, 16)), Float8Linear, skip_fqn_list=["head"])


def stand_on_the_cpu(monkeypatch: pytest.MonkeyPatch, build: Callable[[], object]) -> None:
    monkeypatch.setattr(Warned, "no_gpu", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    build()


def assert_names_this_file(act: Callable[[], object]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # A frame too far out is in another file.
        exec(compile("act()", "the caller of the caller", "exec"), {"act": act})
    assert [warning.filename for warning in caught] == [__file__] * len(caught), [str(one.message) for one in caught]
    assert caught


@pytest.mark.parametrize(
    "act",
    [
        update_nothing,
        convert_nothing,
        set_no_layers_recipe,
        freeze_nothing,
        freeze_with_a_pattern_of_nothing,
        unconvert_what_was_replaced,
        guard_what_leaves_its_bounds,
        guard_what_never_ran,
        forget_the_update_of_a_layer,
        forget_the_update_of_a_model,
        forget_the_update_of_an_mlp,
        give_a_graphed_module_an_input_with_a_gradient,
        predict_moments_of_two_kinds,
        sync_nothing,
        skip_what_is_not_there,
    ],
)
def test_a_warning_names_the_line_that_called(act: Callable[[], object]) -> None:
    assert_names_this_file(act)


@pytest.mark.parametrize(
    "build",
    [lambda: te.Linear(16, 16), lambda: te.LayerNormMLP(16, 32), lambda: te.TransformerLayer(16, 32, 2)],
    ids=["Linear", "LayerNormMLP", "TransformerLayer"],
)
def test_that_there_is_no_gpu_names_the_line_that_built(
    monkeypatch: pytest.MonkeyPatch, build: Callable[[], object]
) -> None:
    assert_names_this_file(lambda: stand_on_the_cpu(monkeypatch, build))
