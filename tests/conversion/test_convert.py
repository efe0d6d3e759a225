"""convert and unconvert: layers change class in place, and the report tells the truth."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from tests.measures import relative_error
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import octavo
from octavo.recipes import CurrentScaling, DelayedScaling, RowwiseScaling


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


class KeepsForward(nn.Linear):
    """A subclass that computes as nn.Linear does."""

    tag = "kept"


class OwnForward(nn.Linear):
    """A subclass that does not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


# --- case 7


@pytest.mark.parametrize(("features", "rows"), [((767, 3072), 5), ((128, 133), 7), ((64, 3), 3), ((1, 1), 1)])
def test_case_7_any_feature_count(features: tuple[int, int], rows: int) -> None:
    """Case 7: where FP8 is emulated everything converts, and is right."""
    layer, x = nn.Linear(*features), torch.randn(rows, features[0])
    exact = layer(x).detach()
    report = octavo.convert(layer)
    assert [row.converted for row in report.layers] == [True]
    with octavo.count_gemms() as counted:
        y = layer(x)
        y.sum().backward()
    assert counted.fp8 == 2
    # Each operand is off by 1/16 of itself at most (half of E4M3's step at 1), a product by 2/16 + 1/256; what lies
    # below the normal numbers, by half a subnormal step of its scale, amax / M * 2^-10, times the other operand.
    weight = layer.weight.detach()
    magnitude = x.abs() @ weight.abs().t()
    floor = 2.0**-10 / octavo.E4M3.max * features[0] * x.abs().max() * weight.abs().max() * 2.2
    assert bool(((y - exact).abs() <= magnitude * (2 / 16 + 1 / 256) + floor).all())
    assert bool(layer.weight.grad.isfinite().all())


def test_case_7_a_skipped_layer_names_the_violated_rule_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 7: as on a device with FP8 units, where padding or casts would cost more than FP8 gains."""
    monkeypatch.setattr("octavo.conversion.selection.device_reasons", lambda device: [])
    model = nn.ModuleDict({"odd_in": nn.Linear(767, 3072), "odd_out": nn.Linear(3072, 133), "small": nn.Linear(64, 64)})
    model["large"] = nn.Linear(4096, 4096, device="meta")
    report = octavo.convert(model)
    reasons = {row.name: row.reason for row in report.layers}
    assert reasons["odd_in"] == "in_features = 767 is no multiple of 16: each call would pad"
    assert reasons["odd_out"] == "out_features = 133 is no multiple of 16: each call would pad"
    assert reasons["small"].startswith("FP8 would slow it down: expected 0.")
    assert [row.name for row in report.converted] == ["large"]
    assert len(octavo.convert(model, filter="all").converted) == 4


# --- case 21


def test_case_21_everything_of_a_layer_is_kept() -> None:
    """Case 21: dtype, device, requires_grad, hooks, training flag, subclass, keys, and an optimizer built before."""
    model = nn.Sequential(
        nn.Linear(16, 32).bfloat16(), KeepsForward(32, 16).bfloat16(), nn.Linear(16, 4, bias=False).bfloat16()
    )
    model[1].weight.requires_grad_(False)
    model[1].eval()
    model[1].note = "an attribute"
    seen: list[str] = []
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model[0].weight.register_hook(lambda gradient: seen.append("gradient"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    keys, parameters = list(model.state_dict()), list(model.parameters())
    modules = list(model.modules())

    octavo.convert(model, CurrentScaling())

    assert list(model.modules()) == modules, "the same objects"
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert {p.dtype for p in parameters} == {torch.bfloat16}
    assert not model[1].weight.requires_grad
    assert (model[0].training, model[1].training) == (True, False)
    assert isinstance(model[0], octavo.Linear)
    assert isinstance(model[1], KeepsForward)
    assert (model[1].tag, model[1].note) == ("kept", "an attribute")
    before = model[0].weight.detach().clone()
    model(torch.randn(8, 16).bfloat16()).sum().backward()
    optimizer.step()
    assert seen == ["forward", "gradient"]
    assert not torch.equal(model[0].weight, before)


MEMORY = """
import resource, sys, torch, octavo
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(64)))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
octavo.convert(model, octavo.recipes.DelayedScaling())
octavo.unconvert(model)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_case_21_peak_memory() -> None:
    """Case 21: converting 256 MiB of weights and back takes less than 0.3 of them beside; it copies none."""
    environment = {"PYTHONPATH": str(Path(octavo.__file__).parent.parent), "PATH": "", "HOME": str(Path.home())}
    result = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(result.stdout) * unit < 0.3 * 64 * 4 * 1024**2


# --- case 22


def test_case_22_a_pattern_that_matches_nothing_is_loud() -> None:
    """Case 22: of include and of exclude, and a filter that says no to all."""
    with pytest.warns(UserWarning, match="NOTHING WAS CONVERTED"):
        report = octavo.convert(network(), filter=lambda module, name: False)
    assert {row.reason for row in report.skipped} == {"the filter said no"}
    with pytest.warns(UserWarning, match="the pattern 'lm_head' matched no linear layer"):
        report = octavo.convert(network(), exclude=["lm_head"])
    assert report.unmatched == ("lm_head",)
    assert len(report.converted) == 2
    with pytest.warns(UserWarning, match=r"octavo\.convert") as caught:
        report = octavo.convert(network(), include="blocks")
    assert len(caught) == 2
    assert str(report).startswith("! NOTHING WAS CONVERTED\n! the pattern 'blocks' matched no linear layer")


def test_case_22_a_model_without_linear_layers() -> None:
    """Case 22: a warning, never a crash; nor do norms without weight or bias matter."""
    model = nn.Sequential(nn.LayerNorm(8, elementwise_affine=False), nn.LayerNorm(8, bias=False), nn.Conv2d(1, 1, 1))
    with pytest.warns(UserWarning, match="the model has no linear layers"):
        report = octavo.convert(model)
    assert report.layers == ()
    assert "0 of 0 layers converted" in str(report)
    model.append(nn.Linear(8, 8))
    assert len(octavo.convert(model).converted) == 1
    octavo.unconvert(nn.ReLU())


def test_case_22_converting_twice() -> None:
    """Case 22: the second conversion gives another recipe; what it leaves out stays, and says so."""
    model = network()
    octavo.convert(model, CurrentScaling())
    first = copy.deepcopy(model.state_dict())
    report = octavo.convert(model, RowwiseScaling())
    assert [row.recipe for row in report.converted] == ["RowwiseScaling"] * 2
    assert [type(layer.recipe) for layer in (model[0], model[2])] == [RowwiseScaling] * 2
    assert list(model.state_dict()) == list(first)
    report = octavo.convert(model, CurrentScaling(), exclude="^0$")
    row = report.layers[0]
    assert (row.converted, row.recipe) == (True, "RowwiseScaling"), "it does run in FP8"
    assert row.reason == "excluded by '^0$', but it was converted before: octavo.unconvert turns it back"
    report = octavo.convert(model, CurrentScaling(overrides={"^0$": None}))
    assert not report.layers[0].converted
    x = torch.randn(4, 32)
    assert torch.equal(model[0](x), nn.functional.linear(x, model[0].weight, model[0].bias)), "and so it is"


def test_case_22_tied_weights_stay_tied() -> None:
    """Case 22: a head tied to the embedding, two layers tied to each other, one module in two places."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(64, 32)
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
            self.again = self.a
            self.b.weight = self.a.weight
            self.head = nn.Linear(32, 64, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.again(self.b(self.a(self.embedding(tokens)))))

    model = Tied()
    report = octavo.convert(model, DelayedScaling(amax_history_len=4))
    assert [row.name for row in report.layers] == ["a", "b", "head"]
    for _ in range(2):
        model(torch.arange(16)).sum().backward()
        octavo.update_scales(model)
    assert model.head.weight is model.embedding.weight
    assert model.b.weight is model.a.weight
    assert model.again is model.a
    octavo.unconvert(model)
    assert model.head.weight is model.embedding.weight
    assert type(model.again) is nn.Linear


# --- what is converted, and why not


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (OwnForward(16, 16), "OwnForward has a forward of its own"),
        (nn.Linear(16, 16).double(), "its weight is torch.float64: an FP8 layer takes float32, bfloat16 or float16"),
        (weight_norm(nn.Linear(16, 16)), "its weight is parametrized: it is computed, not stored"),
        (nn.LazyLinear(16), "its weight has no shape yet: run one forward first"),
        (nn.MultiheadAttention(16, 2).out_proj, None),
    ],
)
def test_what_cannot_be_converted_says_why(layer: nn.Module, reason: str | None) -> None:
    model = nn.ModuleList([layer, nn.Linear(16, 16)])
    report = octavo.convert(model, filter="all")
    assert report.layers[0].converted is (reason is None)
    assert report.layers[0].reason == (reason or "")
    assert report.layers[1].converted


def test_a_forward_replaced_on_the_instance_is_left_alone() -> None:
    model = network()
    model[0].forward = lambda x: x
    assert octavo.convert(model).layers[0].reason == "its forward was replaced on the instance"


def test_attention_reads_its_out_projection_without_calling_it() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 2), "linear": nn.Linear(16, 16)})
    report = octavo.convert(model)
    assert report.layers[0].reason == "nn.MultiheadAttention reads its weight and never calls it"
    assert type(model["attention"].out_proj) is not octavo.Linear
    x = torch.randn(3, 2, 16)
    model["attention"](x, x, x)


@pytest.mark.parametrize("training", [True, False])
def test_a_transformer_encoder_runs_in_fp8_in_evaluation_too(training: bool) -> None:
    """Its fused inference path would read the weights and never call the layers."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    plain = copy.deepcopy(model)
    report = octavo.convert(model)
    assert len(report.converted) == 4
    assert "the fused inference path is off" in str(report)
    model.train(training)
    plain.train(training)
    x = torch.randn(2, 8, 32)
    with torch.no_grad(), octavo.count_gemms() as counted:
        y = model(x)
    assert counted.fp8 == 4
    assert 0 < relative_error(plain(x), y) < 0.05
    octavo.unconvert(model)
    with torch.no_grad(), octavo.count_gemms() as counted:
        assert torch.equal(model(x), plain(x))
    assert counted.entries == {}


def test_a_compiled_pattern_is_one_pattern() -> None:
    report = octavo.convert(network(), include=re.compile("[02]"), exclude=re.compile("2"), filter="all")
    assert [row.name for row in report.converted] == ["0"]


def test_include_exclude_filter_and_names() -> None:
    model = nn.Sequential(network(), network(), nn.Linear(32, 8))
    report = octavo.convert(model, include=[r"^0\.", r"^2$"], exclude=r"\.2$")
    assert [row.name for row in report.converted] == ["0.0", "2"]
    assert {row.name: row.reason for row in report.skipped} == {
        "0.2": r"excluded by '\\.2$'",
        "1.0": "no include pattern matches",
        "1.2": "no include pattern matches",
    }
    model = network()
    report = octavo.convert(model, filter=lambda module, name: module.in_features == 64)
    assert [row.name for row in report.converted] == ["2"]
    assert model[2].layer_name == "2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"include": "("}, "include pattern '\\(' is no regular expression"),
        ({"exclude": [3]}, "exclude pattern 3 is no regular expression"),
        ({"include": b"a"}, "include pattern b'a' is no regular expression"),
        ({"exclude": [re.compile(b"a")]}, r"exclude pattern re.compile\(b'a'\) is no regular expression"),
        ({"filter": "most"}, "filter is 'most': expected None, 'all'"),
        ({"recipe": "fp8"}, "recipe is 'fp8': expected one of"),
    ],
)
def test_wrong_arguments_change_nothing(arguments: dict, message: str) -> None:
    model = network()
    with pytest.raises(ValueError, match=message):
        octavo.convert(model, **arguments)
    assert type(model[0]) is nn.Linear


def test_a_dry_run_changes_nothing() -> None:
    model = nn.Sequential(network(), nn.TransformerEncoderLayer(32, 4, 64))
    before = {name: (type(module), set(vars(module))) for name, module in model.named_modules()}
    report = octavo.convert(model, dry_run=True)
    assert len(report.converted) == 4
    assert "would be converted" in str(report)
    assert {name: (type(module), set(vars(module))) for name, module in model.named_modules()} == before


def test_overrides_reach_the_layers_by_name() -> None:
    model = network()
    report = octavo.convert(model, CurrentScaling(overrides={"^0$": RowwiseScaling(), "^2$": None}))
    assert [(row.converted, row.recipe) for row in report.layers] == [(True, "RowwiseScaling"), (False, "")]
    assert report.layers[1].reason == "the recipe's overrides keep it in high precision"
    assert type(model[2]) is nn.Linear


def test_an_override_whose_pattern_matches_no_layer_is_loud() -> None:
    recipe = CurrentScaling(overrides={"^0$": RowwiseScaling(), r"blocks\.3": None})
    with pytest.warns(UserWarning, match=r"the pattern 'blocks\\\\\.3' matched no linear layer"):
        report = octavo.convert(network(), recipe, exclude="^2$")
    assert report.unmatched == (r"blocks\.3",)


def test_a_linear_itself_is_converted() -> None:
    layer = nn.Linear(32, 16)
    report = octavo.convert(layer)
    assert isinstance(layer, octavo.Linear)
    assert "(root)" in str(report)


def test_the_report_is_data_and_a_table() -> None:
    model = nn.Sequential(nn.Linear(32, 64), OwnForward(64, 32))
    report = octavo.convert(model)
    row = report.converted[0]
    assert (row.name, row.kind, row.in_features, row.out_features, row.recipe) == (
        "0",
        "Linear",
        32,
        64,
        "CurrentScaling",
    )
    lines = str(report).splitlines()
    assert lines[0].split()[:3] == ["layer", "kind", "in"]
    assert lines[2].split()[:5] == ["0", "Linear", "32", "64", "yes"]
    assert lines[3].split()[:5] == ["1", "OwnForward", "64", "32", "no"]
    assert "1 of 2 layers converted, on cpu." in lines
    assert "FP8 is emulated here, with the same numbers." in lines
    [gain] = [line for line in lines if line.startswith("gain: ")]
    assert gain == (
        "gain: estimated, not measured: how many times as fast as bf16, forward and backward, on an H200 with many"
        " tokens; below 1x is slower."
    )


def test_nothing_is_warned_about_when_all_went_well() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        octavo.convert(network(), CurrentScaling(), include=r"\d", exclude="^2$")


def test_what_is_no_module_is_told_so() -> None:
    for function in (octavo.convert, octavo.unconvert, octavo.freeze):
        with pytest.raises(TypeError, match=rf"{function.__name__}: model is a list: expected an nn\.Module"):
            function([1])
        with pytest.raises(TypeError, match=r"model is Linear, a class: expected an nn\.Module"):
            function(nn.Linear)
    with pytest.raises(TypeError, match="quantize needs a tensor, found a list"):
        octavo.quantize([1.0], octavo.E4M3)
