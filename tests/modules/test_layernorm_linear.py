"""octavo.LayerNormLinear by itself; that it is a norm and a Linear is in test_fused_layers.py."""

from __future__ import annotations

import pytest
import torch
from tests.measures import sqnr_db
from tests.modules.compositions import RECIPES, jittered, under
from torch import Tensor, nn

import octavo
from octavo.functional.reference import norm_linear_reference

BF16 = torch.bfloat16
# (y, dx, dw, dgamma) in dB on N(0, 1) data of 512 tokens, 256 -> 384, as emulated; a test allows 0.5 dB less.
EMULATED = {
    "delayed, measured first": (28.5, 24.6, 24.6, 25.6),
    "current": (28.5, 24.6, 24.6, 25.6),
    "rowwise": (28.5, 28.5, 28.5, 29.4),
    "block": (28.5, 28.5, 28.5, 29.4),
}


def test_parameters_are_those_of_the_two_layers() -> None:
    torch.manual_seed(1)
    layer = octavo.LayerNormLinear(48, 32)
    torch.manual_seed(1)
    linear = nn.Linear(48, 32)
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes == {"layer_norm_weight": (48,), "layer_norm_bias": (48,), "weight": (32, 48), "bias": (32,)}
    assert torch.equal(layer.weight, linear.weight)
    assert torch.equal(layer.bias, linear.bias)
    rms = octavo.LayerNormLinear(48, 32, False, normalization="RMSNorm", zero_centered_gamma=True)
    assert [name for name, _ in rms.named_parameters()] == ["layer_norm_weight", "weight"]
    assert bool((rms.layer_norm_weight == 0).all())
    assert repr(rms).startswith("LayerNormLinear(in_features=48, out_features=32, bias=False, normalization=RMSNorm")


def test_reset_parameters_draws_as_nn_linear_does() -> None:
    layer = jittered(octavo.LayerNormLinear(48, 32))
    torch.manual_seed(5)
    layer.reset_parameters()
    torch.manual_seed(5)
    linear = nn.Linear(48, 32)
    assert torch.equal(layer.weight, linear.weight)
    assert torch.equal(layer.bias, linear.bias)
    assert bool((layer.layer_norm_weight == 1).all())
    assert bool((layer.layer_norm_bias == 0).all())


def measured(recipe: str, normalization: str) -> tuple[float, ...]:
    """SQNR of (y, dx, dw, dgamma) against the reference in float32."""
    torch.manual_seed(0)
    layer = octavo.LayerNormLinear(256, 384, normalization=normalization)
    with torch.no_grad():
        layer.weight.normal_()
    x, dy = torch.randn(512, 256, requires_grad=True), torch.randn(512, 384)
    norm = layer.norm_for(torch.float32)
    y, _ = norm_linear_reference(x, norm, layer.layer_norm_weight, layer.layer_norm_bias, layer.weight, layer.bias)
    inputs = (x, layer.weight, layer.layer_norm_weight)
    expected = [y, *torch.autograd.grad(y, inputs, dy)]
    with under(RECIPES[recipe]):
        out = layer(x)
    return tuple(sqnr_db(a, b) for a, b in zip(expected, [out, *torch.autograd.grad(out, inputs, dy)], strict=True))


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("recipe", EMULATED)
def test_as_close_to_high_precision_as_its_products_are(recipe: str, normalization: str) -> None:
    for value, bound in zip(measured(recipe, normalization), EMULATED[recipe], strict=True):
        assert value > bound - 0.5


@pytest.mark.parametrize(
    ("recipe", "codes"),
    [("delayed", 64), ("delayed, input kept", 0), ("static", 64), ("delayed, high precision backward", 128)],
)
def test_memory_kept_for_the_backward(recipe: str, codes: int) -> None:
    """Bytes a token: x, the codes of n (or n itself for a product in high precision), 8 of statistics."""
    layer = octavo.LayerNormLinear(64, 48, dtype=BF16)
    x = torch.randn(32, 64, dtype=BF16, requires_grad=True)
    kept: dict[int, Tensor] = {}
    with (
        under(RECIPES[recipe]),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t),
    ):
        layer(x)
    parameters = {p.data_ptr() for p in layer.parameters()}
    own = [t for p, t in kept.items() if p not in parameters and p != x.data_ptr() and t.numel() > 1]
    weight_codes = 64 * 48 if "high precision" not in recipe else 0
    assert sum(t.numel() * t.element_size() for t in own) == 32 * (codes + 8) + weight_codes
    assert x.data_ptr() in kept
