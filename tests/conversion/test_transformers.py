"""GPT-2 (Conv1D), Llama and ViT of transformers: converted, trained a little, and turned back."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.measures import relative_error
from torch import Tensor, nn

import octavo
from octavo.recipes import CurrentScaling, DelayedScaling

transformers = pytest.importorskip("transformers")


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=96, n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=8,
        num_labels=5,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    # Two blocks of attention (c_attn, c_proj) and MLP (c_fc, c_proj), and the head.
    "GPT-2": (gpt2, 2 * 4 + 1),
    # q, k, v, o, gate, up, down, and the head.
    "Llama": (llama, 2 * 7 + 1),
    # query, key, value, output, intermediate, output, and the classifier.
    "ViT": (vit, 2 * 6 + 1),
}


def logits(model: nn.Module, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if name == "ViT":
        return model(pixel_values=torch.randn(3, 3, 16, 16, generator=generator)).logits
    return model(input_ids=torch.randint(0, 96, (3, 17), generator=generator)).logits


@pytest.mark.parametrize("name", MODELS)
def test_converted_right_trained_and_turned_back(name: str) -> None:
    make, count = MODELS[name]
    model = make()
    plain = copy.deepcopy(model)
    keys, parameters = list(model.state_dict()), list(model.parameters())
    kinds = [type(module) for module in model.modules()]
    report = octavo.convert(model, CurrentScaling())
    assert len(report.converted) == count, str(report)
    assert report.skipped == []
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    with torch.no_grad(), octavo.count_gemms() as counted:
        y = logits(model, name)
    assert counted.fp8 == count
    assert set(counted.by_layer()) == {row.name for row in report.converted}
    # Some 4 % a product, which residuals and norms carry on: a tenth and a half for two blocks, and not nothing.
    assert 0.005 < relative_error(logits(plain, name), y) < 0.15
    octavo.unconvert(model)
    assert [type(module) for module in model.modules()] == kinds
    assert torch.equal(logits(model, name), logits(plain, name))


@pytest.mark.parametrize("name", MODELS)
def test_training_in_fp8_follows_training_in_float32(name: str) -> None:
    model = MODELS[name][0]()
    plain = copy.deepcopy(model)
    octavo.convert(model, DelayedScaling(amax_history_len=4))
    losses: dict[int, list[float]] = {0: [], 1: []}
    for which, one in enumerate((plain, model)):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        for _ in range(6):
            y = logits(one, name)
            loss = nn.functional.cross_entropy(y.flatten(0, -2), torch.arange(y.shape[:-1].numel()) % 5)
            loss.backward()
            if one is model:
                octavo.update_scales(model)
            optimizer.step()
            optimizer.zero_grad()
            losses[which].append(loss.item())
    fall = losses[0][0] - losses[0][-1]
    assert fall > 0.3, losses
    assert losses[1][0] - losses[1][-1] > 0.8 * fall


def test_gpt2s_conv1d_holds_its_weight_the_other_way_round() -> None:
    model = gpt2()
    layer = model.transformer.h[0].mlp.c_fc
    plain = copy.deepcopy(layer)
    octavo.convert(model)
    assert isinstance(layer, type(plain))
    assert layer.weight.shape == (32, 128)
    x, dy = torch.randn(4, 8, 32, requires_grad=True), torch.randn(4, 8, 128)
    y = layer(x)
    y.backward(dy)
    # One product of E4M3 data: 5 %; E5M2 gradients: 10 %.
    assert relative_error(plain(x), y) < 0.05
    assert relative_error(x.detach().flatten(0, 1).t() @ dy.flatten(0, 1), layer.weight.grad) < 0.10
    assert relative_error(dy @ plain.weight.t(), x.grad) < 0.10
    other = copy.deepcopy(layer)
    assert torch.equal(other(x), y)
    assert type(other) is type(layer)


def test_a_tied_head_stays_tied() -> None:
    model = gpt2()
    octavo.convert(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert isinstance(model.lm_head, octavo.Linear)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")  # of version 5
@pytest.mark.parametrize("recipe", [CurrentScaling(), DelayedScaling(amax_history_len=4)])
def test_gradient_checkpointing_of_transformers_changes_no_bit(recipe: octavo.recipes.Recipe) -> None:
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = llama()
        octavo.convert(model, recipe)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        for _ in range(3):
            model.zero_grad()
            logits(model, "Llama").square().mean().backward()
            octavo.update_scales(model)
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_generation_with_a_cache() -> None:
    model = gpt2().eval()
    octavo.convert(model, CurrentScaling(), exclude="lm_head")
    tokens = model.generate(
        torch.arange(5)[None], attention_mask=torch.ones(1, 5), max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    assert tokens.shape == (1, 11)
