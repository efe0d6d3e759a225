"""Recipes: frozen, complete and checked when built; and no field that does nothing."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import octavo
import octavo.runtime.update
from octavo import recipes
from octavo.recipes import (
    Accumulate,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    FormatPair,
    MXFP8Scaling,
    Recipe,
    RowwiseScaling,
    StaticScaling,
)

LINEAR = importlib.import_module("octavo.functional.linear")  # a function of that name hides it
SCALED_MM = LINEAR.scaled_mm

KINDS: list[type[Recipe]] = [
    kind
    for kind in vars(recipes).values()
    if inspect.isclass(kind) and issubclass(kind, Recipe) and not inspect.isabstract(kind)
]
# What a recipe cannot be built without.
NEEDED: dict[type[Recipe], dict[str, Any]] = {StaticScaling: {"input_scale": 0.05, "weight_scale": 0.01}}

CHANGED: dict[type[Recipe], dict[str, Any]] = {
    Recipe: {
        "accumulate": Accumulate(fprop="precise"),
        "backward": "high_precision",
        "saved_input": "high_precision",
        "saved_weight": "high_precision",
        "overrides": {"^layer$": None},
    },
    DelayedScaling: {
        "format": octavo.E4M3,
        "margin": 2,
        "amax_history_len": 2,
        "amax_compute_algo": "most_recent",
        "reduce_amax": False,
        "initialise_from_first_batch": True,
    },
    CurrentScaling: {"format": octavo.E4M3, "power_of_two_scales": True, "amax_epsilon": 1e3},
    BlockScaling: {"format": octavo.HYBRID, "power_of_two_scales": False},
    MXFP8Scaling: {"format": octavo.HYBRID, "scale_rounding": "floor"},
    RowwiseScaling: {"format": octavo.HYBRID, "power_of_two_scales": False, "high_precision_wgrad": True},
    StaticScaling: {"format": octavo.E4M3, "input_scale": 0.4, "weight_scale": None, "grad_output_scale": 4.0},
}


# Products by block can sum in one way only; another one raises, see below.
FIELDS = [
    (kind, field.name)
    for kind in KINDS
    for field in dataclasses.fields(kind)
    if (kind, field.name) not in ((BlockScaling, "accumulate"), (MXFP8Scaling, "accumulate"))
]


class Doubling:
    """Stands for several ranks, of which another one always has twice the amax."""

    def needed(self, group: object | None) -> bool:
        return True

    def reduce(self, amaxes: Tensor, group: object | None) -> Tensor:
        return amaxes * 2


def outcome(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All that can be seen of four steps: outputs, gradients, how products summed, what was kept for the backward."""
    seen: list[Any] = []
    kept: list[int] = []
    real = SCALED_MM

    def spying(*args: Any) -> Tensor:
        seen.append(args[-1])
        return real(*args)

    monkeypatch.setattr(LINEAR, "scaled_mm", spying)
    monkeypatch.setattr(octavo.runtime.update._Collective, "agreement", Doubling())
    torch.manual_seed(0)
    layer = octavo.Linear(32, 48)
    layer.layer_name = "layer"
    for size in (1.0, 30.0, 3.0, 2.0, 1.0):
        x = (torch.randn(24, 32) * size).requires_grad_()
        keeping = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t)
        with octavo.autocast(recipe=recipe), keeping:
            y = layer(x)
        layer.weight.grad = None
        (y.square().sum() / size).backward()
        seen += [y.detach(), x.grad, layer.weight.grad.clone()]
    return [*seen, torch.tensor(kept)]


def same(a: list[Any], b: list[Any]) -> bool:
    if len(a) != len(b):
        return False
    return all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x is y
        for x, y in zip(a, b, strict=False)
    )


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=lambda value: getattr(value, "__name__", value))
def test_every_field_changes_something(kind: type[Recipe], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = kind(**NEEDED.get(kind, {}))
    changed = CHANGED[kind].get(name, CHANGED[Recipe].get(name, dataclasses.MISSING))
    assert changed is not dataclasses.MISSING, f"say here how {kind.__name__}.{name} could be changed"
    other = base.replaced(**{name: changed})
    assert other != base
    assert same(outcome(base, monkeypatch), outcome(base, monkeypatch)), "else the next line would prove nothing"
    assert not same(outcome(base, monkeypatch), outcome(other, monkeypatch))


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_every_product_sums_as_it_is_told(gemm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = CurrentScaling()
    told = getattr(base.accumulate, gemm)
    flipped = dataclasses.replace(base.accumulate, **{gemm: "fast" if told == "precise" else "precise"})
    assert not same(outcome(base, monkeypatch), outcome(base.replaced(accumulate=flipped), monkeypatch))


@pytest.mark.parametrize("kind", KINDS)
def test_recipes_are_hashable_picklable_and_equal_by_value(kind: type[Recipe]) -> None:
    recipe = kind(**NEEDED.get(kind, {}), overrides={"head": None, r"blocks\.0": CurrentScaling()})
    for other in (pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe), copy.copy(recipe), recipe.replaced()):
        assert other == recipe
        assert hash(other) == hash(recipe)
        assert other.linear == recipe.linear
        assert other.linear.input.format is recipe.linear.input.format
    assert kind(**NEEDED.get(kind, {}), overrides={}) != recipe


@pytest.mark.parametrize("kind", KINDS)
def test_recipes_are_frozen_and_keyword_only(kind: type[Recipe]) -> None:
    recipe = kind(**NEEDED.get(kind, {}))
    for field in dataclasses.fields(kind):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(recipe, field.name, None)
    with pytest.raises(TypeError, match="positional argument"):
        kind(octavo.E4M3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        kind(**NEEDED.get(kind, {}), colour="red")
    with pytest.raises(ValueError, match=f"{kind.__name__} has no field 'colour': it has .*backward"):
        recipe.replaced(colour="red")


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        *[(kind, {"backward": "bf16"}, "backward is 'bf16': expected 'fp8' or") for kind in KINDS],
        *[(kind, {"saved_input": "codes"}, "saved_input is 'codes': expected 'fp8' or") for kind in KINDS],
        *[(kind, {"saved_weight": True}, "saved_weight is True: expected 'fp8' or") for kind in KINDS],
        *[
            (
                kind,
                {"backward": "high_precision", saved: "high_precision"},
                f"{saved}='high_precision' says what an FP8",
            )
            for kind in KINDS
            for saved in ("saved_input", "saved_weight")
        ],
        *[(kind, {"accumulate": "fast"}, "expected an octavo.recipes.Accumulate") for kind in KINDS],
        *[(kind, {"format": "E4M4"}, "format is 'E4M4': expected octavo.HYBRID") for kind in KINDS],
        *[(kind, {"format": octavo.E8M0}, "holds no operand of a product") for kind in KINDS],
        *[(kind, {"overrides": {"(": None}}, "no pair of a regular expression") for kind in KINDS],
        *[(kind, {"overrides": ["head"]}, "no pair of a regular expression") for kind in KINDS],
        *[(kind, {"overrides": {"head": "off"}}, "expected a recipe, or None") for kind in KINDS],
        (DelayedScaling, {"margin": 1.5}, "margin is 1.5: expected an integer"),
        (DelayedScaling, {"margin": 2000}, "margin is 2000: expected an integer from"),
        (DelayedScaling, {"amax_history_len": 0}, "amax_history_len is 0"),
        (DelayedScaling, {"amax_history_len": True}, "amax_history_len is True"),
        (DelayedScaling, {"amax_history_len": 2.0}, "amax_history_len is 2.0"),
        (DelayedScaling, {"amax_compute_algo": "mean"}, "expected 'max', 'most_recent' or a function"),
        (DelayedScaling, {"reduce_amax": "yes"}, "reduce_amax is 'yes': expected True or False"),
        (DelayedScaling, {"initialise_from_first_batch": 1}, "initialise_from_first_batch is 1"),
        (CurrentScaling, {"amax_epsilon": -1.0}, "amax_epsilon is -1.0"),
        (CurrentScaling, {"amax_epsilon": float("nan")}, "amax_epsilon is nan"),
        (CurrentScaling, {"amax_epsilon": "small"}, "amax_epsilon is 'small'"),
        (CurrentScaling, {"power_of_two_scales": None}, "power_of_two_scales is None"),
        (RowwiseScaling, {"high_precision_wgrad": 0}, "high_precision_wgrad is 0"),
        (
            RowwiseScaling,
            {"high_precision_wgrad": True, "backward": "high_precision"},
            "leave high_precision_wgrad out",
        ),
        *[
            (kind, {"accumulate": Accumulate(**{"fprop": "precise", gemm: "fast"})}, rf"{gemm} is 'fast': products")
            for kind in (BlockScaling, MXFP8Scaling)
            for gemm in ("fprop", "dgrad", "wgrad")
        ],
        (BlockScaling, {"power_of_two_scales": 1}, "power_of_two_scales is 1"),
        (MXFP8Scaling, {"scale_rounding": "nearest"}, "scale_rounding is 'nearest': expected 'up' or 'floor'"),
        (MXFP8Scaling, {"scale_rounding": True}, "scale_rounding is True: expected 'up' or 'floor'"),
        *[(kind, {"format": 3}, "format is 3: expected octavo.HYBRID") for kind in KINDS],
        *[(kind, {"format": "E8M0"}, "format E8M0 holds no operand of a product") for kind in KINDS],
        (StaticScaling, {"input_scale": 0.0}, "input_scale is 0.0: a scale is a number, positive and finite"),
        (StaticScaling, {"input_scale": -1.0}, "input_scale is -1.0: a scale is a number, positive and finite"),
        (StaticScaling, {"weight_scale": float("nan")}, "weight_scale is nan"),
        (StaticScaling, {"grad_output_scale": "1"}, "grad_output_scale is '1'"),
        (StaticScaling, {"input_scale": 1e-60}, "input_scale is 1e-60: .*normal numbers"),
        (StaticScaling, {"grad_output_scale": 1.0, "backward": "high_precision"}, "leave one of them out"),
    ],
)
def test_unknown_or_contradictory_values_raise(kind: type[Recipe], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**{**NEEDED.get(kind, {}), **fields})


@pytest.mark.parametrize("kind", KINDS)
def test_a_format_may_be_given_by_its_name_or_its_dtype_as_quantize_takes_it(kind: type[Recipe]) -> None:
    for given, meant in (
        ("E5M2", octavo.E5M2),
        (torch.float8_e4m3fn, octavo.E4M3),
        ("HYBRID", octavo.HYBRID),
        (FormatPair("E5M2", "E4M3"), FormatPair(octavo.E5M2, octavo.E4M3)),  # type: ignore[arg-type]
    ):
        named, itself = (kind(**NEEDED.get(kind, {}), format=format) for format in (given, meant))
        assert named == itself
        assert hash(named) == hash(itself)
        assert named.linear == itself.linear
        assert named.format is meant or named.format == meant


def test_static_scaling_without_a_scale_says_what_to_use() -> None:
    with pytest.raises(ValueError, match="or use CurrentScaling"):
        StaticScaling()


def test_accumulate_is_checked() -> None:
    with pytest.raises(ValueError, match=r"accumulate\.wgrad is 'slow': expected 'fast' or 'precise'"):
        Accumulate(wgrad="slow")


@pytest.mark.parametrize("kind", KINDS)
def test_the_specs_are_those_of_the_formats(kind: type[Recipe]) -> None:
    pair = FormatPair(octavo.E5M2, octavo.E4M3)
    recipe = kind(**NEEDED.get(kind, {}), format=pair)
    assert recipe.linear.input.format is recipe.linear.weight.format is octavo.E5M2
    assert recipe.linear.grad_output.format is octavo.E4M3
    assert recipe.linear.grad_output.inf_to_nan
    assert not recipe.linear.input.inf_to_nan
    assert recipe.spec("dgrad", "grad_output") == recipe.linear.grad_output
    high = kind(**NEEDED.get(kind, {}), backward="high_precision")
    assert high.spec("dgrad", "grad_output") is high.spec("wgrad", "input") is None
    assert not (high.linear.dgrad_fp8)
    assert not (high.linear.wgrad_fp8)


def test_the_first_override_that_matches_wins() -> None:
    inner = RowwiseScaling()
    recipe = CurrentScaling(overrides=[(r"\.fc1$", inner), (r"blocks\.0", None)])
    assert recipe.for_layer("blocks.0.fc1") is inner
    assert recipe.for_layer("blocks.0.fc2") is None
    assert recipe.for_layer("blocks.1.fc2") is recipe


def test_overrides_of_a_layer_without_a_name_are_not_passed_over() -> None:
    layer = octavo.Linear(16, 16)
    with octavo.autocast(recipe=CurrentScaling(overrides={"head": None})):
        with pytest.raises(ValueError, match=r"this layer has none.*layer\.layer_name"):
            layer(torch.randn(4, 16))
        layer.layer_name = "head"
        x = torch.randn(4, 16)
        assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
