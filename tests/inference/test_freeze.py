"""`freeze`: which layers of a model are replaced, by what, and what stays."""

from __future__ import annotations

import copy
import re

import pytest
import safetensors.torch
import torch
from tests.measures import sqnr_db
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import octavo
from octavo.inference import SCHEMES, FrozenLinear, calibrate, freeze
from octavo.recipes import CurrentScaling, DelayedScaling

NAMES = [scheme.name for scheme in SCHEMES]
CONVERSION = {"filter": "all"}


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 33)).eval()


def test_it_is_at_the_front_door_and_its_errors_say_so() -> None:
    assert "freeze" in octavo.__all__
    model = mlp()
    assert octavo.freeze(model) == ["0", "2"]
    with pytest.warns(UserWarning, match=r"^octavo\.freeze replaced nothing"):
        octavo.freeze(model)


def gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(
        n_layer=1, n_head=2, n_embd=64, vocab_size=50, n_positions=16, bos_token_id=None, eos_token_id=None
    )
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("scheme", NAMES)
def test_a_model_serves_close_to_itself_and_loads_strictly(scheme: str, tmp_path) -> None:
    model = mlp()
    x = torch.randn(20, 64)
    with torch.no_grad():
        exact = model(x)
    plain = copy.deepcopy(model)
    scales = calibrate(model, [x]) if scheme == "tensor_static" else None
    assert freeze(model, scheme, input_scales=scales) == ["0", "2"]
    y = model(x)
    # Two layers of at least 25.8 dB each; a ReLU lets noise of 0 through by half, and signal too.
    assert sqnr_db(exact, y) > 22.8
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    freeze(plain, scheme, input_scales=dict.fromkeys(scales, 1.0) if scales else None)
    plain.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"), strict=True)
    assert torch.equal(plain(x), y)
    assert not list(model.parameters())


def test_training_flags_follow() -> None:
    model = mlp().train()
    model[2].eval()
    freeze(model)
    assert (model.training, model[0].training, model[2].training) == (True, True, False)


@pytest.mark.parametrize("converted", [False, True])
def test_gpt2_with_its_transposed_weights_and_its_tied_head(converted: bool) -> None:
    model = gpt2()
    tokens = torch.randint(0, 50, (2, 8))
    with torch.no_grad():
        exact = model(tokens).logits
    straight = copy.deepcopy(model)
    if converted:
        octavo.convert(model, CurrentScaling(), exclude="lm_head", **CONVERSION)
    block = "transformer.h.0"
    names = [f"{block}.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    assert freeze(model) == names
    layer = model.get_submodule(names[0])
    assert (layer.out_features, layer.in_features) == (192, 64)
    assert layer.weight.is_contiguous()
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight is model.transformer.wte.weight
    with torch.no_grad():
        y = model(tokens).logits
        freeze(straight)
        assert torch.equal(straight(tokens).logits, y)
    # Residuals carry most of the signal past the four layers: never below a layer's own 25.8 dB.
    assert sqnr_db(exact, y) > 25.8


@pytest.mark.parametrize("recipe", [CurrentScaling(), DelayedScaling()])
def test_converted_layers_are_taken(recipe) -> None:
    model, straight = mlp(), None
    straight = copy.deepcopy(model)
    octavo.convert(model, recipe, **CONVERSION)
    assert freeze(model) == freeze(straight) == ["0", "2"]
    x = torch.randn(4, 64)
    assert torch.equal(model(x), straight(x))
    assert set(model.state_dict()) == set(straight.state_dict())


def test_weights_that_exist_in_fp8_alone_are_taken_by_value() -> None:
    with octavo.quantized_init():
        model = nn.Sequential(octavo.Linear(64, 32))
    values = model[0].weight.dequantize()
    codes = model[0].weight.codes.view(torch.uint8).clone()
    freeze(model, "tensor_dynamic")
    assert torch.equal(model[0].weight.view(torch.uint8), codes)
    assert torch.equal(model[0].weight.float() * model[0].weight_scale, values)


def test_a_layer_in_several_places_is_replaced_in_all() -> None:
    shared = nn.Linear(16, 16)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.ReLU())})
    assert freeze(model) == ["a"]
    assert isinstance(model["a"], FrozenLinear)
    assert model["b"][0] is model["a"]


def test_a_tied_head_stays_as_converted_and_unconvert_still_turns_it_back() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(48, 32), "body": nn.Linear(32, 32), "head": nn.Linear(32, 48)})
    model["head"].weight = model["embedding"].weight
    octavo.convert(model, CurrentScaling(), **CONVERSION)
    x = torch.randn(4, 32)
    converted = model["head"](x)
    report = freeze(model)
    assert [row.name for row in report.left] == ["head"]
    assert type(model["head"]) is octavo.Linear
    assert torch.equal(model["head"](x), converted)
    octavo.unconvert(model)
    assert type(model["body"]) is FrozenLinear
    assert type(model["head"]) is nn.Linear
    assert model["head"].weight is model["embedding"].weight
    assert not torch.equal(model["head"](x), converted)


def test_tied_weights_stay_tied() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, 16)
            self.body = nn.Linear(16, 16)
            self.head = nn.Linear(16, 20, bias=False)
            self.head.weight = self.embedding.weight

    model = Model()
    assert freeze(model) == ["body"]
    assert model.head.weight is model.embedding.weight


def test_exclude_is_a_pattern_or_several() -> None:
    for exclude in ("^2$", ["^2$"], (p for p in ["^2$"]), re.compile("^2$"), [re.compile("^2$")]):
        model = mlp()
        assert freeze(model, exclude=exclude) == ["0"]
        assert type(model[2]) is nn.Linear
    with pytest.raises(ValueError, match=r"exclude pattern '\(' is no regular expression"):
        freeze(mlp(), exclude="(")
    with pytest.warns(UserWarning, match="exclude pattern 'lm_head' matches no linear layer"):
        freeze(mlp(), exclude="lm_head")


def test_nothing_replaced_is_said_and_why() -> None:
    with pytest.warns(UserWarning, match="replaced nothing: 0: excluded by '.'; 2: excluded by '.'"):
        assert freeze(mlp(), exclude=".") == []
    with pytest.warns(UserWarning, match="the model has no linear layer"):
        freeze(nn.Sequential(nn.ReLU()))
    model = mlp()
    freeze(model)
    frozen = "its 2 linear layers are frozen already: there is no way back from codes, build the model anew"
    with pytest.warns(UserWarning, match=f"replaced nothing: {frozen}"):
        freeze(model)
    with pytest.warns(UserWarning, match=f"NOTHING WAS CONVERTED: {frozen}"):
        octavo.convert(model)
    model.append(nn.Linear(8, 8))
    with pytest.warns(UserWarning, match=f"replaced nothing: 3: excluded by '3'; {frozen}"):
        freeze(model, exclude="3")
    with pytest.warns(UserWarning, match=f"NOTHING WAS CONVERTED: {frozen}"):
        octavo.convert(model, exclude="3")
    assert octavo.convert(model, filter="all").frozen == 2


def test_what_is_left_is_said_and_why() -> None:
    model = nn.ModuleDict({
        "body": nn.Linear(16, 16), "twice": TwiceLinear(16, 16), "mlp": octavo.LayerNormMLP(16, 32),
        "head": nn.Linear(16, 8), "tied": nn.Linear(16, 8),
    })  # fmt: skip
    model["tied"].weight = model["head"].weight
    report = freeze(model, "row", exclude="mlp")
    assert report == ["body"]
    assert [tuple(layer) for layer in report.left] == [
        ("twice", "TwiceLinear", "TwiceLinear has a forward of its own"),
        ("mlp", "LayerNormMLP", "excluded by 'mlp'"),
        ("head", "Linear", "its weight is tied to another module's"),
        ("tied", "Linear", "its weight is tied to another module's"),
    ]
    lines = str(report).splitlines()
    assert lines[2].split() == ["body", "Linear", "yes", "row"]
    assert lines[3].split()[:4] == ["twice", "TwiceLinear", "no", "TwiceLinear"]
    assert lines[-1] == "1 of 5 layers frozen."


def test_a_head_that_computes_its_loss_stays_one() -> None:
    model = nn.Sequential(octavo.Linear(16, 16), octavo.LMHead(16, 32))
    report = freeze(model)
    assert list(report) == ["0"]
    assert [(left.name, left.kind) for left in report.left] == [("1", "LMHead")]
    assert "computes the loss" in report.left[0].reason
    hidden, targets = torch.randn(4, 16), torch.randint(32, (4,))
    assert model[1](hidden, targets).shape == ()


@pytest.mark.parametrize("scheme", ["row", "tensor_dynamic"])
@pytest.mark.parametrize("strict", [True, False])
def test_codes_are_not_loaded_as_the_weight_of_a_layer_that_trains(scheme: str, strict: bool) -> None:
    served = nn.Sequential(nn.Linear(16, 32), octavo.LayerNormMLP(32, 16))
    freeze(served, scheme)
    state = served.state_dict()
    for number, key in ((0, "0.weight"), (1, "1.fc1_weight")):
        model = nn.Sequential(octavo.Linear(16, 32), octavo.LayerNormMLP(32, 16))
        own = {name: value for name, value in state.items() if name.startswith(str(number))}
        with pytest.raises(
            ValueError, match=rf"{key} is torch.float8_e4m3fn of shape .* a frozen checkpoint\? It loads"
        ):
            model.load_state_dict(own, strict=strict)


@pytest.mark.parametrize("own", NAMES)
@pytest.mark.parametrize("saved", NAMES)
def test_a_file_of_another_scheme_says_so_once(saved: str, own: str) -> None:
    models = []
    for scheme in (saved, own):
        model = nn.Sequential(nn.Linear(160, 32), octavo.LayerNormMLP(32, 160), nn.Linear(32, 32))
        scales = dict.fromkeys(["0", "1.fc1", "1.fc2", "2"], 1.0) if scheme == "tensor_static" else None
        freeze(model, scheme, input_scales=scales)
        models.append(model)
    state, model = models[0].state_dict(), models[1]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if {saved, own} <= {"tensor_static", "tensor_dynamic"}:
        # One scale a weight in both: that of the activations is a key more or less.
        model.load_state_dict(state, strict=False)
    elif saved == own:
        model.load_state_dict(state)
    else:
        given = ", input_scales=..." if saved == "tensor_static" else ""
        for strict in (True, False):
            with pytest.raises(RuntimeError, match="was saved with the scheme") as error:
                model.load_state_dict(state, strict=strict)
            assert str(error.value).split("\n\t")[1:] == [
                f"0 was saved with the scheme {saved!r}, and is frozen with {own!r} here: build the model, freeze it"
                f" alike by octavo.freeze(model, {saved!r}{given}), and load the file then"
            ]
        for name, value in model.state_dict().items():
            assert torch.equal(value.float(), before[name].float())


class TwiceLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_layers_with_a_forward_of_their_own_stay() -> None:
    model = nn.Sequential(TwiceLinear(16, 16), nn.Linear(16, 16))
    assert freeze(model) == ["1"]
    assert type(model[0]) is TwiceLinear


@pytest.mark.parametrize("masked", [False, True])
def test_an_encoder_serves_through_its_frozen_layers(masked: bool) -> None:
    """Its fused inference path, and MultiheadAttention, read weights without calling the layers."""
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    model = nn.ModuleList([nn.TransformerEncoder(layer, 2)]).eval()
    x = torch.randn(2, 6, 32)
    mask = torch.tensor([[False] * 6, [False] * 4 + [True] * 2]) if masked else None
    exact = model[0](x, src_key_padding_mask=mask).detach()  # with gradients there is no fused path
    names = freeze(model)
    assert names == [f"0.layers.{i}.{name}" for i in (0, 1) for name in ("linear1", "linear2")]
    with torch.no_grad():
        y = model[0](x, src_key_padding_mask=mask)
    kept = torch.ones(2, 6, dtype=torch.bool) if mask is None else ~mask
    assert sqnr_db(exact[kept], y[kept]) > 25.8
    assert not torch.equal(exact[kept], y[kept]), "a fused path past the frozen layers loses nothing"


def test_the_root_cannot_be_replaced_in_place() -> None:
    with pytest.raises(ValueError, match="itself a linear layer"):
        freeze(nn.Linear(16, 16))


@pytest.mark.parametrize(
    ("scheme", "scales", "message"),
    [
        ("tensor_static", None, "no input scale for '0': calibrate .* or exclude it"),
        ("tensor_static", {"0": 1.0}, "no input scale for '2'"),
        ("tensor_static", {"0": 1.0, "2": 0.0}, "input_scale of '2' is 0.0"),
        ("tensor_static", {"0": 1.0, "2": float("inf")}, "input_scale of '2' is inf"),
        ("tensor_static", [1.0], "input_scales is a list: expected {name of a layer: scale}"),
        ("tensor_static", {"0": 10**400, "2": 1.0}, "input_scale of '0' is 1000"),
        ("tensor_static", {"0": "1.0", "2": 1.0}, "input_scale of '0' is 1.0: a static scheme needs"),
        ("row", {"0": 1.0, "2": 1.0}, "takes no input_scales: leave them out, or use 'tensor_static'"),
        ("fp8", None, "unknown scheme 'fp8'"),
    ],
)
def test_a_refused_freeze_changes_nothing(scheme, scales, message) -> None:
    model = mlp()
    with pytest.raises(ValueError, match=message):
        freeze(model, scheme, input_scales=scales)
    assert [type(module) for module in model] == [nn.Linear, nn.ReLU, nn.Linear]
