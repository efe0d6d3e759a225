"""octavo.GroupedLinear: what it refuses, what its experts are called, and what becomes of copies."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.recipes import CurrentScaling, DelayedScaling, Recipe

K, N = 40, 24

NO_INTEGERS = [
    ([2.0, 2.0], r"m_splits\[0\] is 2.0"),
    ([True, 3], r"m_splits\[0\] is True"),
    (["2", "2"], r"m_splits\[0\] is '2'"),
    ([[2, 2]] * 2, r"m_splits\[0\] is \[2, 2\]"),
    ([2, None], r"m_splits\[1\] is None"),
    ("22", "m_splits is '22'"),
    (4, "m_splits is 4"),
    (None, "m_splits is None"),
    ({0: 2, 1: 2}, r"m_splits is \{0: 2, 1: 2\}"),
    (np.array([2.0, 2.0]), r"m_splits\[0\] is 2.0"),
    (torch.tensor([2.0, 2.0]), r"torch.float32, of shape \(2,\)"),
    (torch.tensor([True, True]), r"torch.bool, of shape \(2,\)"),
    (torch.tensor(4), r"torch.int64, of shape \(\)"),
    (torch.tensor([[2, 2]]), r"torch.int64, of shape \(1, 2\)"),
]


@pytest.mark.parametrize(("sizes", "found"), NO_INTEGERS, ids=str)
def test_sizes_that_are_no_integers_are_named_with_the_remedy(sizes: object, found: str) -> None:
    layer = octavo.GroupedLinear(2, K, N)
    with pytest.raises(ValueError, match=f"{found}.*: expected integers.*give a list"):
        layer(torch.randn(4, K), sizes)


@pytest.mark.parametrize(
    "sizes", [(1, 3), torch.Size([1, 3]), np.array([1, 3]), [np.int64(1), np.int32(3)], torch.tensor([1, 3]).byte()]
)
def test_integers_of_any_kind_are_taken(sizes: object) -> None:
    layer, x = octavo.GroupedLinear(2, K, N), torch.randn(4, K)
    assert torch.equal(layer(x, sizes), layer(x, [1, 3]))


def test_float_sizes_are_refused_by_compiled_code_too() -> None:
    layer = torch.compile(octavo.GroupedLinear(2, K, N), backend="aot_eager")
    with pytest.raises(Exception, match=r"float32.*expected integers"):
        layer(torch.randn(4, K), torch.tensor([2.0, 2.0]))


@pytest.mark.parametrize("recipe", [None, CurrentScaling()])
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("weight1", nn.Parameter(torch.randn(N, K + 8)), r"weight1 is of shape \(24, 48\): every weight.*\[24, 40\]"),
        ("weight0", nn.Parameter(torch.randn(N + 8, K)), r"weight0 is of shape \(32, 40\)"),
        ("weight1", None, "weight1 is None"),
        ("bias1", nn.Parameter(torch.randn(1)), r"bias1 is of shape \(1,\): every bias.*\[24\]"),
        ("bias1", None, "bias1 is None, and others are not"),
    ],
)
def test_parameters_of_another_size_are_refused(
    recipe: Recipe | None, name: str, value: nn.Parameter | None, words: str
) -> None:
    layer = octavo.GroupedLinear(2, K, N, recipe=recipe)
    setattr(layer, name, value)
    with pytest.raises(ValueError, match=words):
        layer(torch.randn(4, K), [2, 2])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = octavo.GroupedLinear(2, K, N)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.moe(x, [4, 5])
        return out


def test_one_name_an_expert_before_and_after_convert() -> None:
    """What the report says, what an override matches, what is counted, and what the layer says of itself."""
    model = Model()
    model.moe.layer_name = "moe"
    before = [part.layer_name for part in model.moe.parts]
    report = octavo.convert(model, CurrentScaling(overrides={r"^moe\.expert1$": None}))
    assert before == [part.layer_name for part in model.moe.parts] == [row.name for row in report.layers]
    assert model.moe.layer_name == "moe"
    with octavo.count_gemms() as count, octavo.autocast(recipe=CurrentScaling(overrides={r"^moe\.expert0$": None})):
        model(torch.randn(9, K))
    assert set(count.by_layer()) == {"moe.expert1"}


def test_a_layer_that_is_converted_by_itself_keeps_its_experts_names() -> None:
    layer = octavo.GroupedLinear(2, K, N)
    octavo.convert(layer, CurrentScaling())
    assert layer.layer_name == ""
    layer.layer_name = layer.layer_name
    assert [part.layer_name for part in layer.parts] == ["expert0", "expert1"]


@pytest.mark.parametrize(("given", "shown"), [(None, "GroupedLinear.expert0: "), ("moe", "moe.expert0: ")])
def test_a_forgotten_update_is_told_in_a_name_that_can_be_found(given: str | None, shown: str) -> None:
    layer = octavo.GroupedLinear(2, K, N, recipe=DelayedScaling(amax_history_len=4))
    layer.layer_name = given
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            layer(torch.randn(9, K), [4, 5]).sum().backward()
            with torch.no_grad():
                layer.weight0.mul_(1.01)
    told = [str(one.message) for one in caught if "did not follow" in str(one.message)]
    assert len(told) == 1
    assert told[0].startswith(shown)
    assert layer.layer_name == given


LAYERS = {
    "GroupedLinear": (lambda: octavo.GroupedLinear(2, K, N), lambda layer, x: layer(x, [4, 5])),
    "LayerNormMLP": (lambda: octavo.LayerNormMLP(K, 64), lambda layer, x: layer(x)),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(
    "recipe", [CurrentScaling(), DelayedScaling(amax_history_len=4)], ids=lambda r: type(r).__name__
)
def test_a_shallow_copy_leaves_the_original_as_it_was(kind: str, recipe: Recipe) -> None:
    make, run = LAYERS[kind]
    layer, x = make(), torch.randn(9, K)
    layer.recipe, layer.layer_name = recipe, "own"
    expected = run(layer, x)
    other = copy.copy(layer)
    for one in (layer, other):
        assert all(part.owner is one for part in one.parts)
    assert other.recipe is recipe
    other.recipe, other.layer_name = None, "another"
    assert (layer.recipe, layer.layer_name) == (recipe, "own")
    # Parameters are shared, as of a shallow copy of any module.
    assert [p.data_ptr() for p in other.parameters()] == [p.data_ptr() for p in layer.parameters()]
    assert torch.equal(run(layer, x), expected)
    del other
    assert torch.equal(run(layer, x), expected)
    del layer, one
    make, run = LAYERS[kind]
    survivor = copy.copy(make())
    assert run(survivor, x).isfinite().all()


@pytest.mark.parametrize("kind", LAYERS)
def test_a_copy_of_a_model_by_either_way_runs_by_itself(kind: str) -> None:
    make, run = LAYERS[kind]
    layer, x = make(), torch.randn(9, K)
    deep = copy.deepcopy(copy.copy(layer))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert bool(run(deep, x).any())
    assert not bool(run(layer, x).any())
