"""docs/layers: the code of the pages on Linear, norms and fused layers runs; Linear is as close as its page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tests.measures import sqnr_db
from torch import Tensor

import octavo
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, Recipe, RowwiseScaling

PAGES = Path(__file__).resolve().parents[2] / "docs" / "layers"


@pytest.mark.parametrize("page", ["linear", "norm", "layernorm_linear", "layernorm_mlp"])
def test_the_pages_code_runs(page: str) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (PAGES / f"{page}.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, torch.Tensor] = {}
    exec(block, names)
    assert bool(names["y"].isfinite().all())


# How close, in the page's words.
LINEAR = {
    "`DelayedScaling`, `CurrentScaling`": (DelayedScaling(initialise_from_first_batch=True), CurrentScaling()),
    "`CurrentScaling(format=E4M3)`": (CurrentScaling(format=octavo.E4M3),),
    "`RowwiseScaling`, `BlockScaling`, `MXFP8Scaling`": (RowwiseScaling(), BlockScaling(), MXFP8Scaling()),
}


@pytest.mark.parametrize("row", LINEAR)
def test_a_linear_is_as_close_as_its_page_says(row: str) -> None:
    page = (PAGES / "linear.md").read_text(encoding="utf-8")
    (figures,) = re.findall(rf"^\| {re.escape(row)} \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.M)
    layer, x, dy = octavo.Linear(256, 384), torch.randn(512, 256), torch.randn(512, 384)
    torch.nn.init.normal_(layer.weight)

    def run(recipe: Recipe | None) -> tuple[Tensor, ...]:
        leaf = x.clone().requires_grad_()
        with octavo.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(leaf)
        return y, *torch.autograd.grad(y, [leaf, layer.weight], dy)

    exact = run(None)
    for recipe in LINEAR[row]:
        for found, reference, figure in zip(run(recipe), exact, figures, strict=True):
            # The page's figure is rounded to 0.1; 131,072 values or more move it by less than 0.1.
            assert abs(sqnr_db(reference, found) - float(figure)) < 0.5
