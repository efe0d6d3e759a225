"""docs/layers: the code of the pages on norms and fused layers runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

PAGES = Path(__file__).resolve().parents[2] / "docs" / "layers"


@pytest.mark.parametrize("page", ["norm", "layernorm_linear", "layernorm_mlp"])
def test_the_pages_code_runs(page: str) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (PAGES / f"{page}.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, torch.Tensor] = {}
    exec(block, names)
    assert bool(names["y"].isfinite().all())
