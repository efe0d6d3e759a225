"""nn.TransformerEncoder's fused inference path is left while its Linears are FP8, padded batches included."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import octavo
from octavo.recipes import CurrentScaling


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


def masked(model: nn.TransformerEncoder, x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(x.shape[:2], dtype=torch.bool)
    mask[1, 3:] = True
    with torch.no_grad(), warnings.catch_warnings():
        # torch says that nested tensors are a prototype, of its own use of them.
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
        return model(x, src_key_padding_mask=mask)


def test_a_padded_batch_runs_in_fp8_under_no_grad() -> None:
    model, x = encoder(), torch.randn(2, 5, 32)
    before = masked(model, x)
    octavo.convert(model, CurrentScaling())
    with octavo.count_gemms() as count:
        after = masked(model, x)
    assert count.fp8 == 4
    kept = torch.ones(2, 5, dtype=torch.bool)
    kept[1, 3:] = False
    # Two E4M3 products a layer, 3.6 % each of what they add to the residual: well below 5 % of the whole.
    assert (after - before)[kept].norm() < 0.05 * before[kept].norm()
    assert not torch.equal(after[kept], before[kept])


@pytest.mark.parametrize("times", [1, 2])
def test_unconvert_puts_the_path_back(times: int) -> None:
    model, x = encoder(), torch.randn(2, 5, 32)
    before = masked(model, x)
    for _ in range(times):
        octavo.convert(model, CurrentScaling())
    octavo.unconvert(model)
    assert model.use_nested_tensor
    assert all(layer.activation_relu_or_gelu == 1 for layer in model.layers)
    assert torch.equal(masked(model, x), before)


def test_a_printed_model_shows_which_layers_are_fp8() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    octavo.convert(model, CurrentScaling(), exclude=["1"])
    lines = str(model).splitlines()
    assert "recipe=CurrentScaling" in lines[1]
    assert "recipe" not in lines[2]
