"""However a weight comes to hold other values, its old codes and scales do not serve it."""

from __future__ import annotations

import pytest
import torch

import octavo
from octavo.recipes import CurrentScaling, DelayedScaling


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_step_makes_cached_codes_stale(kind: type[torch.optim.Optimizer], fused: bool) -> None:
    layer, x = octavo.Linear(32, 32, recipe=CurrentScaling()), torch.randn(8, 32)
    layer(x, cached_weight="refresh").square().sum().backward()
    kind(layer.parameters(), lr=0.5, fused=fused).step()
    assert torch.equal(layer(x, cached_weight="reuse"), layer(x))


def test_a_fused_optimizers_steps_without_updates_are_noticed() -> None:
    layer = octavo.Linear(32, 32, recipe=DelayedScaling())
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)

    def train() -> None:
        for _ in range(5):
            layer(torch.randn(8, 32)).square().sum().backward()
            optimizer.step()

    with pytest.warns(UserWarning, match="update_scales"):
        train()


def test_codes_are_reused_while_nothing_changes() -> None:
    layer, x = octavo.Linear(32, 32, recipe=CurrentScaling()), torch.randn(8, 32)
    layer(x, cached_weight="refresh")
    before = layer._weight_cache
    layer(x, cached_weight="reuse")
    assert layer._weight_cache is before


def test_a_plain_checkpoint_of_a_weight_under_another_name_brings_new_scales() -> None:
    layer, x = torch.nn.utils.parametrizations.weight_norm(octavo.Linear(32, 32)), torch.randn(8, 32)
    recipe = DelayedScaling()
    for _ in range(2):
        with octavo.autocast(recipe=recipe):
            layer(x).sum().backward()
    plain = {k: v * 5000 if k.endswith("original0") else v for k, v in octavo.state_dict(layer).items()}
    layer.load_state_dict(plain)
    exact = torch.nn.functional.linear(x, layer.weight, layer.bias)
    with octavo.autocast(recipe=recipe):
        y = layer(x)
    # 3.6 % of two E4M3 operands; the old scales would leave nearly nothing.
    assert (y - exact).norm() < 0.05 * exact.norm()


def test_an_fp8_weight_moves_and_halves_with_codes_in_the_cache() -> None:
    with octavo.quantized_init():
        layer = octavo.Linear(32, 32, recipe=CurrentScaling())
    layer(torch.randn(8, 32), cached_weight="refresh")
    assert layer.half().weight.dtype == torch.float16
