"""The way back: unconvert gives the bits, the classes and the ties back; and converted models are copied."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.recipes import DelayedScaling


class KeepsForward(nn.Linear):
    """A subclass that computes as nn.Linear does."""

    tag = "kept"


class Conv1D(nn.Linear):
    """Of that name, and yet none of transformers'."""


def test_unconvert_gives_the_bits_back() -> None:
    model = nn.Sequential(nn.Linear(32, 64), KeepsForward(64, 32), nn.Linear(32, 8, bias=False))
    kinds, keys, attributes = [type(m) for m in model], list(model.state_dict()), [set(vars(m)) for m in model]
    plain, x = copy.deepcopy(model), torch.randn(4, 32)
    octavo.convert(model, DelayedScaling())
    model(x).sum().backward()
    octavo.update_scales(model)
    model.zero_grad()
    assert not torch.equal(model(x), plain(x))
    assert octavo.unconvert(model) is model
    assert [type(m) for m in model] == kinds
    assert list(model.state_dict()) == keys
    assert [set(vars(m)) for m in model] == attributes
    assert torch.equal(model(x), plain(x))
    octavo.unconvert(model)
    octavo.convert(model)
    assert isinstance(model[0], octavo.Linear)


def test_unconvert_decodes_fp8_weights_and_keeps_their_ties() -> None:
    with octavo.quantized_init():
        model = nn.Sequential(octavo.Linear(16, 16), octavo.Linear(16, 16))
    model[1].weight = model[0].weight
    values = model[0].weight.dequantize().detach()
    octavo.unconvert(model)
    assert type(model[0]) is nn.Linear
    assert type(model[0].weight) is nn.Parameter
    assert torch.equal(model[0].weight, values)
    assert model[1].weight is model[0].weight


class Doubled(octavo.Linear):
    """Somebody's own layer on top of ours."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_a_class_derived_from_ours_keeps_its_forward_on_the_way_back() -> None:
    model, x = nn.Sequential(Doubled(16, 16)), torch.randn(4, 16)
    octavo.convert(model)
    assert model[0].recipe is not None
    octavo.unconvert(model)
    assert type(model[0]) is Doubled
    assert torch.equal(model(x), nn.functional.linear(x, model[0].weight, model[0].bias) * 2)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_converted_models_are_copied(copied) -> None:
    model = nn.Sequential(nn.Linear(32, 16), KeepsForward(16, 16), Conv1D(16, 8))
    octavo.convert(model, DelayedScaling(amax_history_len=4))
    for _ in range(2):
        model(torch.randn(4, 32)).sum().backward()
        octavo.update_scales(model)
    other, x = copied(model), torch.randn(4, 32)
    assert [type(m) for m in other] == [type(m) for m in model]
    assert torch.equal(other(x), model(x))
    octavo.unconvert(other)
    assert [type(m) for m in other] == [nn.Linear, KeepsForward, Conv1D]
    assert isinstance(model[0], octavo.Linear)
