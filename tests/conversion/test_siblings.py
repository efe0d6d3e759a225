"""Which layers share the state of their input."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import octavo
from octavo.recipes import DelayedScaling


def block(**layers: nn.Module) -> nn.Module:
    parent = nn.Module()
    for name, layer in layers.items():
        setattr(parent, name, layer)
    return parent


def linears(*names: str, size: int = 16) -> dict[str, nn.Module]:
    return {name: nn.Linear(size, size) for name in names}


def shared(model: nn.Module, *names: str) -> bool:
    return len({id(model.get_submodule(name).delayed_state.input) for name in names}) == 1


def test_query_key_value_and_gate_up_share_and_the_report_says_so() -> None:
    attention, mlp = block(**linears("q_proj", "k_proj", "v_proj", "o_proj")), block(**linears("gate_proj", "up_proj"))
    model = block(self_attn=attention, mlp=mlp)
    report = octavo.convert(model, recipe=DelayedScaling(), filter="all")
    assert shared(attention, "q_proj", "k_proj", "v_proj")
    assert not shared(attention, "q_proj", "o_proj")
    assert shared(mlp, "gate_proj", "up_proj")
    assert any(remark.startswith("2 groups of layers") for remark in report.remarks)


def test_cross_attention_and_unlike_layers_share_nothing() -> None:
    model = block(
        encoder_attn=block(**linears("q_proj", "k_proj", "v_proj")),
        mlp=block(gate_proj=nn.Linear(16, 16), up_proj=nn.Linear(32, 16)),
    )
    octavo.convert(model, recipe=DelayedScaling(), filter="all")
    assert not shared(model, "encoder_attn.k_proj", "encoder_attn.v_proj")
    assert not shared(model, "mlp.gate_proj", "mlp.up_proj")


def test_layers_of_other_recipes_share_nothing() -> None:
    model = block(**linears("gate_proj", "up_proj"))
    octavo.convert(model, recipe=DelayedScaling(overrides={"up": DelayedScaling(margin=1)}), filter="all")
    assert not shared(model, "gate_proj", "up_proj")


def test_a_sibling_converted_anew_with_another_recipe_follows_its_own() -> None:
    model = block(**linears("gate_proj", "up_proj"))
    recipe = DelayedScaling(amax_history_len=3)
    octavo.convert(model, recipe=recipe, filter="all")
    octavo.convert(model.up_proj, recipe=DelayedScaling(margin=3, amax_history_len=2), filter="all")  # type: ignore[arg-type]
    assert not shared(model, "gate_proj", "up_proj")
    x = torch.full((4, 16), 7.0)
    (model.gate_proj(x) + model.up_proj(x)).sum().backward()  # type: ignore[operator]
    octavo.update_scales(model)
    state = model.state_dict()
    assert float(state["up_proj.input_scale"]) == 8 * float(state["gate_proj.input_scale"])
    assert [len(state[f"{name}_proj.input_amax_history"]) for name in ("gate", "up")] == [3, 2]
    octavo.convert(model, recipe=recipe, filter="all")
    assert shared(model, "gate_proj", "up_proj")


def test_a_shared_history_moves_once_a_step_and_survives_copies_and_state_dicts() -> None:
    model = block(**linears("gate_proj", "up_proj"))
    octavo.convert(model, recipe=DelayedScaling(amax_history_len=4), filter="all")
    for step in range(1, 4):
        x = torch.full((4, 16), float(step))
        (model.gate_proj(x) + model.up_proj(x)).sum().backward()  # type: ignore[operator]
        octavo.update_scales(model)
    state = model.state_dict()
    assert state["gate_proj.input_amax_history"].tolist() == [0, 1, 2, 3]
    assert state["up_proj.input_amax_history"].tolist() == [0, 1, 2, 3]
    twin = copy.deepcopy(model)
    assert shared(twin, "gate_proj", "up_proj")
    assert not shared(block(a=model.gate_proj, b=twin.gate_proj), "a", "b")  # type: ignore[arg-type]
    fresh = block(**linears("gate_proj", "up_proj"))
    octavo.convert(fresh, recipe=DelayedScaling(amax_history_len=4), filter="all")
    fresh.load_state_dict(state)
    assert fresh.state_dict()["up_proj.input_scale"] == state["up_proj.input_scale"]


def test_layers_that_ran_before_they_share_cast_with_the_shared_scale() -> None:
    model = block(**linears("q_proj", "k_proj", "v_proj"))
    recipe = DelayedScaling(amax_history_len=2)
    for converted in (["q_proj", "k_proj"], None):
        octavo.convert(model, recipe=recipe, filter="all", include=converted)
        for step in (1.0, 100.0, 100.0):
            x = torch.full((4, 16), step)
            sum(getattr(model, name)(x) for name in ("q_proj", "k_proj")).sum().backward()
            octavo.update_scales(model)
        assert model.k_proj.delayed_state.plan[1].input.state is model.k_proj.delayed_state.input  # type: ignore[union-attr,index]
    assert shared(model, "q_proj", "k_proj", "v_proj")


@pytest.mark.parametrize("other", ["gate_proj", "up_proj"])
def test_siblings_in_two_formats_each_cast_within_their_own(other: str) -> None:
    """A scale for E5M2 would have E4M3 saturate at 1/128 of the values."""
    model = block(**linears("gate_proj", "up_proj"))
    octavo.convert(model, recipe=DelayedScaling(), filter="all")
    for layer in (model.gate_proj, model.up_proj):
        nn.init.ones_(layer.weight)  # type: ignore[arg-type,union-attr]
    x = torch.full((4, 16), 3.0)
    mixed = DelayedScaling(overrides={other: DelayedScaling(format=octavo.E5M2)})

    def check() -> None:
        with torch.no_grad():
            for layer in (model.gate_proj, model.up_proj):
                # All values are their amax, whose code is exact; scales and sums round in float32.
                torch.testing.assert_close(layer(x) - layer.bias, torch.full((4, 16), 48.0))  # type: ignore[operator,union-attr]

    for recipe in (DelayedScaling(), mixed, mixed, DelayedScaling()):
        with octavo.autocast(recipe=recipe):
            y = model.gate_proj(x) + model.up_proj(x)  # type: ignore[operator]
            check()
            check()
        y.sum().backward()
        with octavo.autocast(recipe=recipe):
            check()


def test_a_change_of_format_rescales_a_shared_input_once() -> None:
    model = block(**linears("gate_proj", "up_proj"))
    octavo.convert(model, recipe=DelayedScaling(), filter="all")
    x = torch.full((4, 16), 3.0)
    (model.gate_proj(x) + model.up_proj(x)).sum().backward()  # type: ignore[operator]
    octavo.update_scales(model)
    with octavo.autocast(recipe=DelayedScaling(format=octavo.E5M2)), torch.no_grad():
        model.gate_proj(x)  # type: ignore[operator]
        model.up_proj(x)  # type: ignore[operator]
    scale = model.gate_proj.delayed_state.input.scale  # type: ignore[union-attr]
    assert float(scale) == torch.tensor(3.0 / 57344.0).item()
