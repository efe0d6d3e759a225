"""`convert` fuses what it knows: the same keys, the bits that are promised, and the way back."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.conversion.known_models import MODELS, bert, decoder, gpt2, logits, loss_of, timm_vit, with_octavos_parts
from torch import Tensor, nn

import octavo
from octavo.conversion.casting_norm import FOLLOWERS
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling

transformers = pytest.importorskip("transformers")
BF16 = torch.bfloat16
# Of each layer: normalisations that cast ahead, MLPs, and normalisations that are left alone.
STRUCTURES = dict.fromkeys(MODELS, (2, 1, 0)) | {"BERT": (0, 1, 2)}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def llama(layers: int = 1, **options: Any) -> nn.Module:
    return decoder("Llama", layers, **options)


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
    assert (len(report.fused), len(report.unfused)) == (norms + mlps, left), str(report)
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
            octavo.update_scales(one)
            optimizer.step()
            optimizer.zero_grad()
            losses[kind].append(loss.item())
    assert losses["bf16"][0] - losses["bf16"][-1] > 0.3, losses
    for a, b in zip(losses["bf16"], losses["fp8"], strict=True):
        assert abs(a - b) <= 0.01 + 0.05 * (losses["bf16"][0] - a), losses


class Mlp(nn.Module):
    """As timm has it."""

    __module__ = "timm.layers.mlp"

    def __init__(self, drop: float = 0.0, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(32, 64), nn.GELU(), nn.Dropout(drop)
        self.norm = norm or nn.Identity()
        self.fc2, self.drop2 = nn.Linear(64, 32), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        x = self.act(x)
        x = self.drop1(x)
        x = self.norm(x)
        x = self.fc2(x)
        return self.drop2(x)


class Block(nn.Module):
    """As timm has it, without attention."""

    __module__ = "timm.models.vision_transformer"

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm2, self.mlp = nn.LayerNorm(32, eps=1e-6), Mlp(**options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm2(x))


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
    assert block.ln_1.__dict__[FOLLOWERS] == (block.attn.c_attn,)
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


# What is left alone.


def not_fused(report: octavo.ConversionReport, ending: str) -> str:
    """The reason of the one structure whose name ends so."""
    [reason] = [one.reason for one in report.unfused if one.name.endswith(ending)]
    return reason


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
    assert not_fused(report, "layers.0.mlp") == "the forward of Doubled is not known"
    assert not_fused(report, "stranger") == "the forward of Stranger is not known"
    assert type(model.model.layers[0].mlp) is Doubled
    assert len(report.fused) == 5
    assert "not fused: Doubled with gate_proj, up_proj" in str(report)
    assert "fused: LlamaRMSNorm with q_proj, k_proj, v_proj, model.layers.0.input_layernorm and 1 more" in str(report)


def test_another_version_of_a_forward_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: self.down_proj(self.up_proj(x)))
    reason = not_fused(octavo.convert(llama()), "mlp")
    assert reason == ("LlamaMLP.forward reads down_proj, up_proj, where down_proj, act_fn, gate_proj, up_proj is known")


def test_what_stays_in_high_precision_and_what_is_not_known_is_named() -> None:
    report = octavo.convert(llama(), exclude=["down_proj", "[qkv]_proj"])
    assert not_fused(report, "mlp") == "down_proj stays in high precision"
    assert not_fused(report, "input_layernorm") == "what follows (q_proj, k_proj, v_proj) stays in high precision"
    assert [one.name for one in report.fused] == ["model.layers.0.post_attention_layernorm"]
    assert not_fused(octavo.convert(llama(hidden_act="mish")), "mlp") == "the activation MishActivation is not known"
    model: Any = llama()
    model.model.layers[0].input_layernorm = nn.RMSNorm(32)  # its eps is None: that of the dtype
    assert not_fused(octavo.convert(model), "input_layernorm") == "the normalisation RMSNorm is not known"
    assert "the residual as well" in not_fused(octavo.convert(bert(1)), "attention.output.LayerNorm")


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


# The argument.


def test_fuse_false_turns_structures_back_and_a_dry_run_changes_nothing() -> None:
    model: Any = llama()
    kinds = [type(module) for module in model.modules()]
    report = octavo.convert(model, dry_run=True)
    assert len(report.fused) == 3
    assert [type(module) for module in model.modules()] == kinds
    octavo.convert(model)
    again = octavo.convert(model)
    assert (len(again.fused), len(again.unfused)) == (3, 0)
    back = octavo.convert(model, fuse=False)
    assert {one.reason for one in back.unfused} == {"fuse=False"}
    assert type(model.model.layers[0].mlp) is type(llama().model.layers[0].mlp)  # type: ignore[union-attr,index]
    with pytest.raises(ValueError, match="fuse is 'yes': it must be True or False"):
        octavo.convert(model, fuse="yes")  # type: ignore[arg-type]


def test_a_layer_excluded_from_a_second_conversion_stays_fused_as_it_stays_converted() -> None:
    model = llama()
    octavo.convert(model)
    assert len(octavo.convert(model, exclude="down_proj").fused) == 3


def test_what_is_frozen_runs_by_itself() -> None:
    from octavo.inference import freeze

    model: Any = llama()
    octavo.convert(model)
    freeze(model, "row", exclude="lm_head")
    assert type(model.model.layers[0].mlp).__name__ == "LlamaMLP"
    assert FOLLOWERS not in model.model.layers[0].input_layernorm.__dict__
