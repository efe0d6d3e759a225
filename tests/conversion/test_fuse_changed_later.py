"""What somebody patches, wraps, replaces or puts on top of what `convert` fused, before and after."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from tests.conversion.known_models import batch, bert, gpt2, llama, logits, loss_of, not_fused
from torch import Tensor, nn

import octavo
from octavo.conversion.casting_norm import CastingNorm
from octavo.conversion.joined_mlp import JoinedMLP
from octavo.recipes import CurrentScaling, DelayedScaling

pytest.importorskip("transformers")


def converted(make: Any = llama, **options: Any) -> Any:
    model = make(1)
    octavo.convert(model, CurrentScaling(), filter="all", **options)
    return model


# A class that was patched.


def twice(self: Any, x: Tensor) -> Tensor:
    """Of the names that LlamaMLP reads, in their order."""
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 2


class Descriptor:
    """A forward without code."""

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else lambda x: twice(instance, x)


@pytest.mark.parametrize("forward", [twice, Descriptor()], ids=["function", "descriptor"])
def test_a_patched_mlp_class_is_left_alone_and_says_so(forward: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    torch.manual_seed(0)
    model, x = converted(), torch.randn(4, 32)
    separate = copy.deepcopy(model)
    octavo.convert(separate, CurrentScaling(), filter="all", fuse=False)
    monkeypatch.setattr(LlamaMLP, "forward", forward)
    assert torch.equal(model.model.layers[0].mlp(x), separate.model.layers[0].mlp(x))
    other = llama()
    reason = not_fused(octavo.convert(other, CurrentScaling(), filter="all"), "mlp")
    assert reason == "LlamaMLP.forward was replaced on the class"
    assert type(other.model.layers[0].mlp) is LlamaMLP


def test_a_patched_activation_or_normalisation_class_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.activations import NewGELUActivation
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    fused, x = converted(), torch.randn(4, 32)
    plain = llama().model.layers[0].input_layernorm
    for kind, factor in ((LlamaRMSNorm, 3), (NewGELUActivation, 5)):
        old = kind.forward
        monkeypatch.setattr(kind, "forward", lambda self, x, old=old, factor=factor: old(self, x) * factor)
    assert torch.equal(fused.model.layers[0].input_layernorm(x), plain(x))
    assert "LlamaRMSNorm is not known" in not_fused(octavo.convert(llama(), filter="all"), "input_layernorm")
    assert "NewGELUActivation is not known" in not_fused(octavo.convert(gpt2(1), filter="all"), "mlp")


@pytest.mark.parametrize("inner", ["up_proj", "act_fn"])
def test_compiled_code_sees_a_forward_replaced_later(inner: str) -> None:
    torch._dynamo.reset()
    mlp, x = converted().model.layers[0].mlp, torch.randn(4, 32)
    compiled = torch.compile(mlp, backend="eager", fullgraph=True)
    assert compiled(x).abs().max() > 0
    getattr(mlp, inner).forward = (lambda z: z.new_zeros(4, 64)) if inner == "up_proj" else (lambda z: z * 0)
    assert compiled(x).abs().max() == 0


# What a layer is given is not what the normalisation made.


@pytest.mark.parametrize("in_place", [False, True])
def test_an_amax_is_gathered_where_the_codes_are_taken(in_place: bool) -> None:
    histories = []
    for fuse in (True, False):
        torch.manual_seed(0)
        model: Any = gpt2(1)
        change = (lambda *args: args[2].mul_(2.0**-10)) if in_place else (lambda *args: args[2] * 2.0**-10)
        model.transformer.h[0].ln_2.register_forward_hook(change)
        octavo.convert(model, DelayedScaling(amax_history_len=4), filter="all", fuse=fuse)
        for step in range(3):
            loss_of(model, step).backward()
            octavo.update_scales(model)
        histories.append(model.state_dict()["transformer.h.0.mlp.c_fc.input_amax_history"].max())
    # transformers' normalisation and Octavo's differ in the last bit or two of float32.
    torch.testing.assert_close(*histories, rtol=1e-5, atol=0)


def test_an_amax_of_what_nobody_takes_is_not_gathered() -> None:
    model: Any = gpt2(1)
    octavo.convert(model, DelayedScaling(amax_history_len=4), filter="all")
    block, x = model.transformer.h[0], torch.randn(4, 32)
    for _ in range(2):
        state = block.mlp.c_fc.delayed_state.input
        n = block.ln_2(x)
        assert state.gathered == 0
        block.mlp(n)
        assert state.gathered == n.abs().max()
        octavo.update_scales(model)


def test_inference_mode_gives_the_bits_of_no_grad() -> None:
    model: Any = llama(2).eval().bfloat16()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    octavo.convert(model, CurrentScaling(), filter="all")
    with torch.no_grad():
        expected = logits(model)
    with torch.inference_mode():
        assert torch.equal(logits(model), expected)


# What was put on top since.


@pytest.mark.parametrize("what", ["convert", "unconvert", "freeze"])
def test_a_class_put_on_top_stays(what: str) -> None:
    model, plain = converted(bert), bert(1)
    plain.load_state_dict(octavo.state_dict(model))
    layer = model.bert.encoder.layer[0]
    # As FSDP2's fully_shard does.
    top = layer.__class__ = type("Sharded", (type(layer),), {})
    if what == "convert":
        assert len(octavo.convert(model, CurrentScaling(), filter="all").fused) == 1
        reason = not_fused(octavo.convert(model, CurrentScaling(), filter="all", fuse=False), "layer.0")
        assert reason == "fuse=False; Sharded was put on top of it after it was fused, and stays, unfused"
        assert layer.one_by_one
    elif what == "unconvert":
        with pytest.warns(UserWarning, match="layer.0: Sharded was put on top of it"):
            octavo.unconvert(model)
        assert torch.equal(logits(model), logits(plain))
    else:
        with pytest.warns(UserWarning, match="layer.0: Sharded was put on top of it"):
            octavo.freeze(model, "row")
        logits(model)
    assert type(layer) is top


def test_a_parametrised_normalisation_stays() -> None:
    class Twice(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w * 2

    model, plain = converted(), llama()
    plain.load_state_dict(octavo.state_dict(model))
    for one in (model, plain):
        nn.utils.parametrize.register_parametrization(one.model.layers[0].input_layernorm, "weight", Twice())
    with pytest.warns(UserWarning, match="input_layernorm"):
        octavo.unconvert(model)
    assert torch.equal(logits(model), logits(plain))


@pytest.mark.parametrize("path", ["input_layernorm", "mlp", "mlp.up_proj"])
def test_a_forward_wrapped_since_goes_on(path: str) -> None:
    """As Accelerate wraps it, which keeps the forward that was there."""
    model, plain = converted(), llama()
    plain.load_state_dict(octavo.state_dict(model))
    module = model.model.layers[0].get_submodule(path)
    old, seen = module.forward, []
    module.forward = lambda *args, **kwargs: seen.append(path) or old(*args, **kwargs)
    octavo.convert(model, CurrentScaling(), filter="all", fuse=False)
    logits(model)
    with pytest.warns(UserWarning, match=f"{path}: its forward was replaced"):
        octavo.unconvert(model)
    assert torch.equal(logits(model), logits(plain))
    assert len(seen) == 2


# Who holds whom.


def test_a_normalisation_does_not_hold_the_layers_behind_it() -> None:
    layer = converted().model.layers[0]
    weights = weakref.ref(layer.self_attn.q_proj.weight), weakref.ref(layer.mlp.gate_proj.weight)
    octavo.freeze(layer.self_attn, "row")
    layer.mlp = nn.Linear(32, 32)
    gc.collect()
    assert [weight() for weight in weights] == [None, None]
    assert layer.input_layernorm(torch.randn(4, 32)).shape == (4, 32)


def test_a_normalisation_is_copied_alone_and_a_block_with_its_layers() -> None:
    from octavo.conversion.casting_norm import FOLLOWERS

    layer, x = converted().model.layers[0], torch.randn(4, 32)
    norm = copy.deepcopy(layer.input_layernorm)
    assert norm.__dict__[FOLLOWERS].layers() == []
    assert torch.equal(norm(x), llama().model.layers[0].input_layernorm(x))
    saved = io.BytesIO()
    torch.save(norm, saved)
    assert len(saved.getvalue()) < 4096  # 128 bytes of weight, and no layer of 4096
    again = copy.deepcopy(copy.deepcopy(layer))
    attention = again.self_attn
    followers = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert again.input_layernorm.__dict__[FOLLOWERS].layers() == followers
    del attention, followers, again.self_attn
    gc.collect()
    assert again.input_layernorm.__dict__[FOLLOWERS].layers() == []


# Reports, names, and hooks on everything.


def test_a_normalisation_of_two_blocks_is_fused_for_the_one_that_wants_it() -> None:
    model: Any = llama(2)
    blocks = model.model.layers
    blocks[1].input_layernorm = blocks[0].input_layernorm
    for wants, other in ((0, 1), (1, 0)):
        octavo.unconvert(model)
        report = octavo.convert(model, CurrentScaling(), filter="all", exclude=rf"layers\.{other}\.self_attn")
        rows = {one.name: one.fused for one in report.structures if one.name.endswith("input_layernorm")}
        assert rows == {f"model.layers.{wants}.input_layernorm": True, f"model.layers.{other}.input_layernorm": False}
        assert isinstance(blocks[0].input_layernorm, CastingNorm)


def test_classes_keep_their_names() -> None:
    model, plain = converted(bert), bert(1)
    assert isinstance(model.bert.encoder.layer[0], JoinedMLP)
    for name in plain._no_split_modules:
        assert any(type(module).__name__ == name for module in model.modules())


def test_hooks_on_all_modules_see_each_layer() -> None:
    seen: list[str] = []
    model = converted()
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        model(**batch(model))
    finally:
        hook.remove()
    assert seen.count("Linear") == 8
