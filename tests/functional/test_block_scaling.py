"""Linear under BlockScaling: its products by hand, its accuracy as derived, what one outlier costs, training."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tests.measures import sqnr_db
from torch import Tensor, nn

import octavo
from octavo.recipes import BlockScaling, CurrentScaling, Recipe

SHAPES = [(16, 128, 48), (7, 133, 5), (1, 256, 64), (200, 300, 3), (3, 1, 1)]


def run(layer: nn.Module, x: Tensor, dy: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx, dw of one call."""
    x = x.detach().requires_grad_()
    with octavo.autocast(recipe=recipe):
        y = layer(x)
    return y.detach(), *torch.autograd.grad(y, [x, layer.weight], dy)


def values(x: Tensor, blocks: tuple[int, int], recipe: BlockScaling) -> Tensor:
    return octavo.quantize(x, octavo.E4M3, blocks, power_of_two=recipe.power_of_two_scales).dequantize(torch.float64)


@pytest.mark.parametrize("recipe", [BlockScaling(), BlockScaling(power_of_two_scales=False)], ids=["2^n", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_product_is_that_of_its_own_blocks(recipe: BlockScaling, shape: tuple[int, int, int]) -> None:
    """Blocks of x and dy lie along the K of the product that they enter: along features, then along tokens.

    Within the rounding of each value (of a scale that is no power of two), K float32 sums, the bias and the output.
    """
    rows, inputs, outputs = shape
    layer, x, dy = octavo.Linear(inputs, outputs), torch.randn(rows, inputs), torch.randn(rows, outputs)
    w = layer.weight.detach()
    y, dx, dw = run(layer, x, dy, recipe)
    w_values = values(w, (128, 128), recipe)
    products = {
        "fprop": (values(x, (1, 128), recipe), w_values.t(), y, layer.bias.detach().double()),
        "dgrad": (values(dy, (1, 128), recipe), w_values, dx, torch.zeros(())),
        "wgrad": (values(dy, (128, 1), recipe).t(), values(x, (128, 1), recipe), dw, torch.zeros(())),
    }
    for name, (a, b, out, bias) in products.items():
        limit = (a.abs() @ b.abs() + bias.abs()) * (a.shape[1] + 5) * 2.0**-24
        assert bool(((out.double() - a @ b - bias).abs() <= limit).all()), name


def test_accuracy_on_normal_data_is_the_derived_one() -> None:
    """28.5 dB with scales that are powers of two, output and gradients alike.

    Under such a scale a value in [2^e, 2^(e+1)) is rounded to steps of 2^(e-3), an error of variance 4^(e-3) / 12. Of
    N(0, 1) data that is the sum over e of P(e) 4^(e-3) / 12 = 7.07e-4 of its variance; two operands: 1.41e-3, or
    28.5 dB. Over half a million outputs only the data's own spread is left, below 0.1 dB.
    """
    noise = 0.0
    for e in range(-9, 4):
        chance = math.erf(2.0 ** (e + 1) / math.sqrt(2)) - math.erf(2.0**e / math.sqrt(2))
        noise += chance * 4.0 ** (e - 3) / 12
    expected = -10 * math.log10(2 * noise)
    assert expected == pytest.approx(28.5, abs=0.01)
    layer = octavo.Linear(1024, 768, bias=False)
    nn.init.normal_(layer.weight)
    x, dy = torch.randn(512, 1024), torch.randn(512, 768)
    y, dx, dw = run(layer, x, dy, BlockScaling())
    w = layer.weight.detach().double()
    exact = (x.double() @ w.t(), dy.double() @ w, dy.double().t() @ x.double())
    for name, a, b in zip(("y", "dx", "dw"), exact, (y, dx, dw), strict=True):
        assert sqnr_db(a, b) == pytest.approx(expected, abs=0.2), name


def test_an_outlier_costs_its_own_block_alone() -> None:
    """Beside a value 1e6 times as large, one scale a tensor flushes a row of ones; blocks keep them exact."""
    layer = octavo.Linear(256, 16, bias=False)
    nn.init.ones_(layer.weight)
    x = torch.ones(4, 256)
    x[0, 0] = 1e6
    with octavo.autocast(recipe=BlockScaling()):
        blocks = layer(x)
    with octavo.autocast(recipe=CurrentScaling(format=octavo.E4M3)):
        whole = layer(x)
    assert bool((blocks[1:] == 256).all())
    assert bool((whole[1:] == 0).all())
    assert blocks[0, 0].item() == pytest.approx(1e6 + 128, rel=2.0**-4)


def test_gradients_show_what_is_not_finite() -> None:
    layer, x = octavo.Linear(130, 20), torch.randn(8, 130)
    dy = torch.randn(8, 20)
    dy[2, 3] = float("inf")
    _, dx, dw = run(layer, x, dy, BlockScaling())
    assert bool(dx[2].isnan().all())
    assert bool(dw[3].isnan().all())
    assert bool(dx[[0, 1, 3]].isfinite().all())
    assert bool(dw[[0, 1, 2]].isfinite().all())


def test_a_plain_checkpoint_is_all_the_state() -> None:
    layer = octavo.Linear(32, 16, recipe=BlockScaling())
    layer(torch.randn(4, 32)).sum().backward()
    assert list(layer.state_dict()) == ["weight", "bias"]
    nn.Linear(32, 16).load_state_dict(layer.state_dict())


def test_a_cached_weight_changes_no_bit() -> None:
    layer, x = octavo.Linear(200, 130, recipe=BlockScaling()), torch.randn(5, 200)
    expected = layer(x)
    assert torch.equal(layer(x, cached_weight="refresh"), expected)
    assert torch.equal(layer(x, cached_weight="reuse"), expected)


def test_a_small_network_learns_as_in_high_precision() -> None:
    """A regression on a teacher: each of two layers adds noise of -28.5 dB, 1.41e-3 of what it gives out.

    The bound allows twice that, for what the noise of the gradients adds.
    """
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(48, 160), nn.GELU(), nn.Linear(160, 33))
    plain = copy.deepcopy(teacher)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.1)
    blocks = copy.deepcopy(plain)
    octavo.convert(blocks, BlockScaling(), filter="all")
    losses = []
    for model in (plain, blocks):
        torch.manual_seed(2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 400)
        for _ in range(400):
            x = torch.randn(128, 48)
            target = teacher(x).detach()
            loss = nn.functional.mse_loss(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            falling.step()
        losses.append(loss.item() / target.var().item())
    assert losses[0] < 0.15
    assert losses[1] < losses[0] + 2 * 2 * 1.41e-3
