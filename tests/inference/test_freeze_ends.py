"""freeze(high_precision_ends=...): the blocks that `convert` would leave, left."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.conversion.known_models import MODELS
from torch import Tensor, nn

import octavo
from octavo.inference import FrozenLinear, calibrate, freeze
from octavo.recipes import CurrentScaling


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.fc1(x).relu())


def stack(blocks: int = 4) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(blocks))).eval()


def at_ends(left: tuple[Any, ...]) -> dict[str, str]:
    return {layer.name: layer.reason for layer in left if "high_precision_ends" in layer.reason}


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "ViT"])
@pytest.mark.parametrize("ends", [1, (0, 2)])
def test_the_layers_that_convert_would_leave_stay_as_they_are(name: str, ends: Any) -> None:
    report = octavo.convert(MODELS[name](layers=4), filter="all", high_precision_ends=ends, dry_run=True)
    expected = {row.name: row.reason for row in report.skipped if "high_precision_ends" in row.reason}
    model = MODELS[name](layers=4).eval()
    before = {n: type(m) for n, m in model.named_modules()}
    frozen = freeze(model, high_precision_ends=ends)
    assert at_ends(frozen.left) == expected
    assert expected
    for n, module in model.named_modules():
        assert not any(n == one for one in expected) or type(module) is before[n]
    for n in frozen:
        assert isinstance(model.get_submodule(n), FrozenLinear)
    assert not set(frozen) & set(expected)


def test_what_stays_computes_in_the_models_own_precision() -> None:
    model, x = stack(), torch.randn(8, 32)
    first, last = model[0](x), model[3](x)
    freeze(model, high_precision_ends=1)
    assert torch.equal(model[0](x), first)
    assert torch.equal(model[3](x), last)
    with octavo.count_gemms() as counted:
        model(x)
    assert set(counted.by_layer()) == {"1.fc1", "1.fc2", "2.fc1", "2.fc2"}


def test_static_scales_are_asked_of_the_blocks_between_alone() -> None:
    model, x = stack(), torch.randn(8, 32)
    scales = {name: scale for name, scale in calibrate(model, [x]).items() if name[0] in "12"}
    assert freeze(model, "tensor_static", input_scales=scales, high_precision_ends=1) == list(scales)


def test_it_goes_with_exclude() -> None:
    report = freeze(stack(), exclude=r"^[01]\.fc2", high_precision_ends=(1, 0))
    assert list(report) == ["1.fc1", "2.fc1", "2.fc2", "3.fc1", "3.fc2"]
    reasons = {layer.name: layer.reason for layer in report.left}
    assert reasons["0.fc1"] == "high_precision_ends=(1, 0): block 1 of the 4 of the model"
    assert reasons["0.fc2"].startswith("excluded by")


def test_an_end_that_was_converted_stays_so_and_the_report_says_so() -> None:
    model = stack(3)
    octavo.convert(model, CurrentScaling(), filter="all")
    report = freeze(model, high_precision_ends=1)
    assert list(report) == ["1.fc1", "1.fc2"]
    assert isinstance(model[0].fc1, octavo.Linear)
    assert all(
        reason.endswith("but it was converted before: octavo.unconvert turns it back")
        for reason in at_ends(report.left).values()
    )
    assert len(at_ends(report.left)) == 4
    octavo.unconvert(model)
    assert type(model[0].fc1) is nn.Linear
    # What was not converted is not said to have been.
    model = stack(3)
    octavo.convert(model, CurrentScaling(), filter="all", high_precision_ends=1)
    assert not any("converted before" in layer.reason for layer in freeze(model, high_precision_ends=1).left)


MADE: dict[str, Callable[[], nn.Module]] = {
    "GPT-2": lambda: MODELS["GPT-2"](layers=6),
    "Llama": lambda: MODELS["Llama"](layers=6),
    "blocks": lambda: stack(6),
    "MLPs of Octavo's": lambda: nn.Sequential(*(octavo.LayerNormMLP(16, 32) for _ in range(6))),
    "experts": lambda: nn.ModuleList(octavo.GroupedLinear(2, 16, 32) for _ in range(6)),
    "MLPs that are fused": lambda: nn.Sequential(
        *(block.mlp for block in MODELS["GPT-2"](layers=6).transformer.h)  # type: ignore[attr-defined]
    ),
    "layers": lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))),
}


@pytest.mark.parametrize("made", MADE)
def test_what_is_frozen_already_counts(made: str) -> None:
    # The same once more changes nothing.
    model = MADE[made]().eval()
    first = freeze(model, high_precision_ends=1)
    with pytest.warns(UserWarning, match=r"replaced nothing: .* of the 6 "):
        second = freeze(model, high_precision_ends=1)
    assert second == []
    assert at_ends(second.left) == at_ends(first.left)
    # What is left between ends that are frozen is no end.
    model = MADE[made]().eval()
    ends = freeze(model, exclude=[rf"^{re.escape(name)}($|\.)" for name in first])
    assert set(at_ends(first.left)) <= set(ends)
    assert freeze(model, high_precision_ends=1) == first


def test_convert_counts_what_is_frozen_too() -> None:
    model = stack(6)
    freeze(model, exclude=r"^[1-4]\.")
    report = octavo.convert(model, CurrentScaling(), filter="all", high_precision_ends=1)
    assert {row.name[0] for row in report.converted} == set("1234")


@pytest.mark.parametrize("ends", [-1, True, (1,), None])
def test_what_is_no_count_is_refused(ends: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"high_precision_ends is {ends!r}")):
        freeze(stack(), high_precision_ends=ends)


def test_ends_that_leave_nothing_are_refused_and_nothing_is_changed() -> None:
    model = stack()
    with pytest.raises(ValueError, match="all of the 4 blocks of the model, and nothing would be left for FP8"):
        freeze(model, high_precision_ends=2)
    assert not any(isinstance(module, FrozenLinear) for module in model.modules())


def test_an_end_inside_of_a_layer_that_is_frozen_as_a_whole_is_refused_with_the_reason() -> None:
    model = nn.ModuleDict({"a": octavo.LayerNormMLP(16, 32), "b": octavo.LayerNormMLP(16, 32)})
    reason = r"high_precision_ends=\(1, 0\): layer 1 of the 4 linear layers"
    message = rf"leaves out 'a.fc1', a part of 'a', a LayerNormMLP \({reason}\), .*frozen as a whole: exclude"
    with pytest.raises(ValueError, match=message):
        freeze(model, high_precision_ends=(1, 0))
    assert freeze(model, high_precision_ends=(2, 0)) == ["b"]
