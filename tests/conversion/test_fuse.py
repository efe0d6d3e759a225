"""`convert` fuses what it knows: the same keys, the bits that are promised, and the way back."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tests.conversion.known_models import (
    MODELS,
    Block,
    bert,
    gpt2,
    llama,
    logits,
    loss_of,
    not_fused,
    timm_vit,
    with_octavos_parts,
)
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

import octavo
from octavo.conversion.casting_norm import FOLLOWERS
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling

transformers = pytest.importorskip("transformers")
BF16 = torch.bfloat16
# Of each layer: normalisations that cast ahead, MLPs, and normalisations that are left alone.
STRUCTURES = dict.fromkeys(MODELS, (2, 1, 0)) | {"BERT": (0, 1, 2)}
# Whose loss is one of tokens.
LANGUAGE = {"GPT-2", "Llama", "Mistral", "Qwen2", "Qwen3"}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same_step(one: nn.Module, other: nn.Module, seed: int = 0) -> None:
    """Loss, gradients and states after a step, to the bit; and the step taken."""
    losses = []
    for model in (one, other):
        losses.append(loss_of(model, seed))
        losses[-1].backward()
        octavo.update_scales(model)
    assert torch.equal(*losses)
    mine, theirs = gradients(one), gradients(other)
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name
    for key, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key


# What is fused, and the way back.


@pytest.mark.parametrize("name", MODELS)
def test_known_structures_are_fused_under_the_same_keys_and_turned_back(name: str) -> None:
    model = MODELS[name]()
    plain = copy.deepcopy(model)
    keys, kinds = list(model.state_dict()), [type(module) for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    report = octavo.convert(model, DelayedScaling(amax_history_len=2))
    norms, mlps, left = (2 * count for count in STRUCTURES[name])
    assert (len(report.fused), len(report.unfused)) == (norms + mlps + (name in LANGUAGE), left), str(report)
    assert all(
        isinstance(module, kind) for module, kind in zip(model.modules(), kinds, strict=True) if kind is not nn.Linear
    )
    assert list(octavo.state_dict(model)) == keys
    unfused = copy.deepcopy(plain)
    octavo.convert(unfused, DelayedScaling(amax_history_len=2), fuse=False)
    for one in (model, unfused):
        loss_of(one).backward()
        octavo.update_scales(one)
        one.zero_grad()
    assert list(model.state_dict()) == list(unfused.state_dict())
    assert not torch.equal(logits(model), logits(plain))
    octavo.unconvert(model)
    assert [type(module) for module in model.modules()] == kinds
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert list(model.state_dict()) == keys
    assert torch.equal(logits(model), logits(plain))


@pytest.mark.parametrize("name", MODELS)
def test_twenty_steps_train_as_in_bf16(name: str) -> None:
    """A step's gradient is off by FP8's noise, some 10 % of it, in another direction each time.

    Its cosine with the exact one is 1 / sqrt(1 + 0.1^2), 0.995: a step gains half a percent less, in a model with few
    rows, whose noise averages less, some percent. A twentieth of the fall is allowed; and 0.01 for what 5 % of noise in
    the logits of a model that knows nothing yet do to its loss.
    """
    model = MODELS[name](1)
    losses: dict[str, list[float]] = {}
    plain = copy.deepcopy(model)
    assert octavo.convert(model, DelayedScaling(amax_history_len=4)).fused
    for kind, one in (("bf16", plain), ("fp8", model)):
        optimizer, losses[kind] = torch.optim.AdamW(one.parameters(), lr=3e-3), []
        for _ in range(20):
            with torch.autocast("cpu", BF16):
                loss = loss_of(one)
            loss.backward()
            if one is model:
                octavo.update_scales(one)
            optimizer.step()
            optimizer.zero_grad()
            losses[kind].append(loss.item())
    assert losses["bf16"][0] - losses["bf16"][-1] > 0.3, losses
    for a, b in zip(losses["bf16"], losses["fp8"], strict=True):
        assert abs(a - b) <= 0.01 + 0.05 * (losses["bf16"][0] - a), losses


def test_a_block_laid_out_as_timms() -> None:
    model = Block()
    separate = with_octavos_parts(copy.deepcopy(model))
    assert [one.kind for one in octavo.convert(model).fused] == ["LayerNorm", "Mlp"]
    octavo.convert(separate, fuse=False)
    x = torch.randn(2, 9, 32)
    assert torch.equal(model(x), separate(x))
    octavo.unconvert(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in Block().modules()]
    reason = not_fused(octavo.convert(Block(drop=0.1)), "mlp")
    assert reason == "a dropout of 0.1 lies between act and the next layer"
    reason = not_fused(octavo.convert(Block(norm=nn.LayerNorm(64))), "mlp")
    assert reason == "a LayerNorm lies between act and the next layer"
    # Set later, it counts as well.
    other = copy.deepcopy(model)
    octavo.convert(model)
    model.mlp.drop1.p = 0.5
    octavo.convert(other, fuse=False)
    other.mlp.drop1.p = 0.5
    results = []
    for one in (model, other):
        torch.manual_seed(0)
        results.append(one.mlp(x))
    assert torch.equal(*results)


def test_timms_vision_transformer() -> None:
    pytest.importorskip("timm")
    model = timm_vit()
    separate = with_octavos_parts(copy.deepcopy(model))
    keys = list(model.state_dict())
    assert len(octavo.convert(model, DelayedScaling(amax_history_len=2)).fused) == 2 * 3
    octavo.convert(separate, DelayedScaling(amax_history_len=2), fuse=False)
    for step in range(2):
        assert_same_step(model, separate, step)
    assert list(octavo.state_dict(model)) == keys


# The bits that are promised.


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("Llama", CurrentScaling()),
        ("Llama", DelayedScaling(amax_history_len=2)),
        ("Llama", RowwiseScaling()),
        ("GPT-2", DelayedScaling(amax_history_len=2, saved_input="high_precision")),
        ("GPT-2", BlockScaling()),
        ("ViT", DelayedScaling(amax_history_len=2)),
        ("ViT", CurrentScaling(backward="high_precision")),
        ("BERT", DelayedScaling(amax_history_len=2)),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_fused_gives_the_bits_of_octavos_own_parts_one_by_one(name: str, recipe: Recipe) -> None:
    """In float32, where a product of gate and up has nothing rounded before it."""
    model = MODELS[name](1)
    separate = with_octavos_parts(copy.deepcopy(model))
    assert octavo.convert(model, recipe).fused
    assert not octavo.convert(separate, recipe, fuse=False).fused
    for step in range(3 if recipe.delayed else 1):
        assert_same_step(model, separate, step)
    with torch.no_grad():
        assert torch.equal(logits(model), logits(separate))
    with torch.inference_mode():
        logits(model)


def test_frozen_weights_cost_nothing_and_change_no_other_gradient() -> None:
    for frozen in ("gate_proj", "mlp", "q_proj", "layernorm", "model.embed"):
        model = llama()
        separate = with_octavos_parts(copy.deepcopy(model))
        octavo.convert(model, CurrentScaling())
        octavo.convert(separate, CurrentScaling(), fuse=False)
        for one in (model, separate):
            for name, parameter in one.named_parameters():
                parameter.requires_grad_(frozen not in name)
        with octavo.count_gemms() as mine:
            loss_of(model).backward()
        with octavo.count_gemms() as theirs:
            loss_of(separate).backward()
        assert mine.by_layer() == theirs.by_layer()
        assert_same_step(model, separate)


@pytest.mark.parametrize(("make", "option"), [(gpt2, "resid_pdrop"), (bert, "hidden_dropout_prob")])
def test_dropout_behind_an_mlp_is_kept(make: Any, option: str) -> None:
    model = make(1, **{option: 0.4}).train()
    separate = with_octavos_parts(copy.deepcopy(model))
    octavo.convert(model, CurrentScaling())
    octavo.convert(separate, CurrentScaling(), fuse=False)
    losses = []
    for one in (model, separate, model):
        torch.manual_seed(len(losses) // 2)
        losses.append(loss_of(one).item())
    assert losses[0] == losses[1] != losses[2]


def test_where_fp8_is_off_the_original_runs() -> None:
    for name in ("Llama", "BERT"):
        model = MODELS[name](1)
        plain = copy.deepcopy(model)
        octavo.convert(model, CurrentScaling())
        with octavo.autocast(enabled=False):
            assert torch.equal(logits(model), logits(plain))
        keeps = CurrentScaling(overrides={"down_proj|output.dense": None})
        octavo.unconvert(model)
        assert not any(one.kind.endswith(("MLP", "Layer")) for one in octavo.convert(model, keeps).fused)


# Copies, checkpoints, the compiler.


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_fused_and_on_their_own(copied: Any) -> None:
    model = MODELS["GPT-2"](1)
    octavo.convert(model, DelayedScaling(amax_history_len=2))
    loss_of(model).backward()
    octavo.update_scales(model)
    other = copied(model)
    assert [type(module) for module in other.modules()] == [type(module) for module in model.modules()]
    block: Any = other.transformer.h[0]
    assert block.ln_1.__dict__[FOLLOWERS].layers() == [block.attn.c_attn]
    assert "_layers_behind" not in block.ln_1._modules
    model.zero_grad()
    assert_same_step(model, other)
    octavo.unconvert(other)
    assert type(block.mlp) is transformers.models.gpt2.modeling_gpt2.GPT2MLP
    assert type(model.transformer.h[0].mlp) is not type(block.mlp)


def test_a_state_dict_of_either_form_loads_into_the_other() -> None:
    fused, separate = llama(), llama()
    octavo.convert(fused, DelayedScaling(amax_history_len=2))
    octavo.convert(separate, DelayedScaling(amax_history_len=2), fuse=False)
    for one, other in ((fused, separate), (separate, fused)):
        for step in range(2):
            loss_of(one, step).backward()
            octavo.update_scales(one)
        other.load_state_dict(one.state_dict())
        for key, value in one.state_dict().items():
            assert torch.equal(value, other.state_dict()[key]), key


def test_a_checkpoint_with_two_forwards_pending_changes_no_bit() -> None:
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model: Any = llama()
        octavo.convert(model, DelayedScaling(amax_history_len=2))
        layer = model.model.layers[0]

        def run(x: Tensor, layer: Any = layer) -> Tensor:
            return layer.mlp(layer.post_attention_layernorm(x))

        for _ in range(2):
            pending = []
            for scale in (1.0, 50.0):
                x = (torch.randn(3, 5, 32) * scale).requires_grad_()
                pending.append((x, octavo.checkpoint(run, x) if checkpointed else run(x)))
                octavo.update_scales(model)
            for _, y in pending:
                y.square().sum().backward()
            results.append([x.grad for x, _ in pending] + [p.grad for p in layer.mlp.parameters()])
    for a, b in zip(results[0] + results[1], results[2] + results[3], strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [CurrentScaling(), DelayedScaling(amax_history_len=2)])
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "BERT"])
def test_a_block_compiles_in_one_graph(name: str, recipe: Recipe) -> None:
    """The MLP gives eager's bits; in compiled code a normalisation is torch's, with another last bit."""
    model: Any = MODELS[name](1)
    octavo.convert(model, recipe)
    other = copy.deepcopy(model)
    one, two = ({"Llama": lambda m: m.model.layers[0].mlp, "GPT-2": lambda m: m.transformer.h[0].mlp,
                 "BERT": lambda m: m.bert.encoder.layer[0]}[name](m) for m in (model, other))  # fmt: skip
    compiled = torch.compile(one, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        x = torch.randn(2, 9, 32, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        out, expected = compiled(x), two(y)
        assert torch.equal(out, expected)
        for result in (out, expected):
            result.square().sum().backward()
        assert torch.equal(x.grad, y.grad)
        for one_of in (model, other):
            octavo.update_scales(one_of)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
def test_blocks_that_are_alike_are_one_graph() -> None:
    """Two with delayed scaling: one measures. (Llama and GPT-2 number their layers: one a layer.)"""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    model: Any = bert(3)
    octavo.convert(model, DelayedScaling(amax_history_len=2))
    for layer in model.bert.encoder.layer:
        layer.compile(fullgraph=True, backend=backend)
    for step in range(3):
        loss_of(model, step).backward()
        octavo.update_scales(model)
    assert len(graphs) == 2


# What it is for.


def test_codes_that_a_normalisation_made_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one the input is cast for attention, its output, the MLP, and down; fused for attention's output alone."""
    from octavo.tensor import quantizer

    counted: list[int] = []
    real = quantizer.cast_transpose

    def counting(x: Tensor, *arguments: Any, **options: Any) -> Any:
        counted.append(len(x))
        return real(x, *arguments, **options)

    for fuse, casts in ((False, 4), (True, 1)):
        model = llama()
        octavo.convert(model, DelayedScaling(amax_history_len=2), exclude="lm_head", fuse=fuse)
        loss_of(model).backward()
        octavo.update_scales(model)
        counted.clear()
        with monkeypatch.context() as patched, torch.no_grad():
            patched.setattr(quantizer, "cast_transpose", counting)
            logits(model)
        assert counted.count(3 * 17) == casts


def test_less_is_kept_for_the_backward() -> None:
    """Of bf16 MLPs: codes of a in place of f(gate), a and their codes."""
    kept = {}
    for fuse in (False, True):
        model: Any = llama()
        octavo.convert(model, CurrentScaling(), fuse=fuse)
        mlp, storages = model.model.layers[0].mlp.to(BF16), {}

        def pack(tensor: Tensor, storages: Any = storages) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        x = torch.randn(512, 32, dtype=BF16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = mlp(x)
        kept[fuse] = sum(storages.values())
        y.sum().backward()
    # gate and up 4 F, codes of a F, of x K; one by one f(gate) 2 F besides. F = 64, K = 32.
    assert kept[False] - kept[True] >= 512 * 2 * 64
