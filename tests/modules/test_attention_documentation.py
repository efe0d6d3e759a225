"""The code in the pages of the attention layers runs from top to bottom, and says what the comments beside it say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGES = Path(__file__).resolve().parents[2] / "docs" / "layers"


def ran(name: str) -> dict[str, Any]:
    blocks = re.findall(r"^```python\n(.*?)^```", (PAGES / f"{name}.md").read_text(encoding="utf-8"), re.S | re.M)
    assert blocks
    names: dict[str, Any] = {}
    exec("\n".join(blocks), names)
    return names


def test_dot_product_attention(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("dot_product_attention")["o"].shape == (4, 128, 512)
    assert "scaled_dot_product_attention" in capsys.readouterr().out


def test_multihead_attention() -> None:
    names = ran("multihead_attention")
    assert names["x"].grad.isfinite().all()
    assert names["y"].shape == names["x"].shape


def test_transformer_layer() -> None:
    names = ran("transformer_layer")
    assert names["x"].grad.isfinite().all()
    # Post-norm: every token that leaves the layer has mean 0 and variance 1.
    y = names["y"].detach()
    assert torch.allclose(y.var(-1, correction=0), torch.ones(4, 128), atol=1e-3)


def test_kv_cache() -> None:
    names = ran("kv_cache")
    cache, first = names["cache"], names["layers"][0].self_attention.core_attention
    assert cache.lengths(first, 3) == (14, 0, 12)
    # Twelve pages; the first and the third sequence have one each.
    assert cache.num_free_pages == 10
