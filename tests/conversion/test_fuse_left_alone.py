"""What `convert` leaves as it is, or runs one by one after all, and why."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.conversion.known_models import Block, bert, llama, loss_of, not_fused
from torch import Tensor, nn

import octavo
from octavo.conversion.casting_norm import FOLLOWERS
from octavo.recipes import CurrentScaling, DelayedScaling

pytest.importorskip("transformers")


def test_subclasses_and_strangers_are_left_alone() -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    class Doubled(LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class Stranger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2, self.act = nn.Linear(32, 64), nn.Linear(64, 32), nn.GELU()

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(self.act(self.fc1(x)) + 1)

    model: Any = llama(2)
    model.model.layers[0].mlp.__class__ = Doubled
    model.stranger = Stranger()
    report = octavo.convert(model)
    assert not_fused(report, "layers.0.mlp") == (
        "its gate_proj, up_proj and down_proj look like an MLP's, but its forward is not one that is known here"
    )
    assert not_fused(report, "stranger") == (
        "its fc1 and fc2 look like an MLP's, but its forward is not one that is known here"
    )
    assert type(model.model.layers[0].mlp) is Doubled
    assert len(report.fused) == 6
    assert "not fused: Doubled (model.layers.0.mlp): its gate_proj, up_proj and down_proj look" in str(report)
    assert "fused: LlamaRMSNorm with q_proj, k_proj, v_proj (model.layers.0.input_layernorm and 1 more)" in str(report)


class OfTwo(nn.Module):
    """Two layers by names that are known, a normalisation before one, and nothing else of what is known with them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x).relu())


class OfSomebody(nn.Module):
    """A block whose parts are called as timm's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm2, self.mlp = nn.LayerNorm(32), OfTwo()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm2(x))


def test_reasons_name_no_attribute_that_is_not_there() -> None:
    lines = [
        "not fused: LayerNorm with fc1 (0.norm2 and 2 more): the forward around it, of OfSomebody, is not one that is"
        " known here",
        "not fused: OfTwo (0.mlp and 2 more): its fc1 and fc2 look like an MLP's, but its forward is not one that is"
        " known here",
    ]
    model = nn.Sequential(*(OfSomebody() for _ in range(3)))
    assert [line for line in str(octavo.convert(model, filter="all")).splitlines() if "fused" in line] == lines
    frozen = octavo.freeze(model, "row")
    assert [line for line in str(frozen).splitlines() if "fused" in line] == lines
    assert octavo.convert(OfTwo(), filter="all", dry_run=True).structures[0].parts == ()


def test_another_version_of_a_forward_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: self.down_proj(self.up_proj(x)))
    reason = not_fused(octavo.convert(llama()), "mlp")
    assert reason == ("LlamaMLP.forward reads down_proj, up_proj, where down_proj, act_fn, gate_proj, up_proj is known")


def test_what_stays_in_high_precision_and_what_is_not_known_is_named() -> None:
    report = octavo.convert(llama(), exclude=["down_proj", "[qkv]_proj"])
    assert not_fused(report, "mlp") == "down_proj stays in high precision"
    assert not_fused(report, "input_layernorm") == "what follows (q_proj, k_proj, v_proj) stays in high precision"
    assert [one.name for one in report.fused] == ["model.layers.0.post_attention_layernorm", ""]
    assert not_fused(octavo.convert(llama(hidden_act="mish")), "mlp") == "the activation MishActivation is not known"
    model: Any = llama()
    model.model.layers[0].input_layernorm = nn.RMSNorm(32)  # its eps is None: that of the dtype
    assert not_fused(octavo.convert(model), "input_layernorm") == "the normalisation RMSNorm is not known"
    assert "the residual as well" in not_fused(octavo.convert(bert(1)), "attention.output.LayerNorm")


def test_an_input_that_does_not_fit_is_told_as_before() -> None:
    for affine in (True, False):
        model = Block()
        model.norm2 = nn.LayerNorm(32, elementwise_affine=affine)
        plain = copy.deepcopy(model)
        assert len(octavo.convert(model).fused) == 2
        assert model.norm2(torch.randn(3, 32)).shape == (3, 32)
        for layer in ("norm2", "mlp"):
            messages = []
            for one in (model, plain):
                with pytest.raises((RuntimeError, ValueError)) as caught:
                    getattr(one, layer)(torch.randn(3, 48))
                messages.append(str(caught.value))
            assert messages[0] == messages[1] or "in_features = 32" in messages[0]


def test_what_somebody_listens_to_runs_by_itself() -> None:
    model: Any = llama()
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: None)
    report = octavo.convert(model)
    assert not_fused(report, "mlp") == "a hook listens to act_fn, or its forward was replaced"


def test_a_hook_that_comes_later_is_called_and_changes_no_more_than_the_order() -> None:
    model: Any = llama()
    octavo.convert(model, CurrentScaling())
    unfused = copy.deepcopy(model)
    octavo.convert(unfused, CurrentScaling(), fuse=False)
    mlp = model.model.layers[0].mlp
    x = torch.randn(2, 5, 32)
    seen = []
    handle = mlp.down_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    assert torch.equal(mlp(x), unfused.model.layers[0].mlp(x))
    assert seen == [(2, 5, 64)]
    handle.remove()
    mlp(x)
    assert len(seen) == 1


def test_a_forward_that_is_wrapped_on_the_instance_is_called() -> None:
    """As accelerate wraps forwards to move what a module takes."""
    model: Any = llama()
    octavo.convert(model, CurrentScaling())
    expected, seen = loss_of(model).item(), []
    for name, module in model.model.layers[0].named_modules():
        inner = module.forward

        def forward(*args: Any, inner: Any = inner, name: str = name, **kwargs: Any) -> Any:
            seen.append(name)
            return inner(*args, **kwargs)

        module.forward = forward
    # Normalisations and the activation are the original's now, which round otherwise.
    assert loss_of(model).item() == pytest.approx(expected, rel=1e-3)
    assert {"mlp", "mlp.gate_proj", "mlp.act_fn", "input_layernorm", "self_attn.q_proj"} <= set(seen)


def test_a_layer_that_is_replaced_later_is_called() -> None:
    model: Any = llama()
    octavo.convert(model, CurrentScaling())
    layer = model.model.layers[0]
    layer.mlp.gate_proj, layer.self_attn.q_proj = nn.Linear(32, 64), nn.Linear(32, 32)
    with octavo.count_gemms() as counted:
        loss_of(model).backward()
    assert "model.layers.0.mlp.up_proj" in counted.by_layer()
    assert layer.mlp.gate_proj.weight.grad is not None
    assert layer.self_attn.q_proj.weight.grad is not None


def telling(names: set[tuple[str, str]], name: str) -> Any:
    """An observer that notes each operand, which must not come twice."""

    def observer(operand: str, quantizer: Any) -> Any:
        def watched(*arguments: Any, **options: Any) -> Any:
            assert (name, operand) not in names
            names.add((name, operand))
            return quantizer(*arguments, **options)

        return watched

    return observer


def test_a_watched_model_shows_every_operand_once() -> None:
    model, separate = llama(), llama()
    octavo.convert(model, DelayedScaling())
    octavo.convert(separate, DelayedScaling(), fuse=False)
    seen: list[set[tuple[str, str]]] = []
    for one in (model, separate):
        names: set[tuple[str, str]] = set()
        for name, layer in one.named_modules():
            if isinstance(layer, octavo.Linear):
                layer.observer = telling(names, name)
        loss_of(one).backward()
        seen.append(names)
    assert seen[0] == seen[1]
    assert len(seen[0]) == 3 * 8


def test_fuse_false_turns_structures_back_and_a_dry_run_changes_nothing() -> None:
    model: Any = llama()
    kinds = [type(module) for module in model.modules()]
    report = octavo.convert(model, dry_run=True)
    assert len(report.fused) == 4
    assert [type(module) for module in model.modules()] == kinds
    octavo.convert(model)
    again = octavo.convert(model)
    assert (len(again.fused), len(again.unfused)) == (4, 0)
    back = octavo.convert(model, fuse=False)
    assert {one.reason for one in back.unfused} == {"fuse=False"}
    assert type(model.model.layers[0].mlp) is type(llama().model.layers[0].mlp)  # type: ignore[union-attr,index]
    with pytest.raises(ValueError, match="fuse is 'yes': it must be True or False"):
        octavo.convert(model, fuse="yes")  # type: ignore[arg-type]


def test_a_layer_excluded_from_a_second_conversion_stays_fused_as_it_stays_converted() -> None:
    model = llama()
    octavo.convert(model)
    assert len(octavo.convert(model, exclude="down_proj").fused) == 4


def test_what_is_frozen_runs_by_itself_if_it_is_to() -> None:
    from octavo.inference import freeze

    model: Any = llama()
    octavo.convert(model)
    freeze(model, "row", exclude="lm_head", fuse=False)
    assert type(model.model.layers[0].mlp).__name__ == "LlamaMLP"
    assert FOLLOWERS not in model.model.layers[0].input_layernorm.__dict__
