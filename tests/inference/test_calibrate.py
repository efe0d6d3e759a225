"""`calibrate`: scales of known inputs, and a model left as it was found."""

from __future__ import annotations

import collections
import contextlib
import math

import pytest
import torch
from torch import nn

import octavo
from octavo.inference import calibrate, freeze
from octavo.recipes import CurrentScaling, DelayedScaling

METHODS = ["max", "percentile", "mse"]


def one_layer(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 8))


def test_max_provides_for_the_largest_of_all_batches() -> None:
    batches = [torch.full((4, 16), -3.0), torch.full((4, 16), 7.0), torch.full((2, 16), 1.0)]
    assert calibrate(one_layer(), batches) == {"0": 7.0 / 448}


def test_percentile_leaves_out_one_in_ten_thousand() -> None:
    """Of 100,000 magnitudes one outlier is left out, and a hundred more are not."""
    x = torch.ones(1000, 100)
    x[0, 0] = 1000.0
    assert calibrate(one_layer(100), [x], "percentile") == {"0": 1.0 / 448}
    x[1, :100] = 512.0
    assert calibrate(one_layer(100), [x], "percentile") == {"0": 512.0 / 448}


def test_no_feature_is_left_out_of_a_percentile() -> None:
    """More than 2^20 elements, whose odd features alone are large: a sample of every other one would miss them."""
    x = torch.ones(2**15, 64)
    x[:, 1::2] = 64.0
    assert calibrate(one_layer(64), [x], "percentile") == {"0": 64.0 / 448}


def test_a_percentile_of_zero_is_no_scale() -> None:
    x = torch.zeros(1000, 100)
    x[0, 0] = 5.0
    assert calibrate(one_layer(100), [x], "percentile") == {"0": 5.0 / 448}


def test_mse_takes_the_scale_with_the_least_error() -> None:
    """Against the sum of squares over the data itself, which is bf16: of N(0, 1), and of one number so often that
    bringing it onto a code is worth the clipping of the only outlier."""
    often = torch.full((6250, 16), 17 / 56).bfloat16().float()  # halfway between two codes under 8 / 448
    for rest in (torch.randn(500, 16).bfloat16().float(), often):
        x = torch.cat([rest, torch.full((1, 16), 8.0)])
        if rest is often:
            x[-1, 1:] = 0

        def error(share: int, x: torch.Tensor = x) -> float:
            q = octavo.quantize(x, octavo.E4M3, scale=8.0 * share / 10 / 448)
            return (q.dequantize().double() - x.double()).square().sum().item()

        best = min(range(10, 3, -1), key=error)
        assert calibrate(one_layer(), [x], "mse")["0"] == pytest.approx(8.0 * best / 10 / 448, rel=1e-6)
    assert best < 10


@pytest.mark.parametrize("method", METHODS)
def test_the_order_of_batches_does_not_matter(method) -> None:
    batches = [torch.randn(64, 16), torch.zeros(64, 16), 3 * torch.randn(8, 16), torch.zeros(0, 16)]
    forward = calibrate(one_layer(), batches, method)
    assert forward == calibrate(one_layer(), batches[::-1], method)
    assert forward == calibrate(one_layer(), [torch.cat(batches)], method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, 1e-37, 3e38, torch.inf, torch.nan])
def test_every_scale_is_positive_and_usable(method: str, value: float) -> None:
    """Layers that saw zeros alone, magnitudes at the ends of float32, or nothing finite."""
    context = contextlib.nullcontext() if math.isfinite(value) else pytest.warns(UserWarning, match="NaN or inf")
    with context:
        scales = calibrate(one_layer(), [torch.full((2, 16), value)], method)
    assert 2.0**-126 <= scales["0"] <= 2.0**126
    model = one_layer()
    freeze(model, "tensor_static", input_scales=scales)
    y = model(torch.full((2, 16), value if abs(value) < 1e30 else 1.0))
    assert y.isfinite().all()


@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_finite_is_left_out(method: str) -> None:
    x = torch.randn(64, 16)
    spoilt = torch.cat([x, torch.tensor([[torch.inf, -torch.inf, torch.nan, 0.0] * 4])])
    clean = torch.cat([x, torch.zeros(1, 4).repeat(1, 4)])
    assert calibrate(one_layer(), [spoilt], method) == pytest.approx(calibrate(one_layer(), [clean], method))


def test_layers_that_saw_nothing_finite_are_named() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8))
    with torch.no_grad():
        model[0].weight.fill_(torch.nan)
    with pytest.warns(UserWarning, match=r"of 1 layer \('1'\) every input was NaN or inf.* 1 / 448") as caught:
        scales = calibrate(model, [torch.ones(2, 16), torch.zeros(0, 16)])
    assert caught[0].filename == __file__
    assert scales == {"0": 1 / 448, "1": 1 / 448}
    # No element is no fault.
    assert calibrate(model[:1], [torch.zeros(0, 16)]) == {"0": 1 / 448}


def test_a_model_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.weight is on the meta device.*: give the model its weights first"):
        calibrate(one_layer().to("meta"), [torch.ones(2, 16, device="meta")])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)
        self.drop = nn.Dropout(0.9)

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return self.used(input=self.drop(x) * factor)


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(2, 16),
        (torch.ones(2, 16), 1.0),
        [torch.ones(2, 16)],
        {"x": torch.ones(2, 16), "factor": 1.0},
        collections.UserDict(x=torch.ones(2, 16)),
    ],
    ids=["tensor", "tuple", "list", "dict", "mapping"],
)
def test_batches_of_every_kind_and_inputs_by_keyword(batch) -> None:
    """In evaluation mode: dropout would give 10, or nothing. A layer that no batch reached has no scale."""
    model = Model().train()
    scales = calibrate(model, [batch])
    assert scales == {"used": 1.0 / 448}
    with pytest.raises(ValueError, match="no input scale for 'unused'"):
        freeze(model, "tensor_static", input_scales=scales)
    assert freeze(model, "tensor_static", input_scales=scales, exclude="unused") == ["used"]


class ByIndex(torch.utils.data.Dataset[torch.Tensor]):
    """What iterates by `__getitem__` alone."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2, 16), [1.0, 3.0, 2.0][index])


@pytest.mark.parametrize(
    "batches",
    [
        ByIndex(),
        torch.utils.data.Subset(ByIndex(), [0, 1]),
        torch.utils.data.TensorDataset(torch.full((2, 16), 3.0)),
        torch.utils.data.DataLoader(torch.full((4, 16), 3.0), batch_size=2),  # type: ignore[arg-type]
    ],
    ids=["dataset", "Subset", "TensorDataset", "DataLoader"],
)
def test_data_sets_and_loaders_are_batches(batches) -> None:
    assert calibrate(one_layer(), batches) == {"0": 3.0 / 448}


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_is_left_as_it_was(fails: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 8)).train()
    model[1].eval()
    before = [module.training for module in model.modules()]
    weights = [p.clone() for p in model.parameters()]
    batches = [torch.randn(4, 16), torch.randn(4, 15 if fails else 16)]
    if fails:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            calibrate(model, batches)
    else:
        calibrate(model, batches)
    assert [module.training for module in model.modules()] == before
    assert all(not module._forward_pre_hooks and not module._forward_pre_hooks_with_kwargs for module in model)
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert model[1].num_batches_tracked == 0


@pytest.mark.parametrize("recipe", [CurrentScaling(), DelayedScaling()])
def test_converted_layers_are_seen_and_their_state_is_not_touched(recipe) -> None:
    model = one_layer()
    octavo.convert(model, recipe, filter="all")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert calibrate(model, [torch.full((4, 16), 2.0)]) == {"0": 2.0 / 448}
    after = model.state_dict()
    assert all(torch.equal(before[k].nan_to_num(-1), after[k].nan_to_num(-1)) for k in before)


def test_shared_layers_merge() -> None:
    shared = nn.Linear(16, 16)
    nn.init.eye_(shared.weight)
    nn.init.zeros_(shared.bias)
    doubled = nn.Sequential(shared, nn.Threshold(-torch.inf, 0), Doubled(), shared)
    assert calibrate(doubled, [torch.ones(2, 16)]) == {"0": 2.0 / 448}


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_errors_name_what_was_found() -> None:
    with pytest.raises(ValueError, match="method is 'median': expected 'max', 'percentile' or 'mse'"):
        calibrate(one_layer(), [torch.ones(1, 16)], "median")
    with pytest.raises(ValueError, match="got no batch: give at least one"):
        calibrate(one_layer(), iter(()))
    model = one_layer()
    freeze(model)
    with pytest.raises(ValueError, match="Sequential has no linear layer to calibrate: calibrate before freezing"):
        calibrate(model, [torch.ones(1, 16)])


X, TARGETS = torch.ones(2, 16), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ([X, TARGETS], r"a list of 2 \(a tensor \[2, 16\], a tensor \[2\]\)"),
        ((), r"a tuple of 0 \(\)"),
        ({"input": X, "labels": TARGETS}, "a mapping of 'input', 'labels'"),
        ({}, "a mapping of nothing"),
        ([X] * 9, r"a list of 9 \((a tensor \[2, 16\], ){4}…\)"),
    ],
)
def test_a_batch_that_the_model_does_not_take_is_told_with_the_remedy(batch, found: str) -> None:
    model = one_layer()
    takes = r"the forward of Sequential takes \(input\)\. A tuple or a list holds .* keyword arguments, .*targets"
    with pytest.raises(ValueError, match=rf"octavo\.calibrate: the model is called with {found}, and {takes}"):
        calibrate(model, [batch])
    # What the message says.
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, TARGETS), batch_size=1)
    assert calibrate(model, (inputs for inputs, _ in loader)) == calibrate(model, [X])


@pytest.mark.parametrize(
    ("batches", "found"),
    [
        (X, "a Tensor, a single batch"),
        ({"input": X}, "a dict, a single batch"),
        (None, "a NoneType: expected a list"),
    ],
)
def test_one_batch_is_not_taken_for_several(batches, found: str) -> None:
    with pytest.raises(ValueError, match=rf"octavo\.calibrate: batches is {found}"):
        calibrate(one_layer(), batches)


def test_a_tuple_of_tensors_is_several_batches_and_where_it_fails_perhaps_one() -> None:
    assert calibrate(one_layer(), (X, 2 * X)) == calibrate(one_layer(), [2 * X])
    message = r"octavo\.calibrate: batches is a tuple of 2 .* If the tuple is one batch, give a list .*\[inputs\]$"
    with pytest.raises(ValueError, match=message):
        calibrate(one_layer(), (X, TARGETS))


def test_what_fails_inside_of_the_model_is_not_explained_away() -> None:
    class Fails(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(self.drop(x, 3))

    with pytest.raises(TypeError, match="positional arguments but 3 were given"):
        calibrate(Fails(), [X])


def test_a_batch_without_a_tensor_is_told() -> None:
    with pytest.raises(ValueError, match="a linear layer is called with a str, and its input must be a tensor"):
        calibrate(one_layer(), ["text"])
    with pytest.raises(TypeError, match=r"octavo\.calibrate: model is a str"):
        calibrate("model", [X])
