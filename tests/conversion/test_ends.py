"""convert(high_precision_ends=...): which blocks stay, how they are counted, and what else is said of them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.conversion.known_models import MODELS, loss_of
from torch import Tensor, nn

import octavo
from octavo.recipes import CurrentScaling, DelayedScaling

# The list of blocks, and how many linear layers a block has.
BLOCKS = {"GPT-2": ("transformer.h", 4), "Llama": ("model.layers", 7), "ViT": (None, 6)}


def block_of(name: str) -> int | None:
    """The number in `model.layers.3.mlp`."""
    found = re.search(r"\.(\d+)\.", name)
    return None if found is None else int(found[1])


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.attention = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.attention(x))


class Stage(nn.Module):
    """Blocks, and at its end, but for the last stage, a layer of its own."""

    def __init__(self, blocks: int, last: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.downsample = None if last else nn.Linear(16, 16)


class Experts(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.attention = nn.Linear(16, 16)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)) for _ in range(experts))


def kept(report: octavo.ConversionReport) -> list[str]:
    return [row.name for row in report.skipped if "high_precision_ends" in row.reason]


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_known_models_are_counted_and_the_ends_stay(name: str) -> None:
    where, per_block = BLOCKS[name]
    model = MODELS[name](layers=4)
    before = {n: type(m) for n, m in model.named_modules()}
    report = octavo.convert(model, filter="all", high_precision_ends=(1, 2))
    blocks = {block_of(n) for n in kept(report)}
    assert blocks == {0, 2, 3}
    assert len(kept(report)) == 3 * per_block
    assert {block_of(row.name) for row in report.converted} - {None} == {1}
    # Layers that are in no block are treated as without the argument.
    outside = [row for row in report.layers if block_of(row.name) is None]
    assert outside
    assert all(row.converted for row in outside)
    if where is not None:
        first = next(row for row in report.skipped if block_of(row.name) == 0)
        assert first.reason == f"high_precision_ends=(1, 2): block 1 of the 4 of {where}"
    # What stays is untouched, structures that would be fused included.
    for n, module in model.named_modules():
        if block_of(f"{n}.") in blocks:
            assert type(module) is before[n], n
    fused = {block_of(f"{one.name}.") for one in report.fused if one.parts != ("loss",)}
    assert 1 in fused
    assert not fused & blocks
    with octavo.count_gemms() as counted:
        loss_of(model).backward()
    layers = {block_of(entry[0]) for entry in counted.entries}
    assert layers - {None} == {1}
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters() if p.requires_grad)


def test_one_number_stands_for_both_ends_and_a_list_for_a_pair() -> None:
    reports = [octavo.convert(MODELS["Llama"](layers=3), high_precision_ends=ends) for ends in (1, (1, 1), [1, 1])]
    assert [kept(one) for one in reports] == [kept(reports[0])] * 3
    assert {block_of(name) for name in kept(reports[0])} == {0, 2}


def test_one_end_alone() -> None:
    model = nn.ModuleList(Block() for _ in range(3))
    assert {n.split(".")[0] for n in kept(octavo.convert(model, high_precision_ends=(0, 1)))} == {"2"}
    model = nn.ModuleList(Block() for _ in range(3))
    assert {n.split(".")[0] for n in kept(octavo.convert(model, high_precision_ends=(1, 0)))} == {"0"}


def test_a_model_without_blocks_is_counted_by_layers() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))
    report = octavo.convert(model, high_precision_ends=(2, 1))
    assert [row.name for row in report.converted] == ["2", "3"]
    assert report.layers[0].reason == "high_precision_ends=(2, 1): layer 1 of the 5 linear layers"


def test_entries_of_a_sequential_that_differ_from_the_most_are_no_blocks() -> None:
    stem, head = nn.Sequential(nn.Linear(16, 16)), nn.Linear(16, 16)
    model = nn.Sequential(stem, Block(), Block(), Block(), nn.ReLU(), head)
    report = octavo.convert(model, high_precision_ends=1)
    assert {row.name for row in report.converted} == {"0.0", "2.attention", "2.mlp.0", "2.mlp.2", "5"}


def test_blocks_of_stages_are_counted_in_one() -> None:
    model = nn.ModuleList([Stage(2, False), Stage(3, False), Stage(1, True)])
    report = octavo.convert(model, high_precision_ends=1)
    assert {name.rsplit(".", 1)[0].removesuffix(".mlp") for name in kept(report)} == {"0.blocks.0", "2.blocks.0"}
    assert next(iter(report.skipped)).reason.endswith("block 1 of the 6 in the stages of the model")
    assert {"0.downsample", "1.downsample"} <= {row.name for row in report.converted}


def test_experts_are_no_blocks_also_where_the_first_block_has_none() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([Block(), Experts(4), Experts(4), Experts(4)])
    report = octavo.convert(model, high_precision_ends=1)
    assert {block_of(name) for name in kept(report)} == {0, 3}
    assert len(kept(report)) == 3 + 9


def test_stacks_side_by_side_have_ends_each() -> None:
    model = nn.ModuleDict({side: nn.ModuleList(Block() for _ in range(3)) for side in ("encoder", "decoder")})
    report = octavo.convert(model, high_precision_ends=1)
    assert {row.name.rsplit(".attention", 1)[0] for row in report.converted if "attention" in row.name} == {
        "encoder.1",
        "decoder.1",
    }


def sharing(places: str) -> nn.ModuleList:
    """Blocks by letters; the same letter is the same block."""
    blocks = {letter: Block() for letter in places}
    return nn.ModuleList(blocks[letter] for letter in places)


@pytest.mark.parametrize(
    ("places", "ends", "stays", "reason"),
    [
        ("abcb", (1, 1), {"0", "1"}, "1 of the 4"),
        ("abcb", (0, 1), {"1"}, "4 of the 4 of the model, shared with block 2"),
        ("abca", (1, 0), {"0"}, "1 of the 4 of the model, shared with block 4"),
        ("abaca", (1, 1), {"0"}, "1 of the 5 of the model, shared with block 3 and 5"),
        ("abbbc", (1, 1), {"0", "4"}, "1 of the 5 of the model"),
    ],
)
def test_a_block_that_stands_in_several_places_counts_in_each_and_stays_if_one_is_at_an_end(
    places: str, ends: Any, stays: set[str], reason: str
) -> None:
    model = sharing(places)
    report = octavo.convert(model, high_precision_ends=ends)
    assert {name.split(".")[0] for name in kept(report)} == stays
    assert report.skipped[0].reason.startswith(f"high_precision_ends={ends}: block {reason}")
    assert type(model[-1].attention) is nn.Linear or ends == (1, 0)
    # A block is one set of layers, wherever it stands.
    assert len(kept(report)) == 3 * len(stays)
    assert len(report.layers) == 3 * len(set(places))


def test_a_layer_that_blocks_share_stays_if_one_of_them_is_at_an_end() -> None:
    model = nn.ModuleList(Block() for _ in range(4))
    model[3].attention = model[1].attention
    report = octavo.convert(model, high_precision_ends=(0, 1))
    assert kept(report) == ["1.attention", "3.mlp.0", "3.mlp.2"]


def test_shared_ends_that_leave_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the 4 blocks of the model \(one that stands in several places counts in"):
        octavo.convert(sharing("abab"), high_precision_ends=1)


def test_one_block_in_all_places_is_counted_by_its_layers() -> None:
    report = octavo.convert(sharing("aaaa"), high_precision_ends=1)
    assert [row.name for row in report.converted] == ["0.mlp.0"]
    assert report.layers[0].reason == "high_precision_ends=(1, 1): layer 1 of the 3 linear layers"


def test_octavos_own_layers_are_blocks_too() -> None:
    model = nn.ModuleList(octavo.TransformerLayer(32, 64, 2) for _ in range(3))
    report = octavo.convert(model, CurrentScaling(), high_precision_ends=1)
    assert {row.name.split(".")[0] for row in report.converted} == {"1"}
    assert {name.split(".")[0] for name in kept(report)} == {"0", "2"}


def test_with_include_exclude_and_overrides() -> None:
    recipe = CurrentScaling(overrides={r"^0\.attention": DelayedScaling(), r"^1\.mlp\.0": None})
    model = nn.ModuleList(Block() for _ in range(4))
    report = octavo.convert(model, recipe, include=["attention", "mlp"], exclude=r"^2\.mlp", high_precision_ends=1)
    reasons = {row.name: row.reason for row in report.skipped}
    # An override cannot bring the end back.
    assert "high_precision_ends" in reasons["0.attention"]
    assert reasons["1.mlp.0"] == "the recipe's overrides keep it in high precision"
    assert reasons["2.mlp.0"] == "excluded by '^2\\\\.mlp'"
    assert [row.name for row in report.converted] == ["1.attention", "1.mlp.2", "2.attention"]
    assert report.unmatched == ()


def test_excluded_blocks_count_all_the_same() -> None:
    model = nn.ModuleList(Block() for _ in range(4))
    report = octavo.convert(model, exclude=r"^0\.", high_precision_ends=1)
    assert {row.name.split(".")[0] for row in report.converted} == {"1", "2"}


def test_an_include_that_names_the_ends_alone_converts_nothing_and_says_so() -> None:
    model = nn.ModuleList(Block() for _ in range(3))
    with pytest.warns(UserWarning, match="NOTHING WAS CONVERTED"):
        octavo.convert(model, include=r"^[02]\.", high_precision_ends=1)


def test_a_dry_run_reports_the_same_and_a_second_conversion_may_take_the_ends_too() -> None:
    model = nn.ModuleList(Block() for _ in range(3))
    planned = octavo.convert(model, high_precision_ends=1, dry_run=True)
    assert [type(m) for m in model.modules() if isinstance(m, nn.Linear)] == [nn.Linear] * 9
    done = octavo.convert(model, high_precision_ends=1)
    assert [(row.name, row.converted, row.reason) for row in planned.layers] == [
        (row.name, row.converted, row.reason) for row in done.layers
    ]
    assert len(octavo.convert(model).converted) == 9


def test_a_model_trains_with_its_ends_in_high_precision() -> None:
    model = nn.Sequential(*(Block() for _ in range(3)))
    octavo.convert(model, DelayedScaling(amax_history_len=4), high_precision_ends=1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    x, target = torch.randn(32, 16), torch.randn(32, 16)
    losses = []
    for _ in range(20):
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        octavo.update_scales(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("ends", [-1, (1, -1), 1.0, True, "1", (1,), (1, 2, 3), None, (1.0, 1)])
def test_what_is_no_count_is_refused(ends: Any) -> None:
    model = nn.ModuleList(Block() for _ in range(3))
    with pytest.raises(ValueError, match=re.escape(f"high_precision_ends is {ends!r}")):
        octavo.convert(model, high_precision_ends=ends)
    assert all(type(m) is nn.Linear for m in model.modules() if isinstance(m, nn.Linear))


@pytest.mark.parametrize("ends", [2, (4, 0), (1, 2), (100, 100)])
def test_ends_that_leave_nothing_are_refused(ends: Any) -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(Block() for _ in range(3))
    with pytest.raises(ValueError, match=r"all of the 3 blocks of layers, and nothing would be left for FP8"):
        octavo.convert(model, high_precision_ends=ends)
