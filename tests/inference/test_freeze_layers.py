"""Octavo's own layers frozen: the bits of the same layers with the same static scales, saved, loaded, generating."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.measures import sqnr_db
from torch import Tensor, nn

import octavo
from octavo.inference import (
    SCHEMES,
    FrozenGroupedLinear,
    FrozenLayer,
    FrozenLayerNormLinear,
    FrozenLayerNormMLP,
    FrozenLinear,
    calibrate,
    freeze,
)
from octavo.modules import FP8LinearMixin
from octavo.modules.split_linear import SplitLinear
from octavo.recipes import RowwiseScaling, StaticScaling

BF16 = torch.bfloat16
NAMES = [scheme.name for scheme in SCHEMES]
SPLITS = [3, 0, 7]


class Model(nn.Module):
    """A transformer layer, experts, and a layer of each kind by itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = octavo.TransformerLayer(32, 48, 2, attn_input_format="bshd", activation="swiglu", **options)
        self.moe = octavo.GroupedLinear(3, 32, 32)
        self.normed = octavo.LayerNormLinear(32, 33, normalization="RMSNorm")
        self.split = SplitLinear(33, {"a": 16, "b": 17})

    def forward(self, x: Tensor) -> Tensor:
        """[2, 5, 32] -> [2, 5, 33]"""
        h = self.layer(x)
        h = h + self.moe(h, SPLITS)
        result: Tensor = self.split(self.normed(h))
        return result


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 5, 32).to(dtype)


def calibrated(model: nn.Module, x: Tensor) -> dict[str, float]:
    """Scales for all products, others than x by itself would have; those of experts without a token made up."""
    scales = {name: 1.37 * scale for name, scale in calibrate(model, [x]).items()}
    return {**{f"moe.expert{index}": 0.01 for index in range(3)}, **scales}


def with_static_scales(model: nn.Module, scales: dict[str, float]) -> nn.Module:
    """The model as it is, with the same scales of inputs; those of weights are measured, as freezing does."""
    for name, module in model.named_modules():
        if isinstance(module, FP8LinearMixin):
            recipe = StaticScaling(format=octavo.E4M3, input_scale=scales[name])
            module.become_fp8(recipe, name)
    return model


LINEAR_PARTS = [
    "layer.self_attention.layernorm_qkv",
    "layer.self_attention.proj",
    "layer.layernorm_mlp.fc1",
    "layer.layernorm_mlp.fc2",
    "moe.expert0",
    "moe.expert1",
    "moe.expert2",
    "normed",
    "split",
]
WHOLE = [
    "layer.self_attention.layernorm_qkv",
    "layer.self_attention.proj",
    "layer.layernorm_mlp",
    "moe",
    "normed",
    "split",
]


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
def test_frozen_layers_give_the_bits_of_the_same_layers_with_the_same_scales(dtype: torch.dtype) -> None:
    model, x = Model().to(dtype).eval(), batch(dtype)
    scales = calibrated(model, x)
    assert sorted(scales) == sorted(LINEAR_PARTS)
    unfrozen, measured = with_static_scales(copy.deepcopy(model), scales), copy.deepcopy(model)
    assert freeze(model, "tensor_static", input_scales=scales) == freeze(measured, "tensor_dynamic") == WHOLE
    assert not torch.equal(measured(x), model(x)), "the scales are those that were given"
    for grad in (False, True):
        with torch.set_grad_enabled(grad), octavo.count_gemms() as counted:
            expected, y = unfrozen(x), model(x)
            assert torch.equal(y, expected)
        assert counted.by_layer() == {name: {"fprop fp8 emulated": 2} for name in LINEAR_PARTS}
    assert not any(isinstance(module, FP8LinearMixin) for module in model.modules())
    assert not list(model.parameters())


@pytest.mark.parametrize("scheme", NAMES)
def test_every_scheme_serves_close_to_the_model_and_loads_strictly(scheme: str, tmp_path: Path) -> None:
    model, x = Model().eval(), batch()
    scales = calibrated(model, x) if scheme == "tensor_static" else None
    with torch.no_grad():
        exact = model(x)
    other = copy.deepcopy(model)
    freeze(model, scheme, input_scales=scales)
    with octavo.count_gemms() as counted:
        y = model(x)
    assert sorted(counted.by_layer()) == sorted(LINEAR_PARTS)
    assert counted.fp8 == len(LINEAR_PARTS)
    # The last two products lose 28.5 dB each and those before, past residuals, no more: four such make 22.5.
    assert sqnr_db(exact, y) > 21
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    freeze(other, scheme, input_scales=dict.fromkeys(LINEAR_PARTS, 1.0) if scales else None)
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"), strict=True)
    assert torch.equal(other(x), y)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(x), y)


def test_keys_of_the_state_dict_tell_what_is_what() -> None:
    model = Model()
    before = set(model.state_dict())
    freeze(model, "tensor_static", input_scales=dict.fromkeys(LINEAR_PARTS, 0.01))
    state = model.state_dict()
    mlp = {key.removeprefix("layer.layernorm_mlp.") for key in state if key.startswith("layer.layernorm_mlp.")}
    of_fc = {f"fc{n}_{name}" for n in (1, 2) for name in ("weight", "weight_scale", "bias", "input_scale")}
    assert mlp == {"layer_norm_weight", "layer_norm_bias"} | of_fc
    experts = {key.removeprefix("moe.") for key in state if key.startswith("moe.")}
    assert experts == {
        key for i in range(3) for key in (f"weight{i}", f"weight{i}_scale", f"bias{i}", f"expert{i}_input_scale")
    }
    # But for weights that were kept in parts, every key is there that was, and those that are new are scales.
    parts = ("query_", "key_", "value_", "a_", "b_")
    assert {key for key in before if key.rpartition(".")[2].startswith(parts)} == before - set(state)
    assert all(key.endswith(("_scale", ".weight", ".bias")) for key in set(state) - before)
    codes = [key for key, value in state.items() if value.dtype == torch.float8_e4m3fn]
    assert len(codes) == len(LINEAR_PARTS)


def test_another_dtype_is_for_norms_and_biases_alone_and_codes_are_loaded_as_such() -> None:
    model = Model().eval()
    freeze(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.to(BF16)
    for key, value in model.state_dict().items():
        kept = value.dtype == torch.float8_e4m3fn or key.endswith("_scale")
        assert value.dtype == (before[key].dtype if kept else BF16), key
    assert model(batch(BF16)).dtype == BF16
    high = {"fc1_weight": torch.randn(96, 32)}
    with pytest.raises(
        RuntimeError, match=r"fc1_weight is torch\.float32.*loads torch\.float8_e4m3fn.*before freezing"
    ):
        model.layer.layernorm_mlp.load_state_dict(high, strict=False)


@pytest.mark.parametrize("scheme", NAMES)
def test_norms_that_are_handed_out_are_those_of_the_layer(scheme: str) -> None:
    layers = nn.ModuleList([
        octavo.LayerNormLinear(32, 48, return_layernorm_output=True, zero_centered_gamma=True),
        octavo.LayerNormMLP(32, 64, return_layernorm_output=True, normalization="RMSNorm", bias=False),
    ])  # fmt: skip
    x = torch.randn(6, 32)
    with torch.no_grad():
        normed = [layer(x)[1] for layer in layers]
    scales = {"0": 0.01, "1.fc1": 0.01, "1.fc2": 0.01} if scheme == "tensor_static" else None
    freeze(layers, scheme, input_scales=scales)
    assert [type(layer) for layer in layers] == [FrozenLayerNormLinear, FrozenLayerNormMLP]
    for layer, n in zip(layers, normed, strict=True):
        y, found = layer(x)
        assert torch.equal(found, n)
        assert y.shape == (6, 48 if layer is layers[0] else 32)


@pytest.mark.parametrize("scheme", ["tensor_static", "row"])
def test_compiled_code_gives_the_same_bits_in_one_graph(scheme: str) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(octavo.LayerNormLinear(32, 48), octavo.LayerNormMLP(48, 64))
    scales = {"0": 0.01, "1.fc1": 0.01, "1.fc2": 0.01} if scheme == "tensor_static" else None
    freeze(model, scheme, input_scales=scales)
    x = torch.randn(6, 32)
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = octavo.GroupedLinear(3, 32, 48)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.moe(x, m_splits=SPLITS)
        return result


def test_experts_are_those_of_the_layer_whoever_knows_their_sizes() -> None:
    model, x = Experts(), torch.randn(10, 32)
    scales = calibrated(model, x)
    assert sorted(calibrate(model, [x])) == ["moe.expert0", "moe.expert2"], "no token reached the other one"
    assert scales["moe.expert2"] == pytest.approx(1.37 * x[3:].abs().max().item() / 448)
    with pytest.raises(ValueError, match=r"no input scale for 'moe\.expert1': .*reach it, or exclude 'moe'"):
        freeze(model, "tensor_static", input_scales=calibrate(model, [x]))
    unfrozen = with_static_scales(copy.deepcopy(model), scales).moe
    assert freeze(model, "tensor_static", input_scales=scales) == ["moe"]
    frozen = model.moe
    assert isinstance(frozen, FrozenGroupedLinear)
    for splits in (SPLITS, torch.tensor(SPLITS), [10, 0, 0]):
        assert torch.equal(frozen(x, splits), unfrozen(x, splits).detach())
    compiled = torch.compile(frozen, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, torch.tensor(SPLITS)), frozen(x, SPLITS))
    with pytest.raises(ValueError, match=r"m_splits has 2 entries for 3 experts"):
        frozen(x, [3, 0])
    with pytest.raises(ValueError, match=r"sums to 9, and x has 10 tokens"):
        frozen(x, [3, 0, 6])


def test_a_gradient_asked_of_it_is_refused_and_not_lost() -> None:
    model, x = Model(), batch().requires_grad_()
    freeze(model)
    for layer, given in ((model.normed, (x,)), (model.layer.layernorm_mlp, (x,)), (model.moe, (x, SPLITS))):
        with pytest.raises(RuntimeError, match=r"passes no gradient: train with octavo\.convert"):
            (layer(*given).sum() + x.sum()).backward()
    for layer, wrong in ((model.normed, 16), (model.layer.layernorm_mlp, 33)):
        with pytest.raises(ValueError, match="last dimension must be in_features = 32"):
            layer(torch.randn(2, wrong))
        with pytest.raises(ValueError, match=r"input has dtype torch\.float64"):
            layer(torch.randn(2, 32, dtype=torch.float64))


# --- scales


def test_scales_are_those_of_what_enters_each_product() -> None:
    model, x = nn.ModuleDict({"mlp": octavo.LayerNormMLP(32, 48, activation="geglu")}), torch.randn(64, 32)
    scales = calibrate(Only(model), [x])
    layer = model["mlp"]
    with torch.no_grad():
        n = nn.functional.layer_norm(x, (32,), layer.layer_norm_weight, layer.layer_norm_bias, layer.eps)
        z = nn.functional.linear(n, layer.fc1_weight, layer.fc1_bias)
        a = nn.functional.gelu(z[:, :48], approximate="tanh") * z[:, 48:]
    assert scales == {
        "model.mlp.fc1": pytest.approx(n.abs().max().item() / 448, rel=1e-5),
        "model.mlp.fc2": pytest.approx(a.abs().max().item() / 448, rel=1e-5),
    }


class Only(nn.Module):
    def __init__(self, model: nn.ModuleDict) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.model["mlp"](x)
        return result


# --- what stays, and what is refused


def test_a_part_alone_cannot_stay_and_the_whole_can() -> None:
    model = Model()
    before = copy.deepcopy(model.state_dict())
    for part, whole in (("fc2", "layer.layernorm_mlp"), ("expert1", "moe")):
        with pytest.raises(
            ValueError, match=f"leaves out '.*{part}', a part of '{whole}', .*frozen as a whole: exclude"
        ):
            freeze(model, exclude=part)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert freeze(model, exclude=["layernorm_mlp", "moe"]) == [name for name in WHOLE if name not in (
        "layer.layernorm_mlp", "moe")]  # fmt: skip
    assert isinstance(model.layer.self_attention.layernorm_qkv, FrozenLayerNormLinear)
    assert isinstance(model.layer.self_attention.proj, FrozenLinear)
    assert type(model.moe) is octavo.GroupedLinear


def test_smoothed_channels_and_the_root_are_refused_with_the_remedy() -> None:
    model = nn.Sequential(octavo.LayerNormMLP(32, 48, activation="swiglu", smooth_swiglu=True))
    with pytest.raises(ValueError, match=r"'0' measures the scales of its channels.*smooth_swiglu to False"):
        freeze(model)
    model[0].smooth_swiglu = False
    assert freeze(model) == ["0"]
    with pytest.raises(ValueError, match="the model is itself a linear layer"):
        freeze(octavo.LayerNormMLP(32, 48))


class Doubled(octavo.LayerNormMLP):
    def forward(self, x: Tensor, **options: Any) -> Any:
        return 2 * super().forward(x, **options)


def test_layers_with_a_forward_of_their_own_and_tied_parts_stay() -> None:
    tied, other = octavo.LayerNormLinear(32, 32), octavo.LayerNormLinear(32, 32)
    other.weight = tied.weight
    model = nn.Sequential(Doubled(32, 48), tied, other, octavo.LayerNormLinear(32, 32))
    assert freeze(model) == ["3"]
    with pytest.warns(UserWarning, match=r"0: Doubled has a forward of its own; 1: its weight is tied"):
        freeze(model)


@pytest.mark.parametrize("how", ["converted", "unconverted", "FP8 alone"])
def test_from_whatever_a_layer_was(how: str) -> None:
    """A converted layer freezes as it is; unconvert and convert have nothing to do with a frozen one."""
    if how == "FP8 alone":
        with octavo.quantized_init():
            model = nn.Sequential(octavo.LayerNormMLP(32, 48), octavo.LayerNormLinear(32, 48))
        plain = nn.Sequential(octavo.LayerNormMLP(32, 48), octavo.LayerNormLinear(32, 48))
        plain.load_state_dict(octavo.state_dict(model), strict=True)
    else:
        model = nn.Sequential(octavo.LayerNormMLP(32, 48), octavo.LayerNormLinear(32, 48))
        plain = copy.deepcopy(model)
        octavo.convert(model, RowwiseScaling())
        if how == "unconverted":
            octavo.unconvert(model)
    assert freeze(model) == freeze(plain) == ["0", "1"]
    x = torch.randn(4, 32)
    y = model(x)
    assert torch.equal(y, plain(x))
    octavo.unconvert(model)
    with pytest.warns(UserWarning, match="NOTHING WAS CONVERTED: its 2 linear layers are frozen already"):
        octavo.convert(model)
    assert all(isinstance(layer, FrozenLayer) for layer in model)
    assert torch.equal(model(x), y)


# --- generation


@pytest.fixture
def example() -> Iterator[Any]:
    folder = str(Path(__file__).resolve().parents[2] / "examples")
    sys.path.insert(0, folder)
    try:
        import gpt_generation

        yield gpt_generation
    finally:
        sys.path.remove(folder)
        sys.modules.pop("gpt_generation", None)


def test_a_gpt_generates_the_tokens_of_the_unfrozen_layers(example: Any, tmp_path: Path) -> None:
    model = example.GPT().eval()
    texts = [example.batch("cpu")[:, :-1] for _ in range(2)]
    scales = {name: scale for name, scale in calibrate(model, texts).items() if name != "head"}
    unfrozen = with_static_scales(copy.deepcopy(model), scales)
    names = freeze(model, "tensor_static", input_scales=scales, exclude="head")
    assert len(names) == 3 * example.LAYERS
    with torch.no_grad():
        assert torch.equal(model(texts[0]), unfrozen(texts[0]))
        written = example.write(model, "the quick", 5, "cpu", cached=True)
        assert written == example.write(unfrozen, "the quick", 5, "cpu", cached=True)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "served.safetensors")
    served = example.GPT().eval()
    freeze(served, "tensor_static", input_scales=dict.fromkeys(scales, 1.0), exclude="head")
    served.load_state_dict(safetensors.torch.load_file(tmp_path / "served.safetensors"), strict=True)
    assert example.write(served, "the quick", 5, "cpu", cached=True) == written


def test_micro_batch_flags_of_the_layers_they_stand_for_are_taken() -> None:
    model, x = Model(), batch()
    freeze(model)
    assert torch.equal(model.layer(x, cached_weight="refresh"), model.layer(x))
    assert torch.equal(model.moe(x, SPLITS, cached_weight="reuse"), model.moe(x, SPLITS))


def test_layers_of_transformer_engines_names() -> None:
    from octavo.compat.transformer_engine import pytorch as te

    model = nn.ModuleList([
        te.TransformerLayer(32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0, device="cpu"),
        te.LayerNormMLP(32, 48, return_bias=True, device="cpu"), te.GroupedLinear(2, 32, 32, device="cpu"),
        te.LayerNormLinear(32, 48, parameters_split=["a", "b"], device="cpu"),
    ]).eval()  # fmt: skip
    x = torch.randn(5, 2, 32)
    with torch.no_grad():
        exact = model[0](x, is_first_microbatch=True)
    names = freeze(model)
    attention = ["0.self_attention.layernorm_qkv", "0.self_attention.proj"]
    assert names == [*attention, "0.layernorm_mlp", "2", "3"], "what hands its bias out stays"
    assert sqnr_db(exact, model[0](x, is_first_microbatch=False)) > 25


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", NAMES)
def test_on_fp8_units(scheme: str) -> None:
    model, x = Model().to(BF16).eval(), batch(BF16)
    freeze(model, scheme, input_scales=calibrated(model, x) if scheme == "tensor_static" else None)
    reference = model(x)
    y = model.cuda()(x.cuda()).cpu()
    # Twice an output rounding of 2^-8 in each of seven products, and neighbouring codes of norms: below 2^-4.
    assert (y.float() - reference.float()).norm() <= 2.0**-4 * reference.float().norm()


@pytest.mark.gpu
def test_on_a_gpu_the_device_alone_knows_the_sizes() -> None:
    model, x = Experts().to(BF16).cuda(), torch.randn(10, 32, device="cuda").to(BF16)
    freeze(model, "tensor_static", input_scales=calibrated(model, x))
    by_host = model.moe(x, SPLITS)
    by_device = model.moe(x, torch.tensor(SPLITS, device="cuda"))
    assert (by_host.float() - by_device.float()).norm() <= 2.0**-7 * by_host.float().norm()
