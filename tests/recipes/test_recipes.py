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
    CustomRecipe,
    DelayedScaling,
    FormatPair,
    MXFP8Scaling,
    QuantizeSpec,
    Recipe,
    RowwiseScaling,
    StaticScaling,
)
from octavo.runtime import Call, LayerState, plan_linear

LINEAR = importlib.import_module("octavo.functional.linear")  # a function of that name hides it
SCALED_MM = LINEAR.scaled_mm

KINDS: list[type[Recipe]] = [
    kind
    for kind in vars(recipes).values()
    if inspect.isclass(kind) and issubclass(kind, Recipe) and not inspect.isabstract(kind)
]
# All but the one whose specs name theirs.
WITH_FORMAT = [kind for kind in KINDS if kind is not CustomRecipe]
X, DY = QuantizeSpec(format=octavo.E4M3), QuantizeSpec(format=octavo.E5M2, inf_to_nan=True)
WITH_DELAY = QuantizeSpec(format=octavo.E4M3, scaling="delayed")
# What a recipe cannot be built without.
NEEDED: dict[type[Recipe], dict[str, Any]] = {
    StaticScaling: {"input_scale": 0.05, "weight_scale": 0.01},
    CustomRecipe: {
        "fprop_input": X,
        "fprop_weight": X,
        "dgrad_grad_output": DY,
        "dgrad_weight": X,
        "wgrad_grad_output": DY,
        "wgrad_input": X,
    },
}
# Whose inputs have histories, for the fields that say how these are updated.
DELAYED_INPUT = {**NEEDED[CustomRecipe], "fprop_input": WITH_DELAY, "wgrad_input": WITH_DELAY}
OF_HISTORIES = ("margin", "amax_history_len", "amax_compute_algo", "reduce_amax", "initialise_from_first_batch")

Y, DX, DW, SUMS, KEPT = "output", "input's gradient", "weight's gradient", "how products sum", "bytes kept"
ALL_BITS = {Y, DX, DW}

# Another value of each field, and what is seen of it: these and no others differ.
CHANGED: dict[type[Recipe], dict[str, tuple[Any, set[str]]]] = {
    Recipe: {
        "accumulate": (Accumulate(fprop="precise"), {SUMS}),
        "backward": ("high_precision", {DX, DW, SUMS, KEPT}),
        "saved_input": ("high_precision", {KEPT}),
        "saved_weight": ("high_precision", {KEPT}),
        "grad_output_rounding": ("stochastic", {DX, DW}),
        "overrides": ({"^layer$": None}, {Y, DX, DW, SUMS, KEPT}),
    },
    DelayedScaling: {
        "format": (octavo.E4M3, {DX, DW}),
        # A factor of two is seen in what saturates, the input.
        "margin": (2, {Y, DW}),
        "amax_history_len": (2, ALL_BITS),
        "amax_compute_algo": ("most_recent", ALL_BITS),
        "reduce_amax": (False, {Y, DW}),
        "initialise_from_first_batch": (True, ALL_BITS),
    },
    CurrentScaling: {
        "format": (octavo.E4M3, {DX, DW}),
        "power_of_two_scales": (True, ALL_BITS),
        "amax_epsilon": (1e3, ALL_BITS),
    },
    BlockScaling: {"format": (octavo.HYBRID, {DX, DW}), "power_of_two_scales": (False, ALL_BITS)},
    MXFP8Scaling: {"format": (octavo.HYBRID, {DX, DW}), "scale_rounding": ("floor", ALL_BITS)},
    RowwiseScaling: {
        "format": (octavo.HYBRID, {DX, DW}),
        "power_of_two_scales": (False, ALL_BITS),
        "high_precision_wgrad": (True, {DW, SUMS, KEPT}),
    },
    StaticScaling: {
        "format": (octavo.E4M3, {DX, DW}),
        "input_scale": (0.4, {Y, DW}),
        "weight_scale": (None, {Y, DX}),
        "grad_output_scale": (4.0, {DX, DW}),
    },
    CustomRecipe: {
        "accumulate": (Accumulate(fprop="fast", dgrad="precise", wgrad="precise"), {SUMS}),
        "fprop_input": (QuantizeSpec(format=octavo.E4M3, granularity="row"), {Y}),
        "fprop_weight": (QuantizeSpec(format=octavo.E5M2), {Y}),
        "dgrad_grad_output": (QuantizeSpec(format=octavo.E4M3), {DX}),
        "dgrad_weight": (QuantizeSpec(format=octavo.E4M3, granularity="row"), {DX, KEPT}),
        "wgrad_grad_output": (QuantizeSpec(format=octavo.E5M2, rounding="stochastic"), {DW}),
        "wgrad_input": (QuantizeSpec(format=octavo.E4M3, scaling="static", static_scale=0.5), {DW}),
    },
}
# Of the input, which dgrad does not take.
CHANGED[CustomRecipe].update({name: (CHANGED[DelayedScaling][name][0], {Y, DW}) for name in OF_HISTORIES})

# What has one legal value: another one raises, see below. Products by block sum in one way only, and a CustomRecipe
# has specs that say what these two say of other recipes.
OF_ONE_VALUE = (
    (BlockScaling, "accumulate"),
    (MXFP8Scaling, "accumulate"),
    (CustomRecipe, "backward"),
    (CustomRecipe, "grad_output_rounding"),
)
FIELDS = [
    (kind, field.name) for kind in KINDS for field in dataclasses.fields(kind) if (kind, field.name) not in OF_ONE_VALUE
]


class Doubling:
    """Stands for several ranks, of which another one always has twice the amax."""

    def needed(self, group: object | None) -> bool:
        return True

    def reduce(self, amaxes: Tensor, group: object | None) -> Tensor:
        return amaxes * 2


def outcome(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """All that can be seen of five steps: outputs, gradients, how products summed, what was kept for the backward."""
    seen: dict[str, list[Any]] = {Y: [], DX: [], DW: [], SUMS: [], KEPT: []}
    real = SCALED_MM

    def spying(*args: Any) -> Tensor:
        seen[SUMS].append(args[-1])
        return real(*args)

    monkeypatch.setattr(LINEAR, "scaled_mm", spying)
    monkeypatch.setattr(octavo.runtime.update._Collective, "agreement", Doubling())
    torch.manual_seed(0)
    layer = octavo.Linear(32, 48)
    layer.layer_name = "layer"
    inputs, gradients = torch.randn(5, 24, 32), torch.randn(5, 24, 48)
    for step, size in enumerate((1.0, 30.0, 3.0, 2.0, 1.0)):
        x = (inputs[step] * size).requires_grad_()
        keeping = torch.autograd.graph.saved_tensors_hooks(lambda t: seen[KEPT].append(t.nbytes) or t, lambda t: t)
        with octavo.autocast(recipe=recipe), keeping:
            y = layer(x)
        layer.weight.grad = None
        y.backward(gradients[step] / size)
        seen[Y].append(y.detach())
        seen[DX].append(x.grad)
        seen[DW].append(layer.weight.grad.clone())
    return seen


def same(a: list[Any], b: list[Any]) -> bool:
    if len(a) != len(b):
        return False
    return all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x == y
        for x, y in zip(a, b, strict=False)
    )


def differing(one: Recipe, other: Recipe, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What is seen of five steps that differs between two recipes."""
    a, b = outcome(one, monkeypatch), outcome(other, monkeypatch)
    return {name for name in a if not same(a[name], b[name])}


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=lambda value: getattr(value, "__name__", value))
def test_every_field_changes_something(kind: type[Recipe], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = DELAYED_INPUT if kind is CustomRecipe and name in OF_HISTORIES else NEEDED.get(kind, {})
    base = kind(**needed)
    known = CHANGED[kind].get(name, CHANGED[Recipe].get(name))
    assert known is not None, f"say here how {kind.__name__}.{name} could be changed, and what is seen of it"
    changed, seen = known
    other = base.replaced(**{name: changed})
    assert other != base
    assert not differing(base, base, monkeypatch), "else the next line would prove nothing"
    assert differing(base, other, monkeypatch) == seen


CHANGED_SPEC: dict[str, tuple[Any, dict[str, Any]]] = {
    # Another value, and what the spec it is changed in has besides.
    "format": (octavo.E5M2, {}),
    "granularity": ("row", {}),
    "scaling": ("delayed", {}),
    "power_of_two": (True, {}),
    "scale_rounding": ("floor", {"granularity": "mx"}),
    "epsilon": (1e3, {}),
    "inf_to_nan": (True, {}),
    "static_scale": (0.25, {"scaling": "static", "static_scale": 0.5}),
    "rounding": ("stochastic", {}),
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(QuantizeSpec)])
def test_every_field_of_a_spec_changes_something(name: str) -> None:
    assert name in CHANGED_SPEC, f"say here how QuantizeSpec.{name} could be changed"
    changed, besides = CHANGED_SPEC[name]
    codes = []
    x = torch.randn(64, 32)
    x[0, 0] = float("inf")
    for value in (besides, {**besides, name: changed}):
        spec = QuantizeSpec(**{"format": octavo.E4M3, **value})
        needed = {**NEEDED[CustomRecipe], "fprop_input": spec, "wgrad_input": spec}
        other = {"fprop_weight": spec, "dgrad_weight": spec, "wgrad_grad_output": spec, "dgrad_grad_output": spec}
        recipe = CustomRecipe(**{**needed, **other} if spec.granularity.name == "mx" else needed)
        state = LayerState()
        plan = plan_linear(Call(recipe, False), state, "")
        operand = plan.input(x, True, False)
        codes.append((operand.codes.view(torch.uint8), operand.scale.float()))
    (first, first_scale), (second, second_scale) = codes
    assert not (torch.equal(first, second) and torch.equal(first_scale, second_scale))


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("kind", [CurrentScaling, CustomRecipe])
def test_every_product_sums_as_it_is_told(kind: type[Recipe], gemm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = kind(**NEEDED.get(kind, {}))
    told = getattr(base.accumulate, gemm)
    flipped = dataclasses.replace(base.accumulate, **{gemm: "fast" if told == "precise" else "precise"})
    assert differing(base, base.replaced(accumulate=flipped), monkeypatch) == {SUMS}


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
    with pytest.raises(
        TypeError, match=f"{kind.__name__} takes no values without a name, found E4M3: fields are given by"
    ):
        kind(octavo.E4M3)
    no_field = rf"{kind.__name__} has no field 'colour'\. Its fields are: .*backward"
    with pytest.raises(TypeError, match=no_field):
        kind(**NEEDED.get(kind, {}), colour="red")
    with pytest.raises(TypeError, match=no_field):
        dataclasses.replace(recipe, colour="red")
    with pytest.raises(ValueError, match=no_field):
        recipe.replaced(colour="red")


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        *[(kind, {"backward": "bf16"}, "backward is 'bf16': expected 'fp8' or") for kind in KINDS],
        *[(kind, {"saved_input": "codes"}, "saved_input is 'codes': expected 'fp8' or") for kind in KINDS],
        *[(kind, {"saved_weight": True}, "saved_weight is True: expected 'fp8' or") for kind in KINDS],
        *[(kind, {"grad_output_rounding": "up"}, "grad_output_rounding is 'up': expected 'nearest'") for kind in KINDS],
        *[
            (
                kind,
                {"backward": "high_precision", "grad_output_rounding": "stochastic"},
                "rounds what the FP8 products of the backward take",
            )
            for kind in WITH_FORMAT
        ],
        *[
            (
                kind,
                {"backward": "high_precision", saved: "high_precision"},
                f"{saved}='high_precision' says what an FP8",
            )
            for kind in WITH_FORMAT
            for saved in ("saved_input", "saved_weight")
        ],
        *[(kind, {"accumulate": "fast"}, "expected an octavo.recipes.Accumulate") for kind in KINDS],
        *[(kind, {"format": "E4M4"}, "format is 'E4M4': expected octavo.HYBRID") for kind in WITH_FORMAT],
        *[(kind, {"format": octavo.E8M0}, "holds no operand of a product") for kind in WITH_FORMAT],
        *[(kind, {"overrides": {"(": None}}, "no pair of a regular expression") for kind in KINDS],
        *[
            (
                kind,
                {"overrides": given},
                rf"overrides are \{{pattern: recipe or None\}}, found {type(given).__name__}: ",
            )
            for kind in KINDS
            for given in (["mlp"], ["ab"], "mlp", None, 3)
        ],
        *[(kind, {"overrides": [("head",)]}, "no pair of a regular expression") for kind in KINDS],
        *[(kind, {"overrides": {"head": "off"}}, "expected a recipe, or None") for kind in KINDS],
        *[
            (
                kind,
                {"overrides": {"head": None, "mlp": RowwiseScaling(overrides={"0": None})}},
                "override 'mlp' names a recipe with overrides of its own, which nobody would look at: give them in the"
                " outer recipe",
            )
            for kind in KINDS
        ],
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
        *[(kind, {"format": "hybrid"}, "'hybrid': .* a name, 'HYBRID', 'E4M3' or 'E5M2',") for kind in WITH_FORMAT],
        *[(kind, {"format": 3}, "format is 3: expected octavo.HYBRID") for kind in WITH_FORMAT],
        *[(kind, {"format": "E8M0"}, "format E8M0 holds no operand of a product") for kind in WITH_FORMAT],
        (StaticScaling, {"input_scale": 0.0}, "input_scale is 0.0: a scale is a number, positive and finite"),
        *[
            (
                StaticScaling,
                {name: {"mlp.fc1": 0.5}},
                f"{name} is a dict: .* of several layers: overrides={{pattern: StaticScaling\\({name}=",
            )
            for name in ("input_scale", "weight_scale", "grad_output_scale")
        ],
        (StaticScaling, {"input_scale": 10**400}, "input_scale is 1000.*normal numbers"),
        (CurrentScaling, {"amax_epsilon": 1e300}, r"amax_epsilon is 1e\+300: expected 0 or .* up to 2\^64"),
        (CurrentScaling, {"amax_epsilon": 3e38}, r"amax_epsilon is 3e\+38: expected 0 or .* up to 2\^64"),
        (CurrentScaling, {"amax_epsilon": 10**400}, r"amax_epsilon is 1000.*: expected 0 or .* up to 2\^64"),
        (BlockScaling, {"overrides": {b"a": None}}, r"override \(b'a', None\) is no pair of a regular expression"),
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


@pytest.mark.parametrize("kind", WITH_FORMAT)
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


@pytest.mark.parametrize("kind", WITH_FORMAT)
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
    pairs = [(r"\.fc1$", inner), (r"blocks\.0", None)]
    recipe = CurrentScaling(overrides=pairs)
    assert recipe == CurrentScaling(overrides=dict(pairs)) == CurrentScaling(overrides=iter(pairs))
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
