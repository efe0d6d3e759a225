"""convert, unconvert, freeze and calibrate on models that hold Octavo's own layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.inference import FrozenLinear, freeze
from octavo.modules.split_linear import SplitLinear
from octavo.recipes import CurrentScaling, DelayedScaling, RowwiseScaling

PARTS = [
    "attention.layernorm_qkv",
    "attention.proj",
    "mlp.fc1",
    "mlp.fc2",
    "moe.expert0",
    "moe.expert1",
    "split",
    "head",
]


class Model(nn.Module):
    """One layer of each kind."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = octavo.MultiheadAttention(32, 2, input_layernorm=True, **options)
        self.mlp = octavo.LayerNormMLP(32, 64, **options)
        self.moe = octavo.GroupedLinear(2, 32, 32, **options)
        self.split = SplitLinear(32, {"a": 16, "b": 16}, **options)
        self.head = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mlp(self.attention(x))
        out: Tensor = self.head(self.split(self.moe(x, [4, x.shape[:-1].numel() - 4])))
        return out


def test_every_part_takes_the_recipe_and_runs_in_fp8() -> None:
    model, x = Model(), torch.randn(5, 2, 32)
    keys, parameters = list(model.state_dict()), list(model.parameters())
    report = octavo.convert(model, CurrentScaling())
    assert [row.name for row in report.converted] == PARTS
    assert {row.name: row.kind for row in report.layers} == {
        "attention.layernorm_qkv": "LayerNormSplitLinear",
        "attention.proj": "Linear",
        "mlp.fc1": "LayerNormMLP",
        "mlp.fc2": "LayerNormMLP",
        "moe.expert0": "GroupedLinear",
        "moe.expert1": "GroupedLinear",
        "split": "SplitLinear",
        "head": "Linear",
    }
    assert [(row.in_features, row.out_features) for row in report.layers][:3] == [(32, 96), (32, 32), (32, 64)]
    with octavo.count_gemms() as counted:
        model(x)
    assert (counted.fp8, counted.high_precision) == (len(PARTS), 0)
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def test_names_choose_among_parts_and_overrides_reach_them() -> None:
    model, x = Model(), torch.randn(5, 2, 32)
    own = RowwiseScaling()
    recipe = CurrentScaling(overrides={r"mlp\.fc2": None, r"moe\.": own})
    report = octavo.convert(model, recipe, exclude=[r"attention\.layernorm_qkv", "head"])
    assert [row.name for row in report.skipped] == ["attention.layernorm_qkv", "mlp.fc2", "head"]
    assert next(row.reason for row in report.skipped) == r"excluded by 'attention\\.layernorm_qkv'"
    assert {row.recipe for row in report.converted if row.name.startswith("moe")} == {"RowwiseScaling"}
    with octavo.count_gemms() as counted:
        model(x)
    assert counted.fp8 == 5
    assert model.mlp.fc2.recipe is None


def test_a_dry_run_changes_nothing() -> None:
    model = Model()
    assert len(octavo.convert(model, dry_run=True).converted) == len(PARTS)
    assert model.mlp.recipe is None
    assert model.split.recipe is None
    assert type(model.head) is nn.Linear


@pytest.mark.parametrize("before", [None, DelayedScaling(amax_history_len=3)])
def test_unconvert_leaves_octavos_layers_as_they_were(before: Any) -> None:
    model, x = Model(recipe=before), torch.randn(5, 2, 32)
    model.mlp.layer_name = "own"
    kinds, keys = [type(module) for module in model.modules()], list(model.state_dict())
    with torch.no_grad():
        y = model(x) if before is None else None
    octavo.convert(model, RowwiseScaling(), exclude="split")
    octavo.convert(model, CurrentScaling())
    model(x)
    octavo.unconvert(model)
    assert [type(module) for module in model.modules()] == kinds
    assert [part.recipe for part in (model.mlp.fc1, model.moe.expert1, model.split, model.attention.proj)] == [
        before
    ] * 4
    assert model.mlp.layer_name == "own"
    assert set(keys) == {key for key in model.state_dict() if not key.endswith(("_scale", "_amax_history"))} or before
    if y is not None:
        assert torch.equal(model(x), y)
    assert "_before_conversion" not in model.mlp.fc1.__dict__


def test_the_first_scales_of_delayed_scaling_come_from_the_first_batch() -> None:
    """As of a converted nn.Linear. With scales of 1 weights of 1e-4 would vanish, below half of the least subnormal."""
    layer, x = octavo.LayerNormLinear(32, 64, bias=False), torch.randn(64, 32)
    with torch.no_grad():
        layer.weight.mul_(1e-4)
        exact = layer(x)
    octavo.convert(layer, DelayedScaling(amax_history_len=4))
    # E4M3 rounds an operand by 2.65 % rms of log-uniform mantissas: 3.75 % for two, and some for what is subnormal.
    assert 0.01 < (layer(x) - exact).norm() / exact.norm() < 0.045


def test_freezing_takes_every_layer_and_says_so() -> None:
    model = Model()
    assert freeze(model, exclude="layernorm_qkv") == ["attention.proj", "mlp", "moe", "split", "head"]
    assert isinstance(model.split, FrozenLinear)


def test_a_frozen_split_linear_has_the_product_of_all_parts() -> None:
    model = nn.Sequential(SplitLinear(32, {"a": 16, "b": 48}))
    x = torch.randn(64, 32)
    exact = model(x).detach()
    freeze(model)
    # E4M3 rounds an operand by 2.65 % rms of log-uniform mantissas: 3.75 % for two, and some for what is subnormal.
    assert 0.01 < (model(x) - exact).norm() / exact.norm() < 0.045


def test_calibrate_has_a_scale_for_every_part() -> None:
    scales = octavo.calibrate(Model(), [torch.randn(5, 2, 32)])
    assert set(scales) == set(PARTS)


def test_octavos_own_layers_are_no_structures_that_are_not_known() -> None:
    """What a LayerNormMLP runs as one, it does by itself; so does what derives from it."""

    class Derived(octavo.LayerNormMLP):
        pass

    model = nn.Sequential(octavo.LayerNormMLP(32, 64), Derived(32, 64), octavo.TransformerLayer(32, 64, 2))
    report = octavo.convert(model)
    assert report.structures == ()
    assert "not fused" not in str(report)
