"""Operands by block: of a matrix in high precision, and of one that exists in FP8 alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import octavo
from octavo.formats import E4M3, E5M2
from octavo.kernels import ScaleRule
from octavo.kernels.block_cast import block_cast
from octavo.recipes import BlockScaling
from octavo.scaling import BLOCK_1X128, BLOCK_128X128, MX, TENSOR, Granularity
from octavo.tensor import (
    BlockQuantizer,
    CurrentQuantizer,
    Operand,
    PairedQuantizer,
    QuantizedTensor,
    Quantizer,
    QuantizeSpec,
    StochasticQuantizer,
    cast_together,
    casts_together,
    operand_of,
)

WEIGHT = QuantizeSpec(format=E4M3, granularity=BLOCK_128X128, power_of_two=True)


def same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))


def test_the_spec_decides_everything() -> None:
    x = torch.randn(40, 200)
    x[3, 4] = float("inf")
    base = {"format": E4M3, "granularity": BLOCK_1X128}
    for changes in ({}, {"format": E5M2}, {"power_of_two": True}, {"epsilon": 8.0}, {"inf_to_nan": True}):
        spec = QuantizeSpec(**(base | changes))
        found = BlockQuantizer(spec)(x, True, True, True)
        rule = ScaleRule(float(spec.epsilon).hex(), spec.power_of_two)
        expected = block_cast(x, spec.format, BLOCK_1X128, rule, inf_to_nan=spec.inf_to_nan, column_sum=True)
        assert all(same(a, b) for a, b in zip(found, expected, strict=True))
        plain = BlockQuantizer(QuantizeSpec(**base))(x, True, True, True)
        assert bool(changes) != all(same(a, b) for a, b in zip(found, plain, strict=True))


def test_the_recipe_gives_each_operand_its_blocks() -> None:
    specs = BlockScaling().linear
    assert [spec.granularity for spec in specs[:3]] == [BLOCK_1X128, BLOCK_128X128, BLOCK_1X128]
    assert all(spec.format is E4M3 and spec.power_of_two for spec in specs[:3])
    assert not any(spec.power_of_two for spec in BlockScaling(power_of_two_scales=False).linear[:3])


@pytest.mark.parametrize("granularities", [(BLOCK_1X128, BLOCK_128X128), (BLOCK_128X128, BLOCK_1X128)], ids=str)
def test_together_two_make_what_each_makes(granularities: tuple[Granularity, Granularity]) -> None:
    x, w = torch.randn(40, 200), torch.randn(130, 200)
    of_x = BlockQuantizer(QuantizeSpec(format=E4M3, granularity=granularities[0], power_of_two=True))
    of_w = BlockQuantizer(QuantizeSpec(format=E5M2, granularity=granularities[1], epsilon=0.5))
    assert casts_together(of_x, of_w)
    for columnwise, weight_columnwise in ((True, True), (True, False), (False, True), (False, False)):
        found = cast_together(of_x, x, columnwise, of_w, w, weight_columnwise)
        expected = of_x(x, True, columnwise), of_w(w, True, weight_columnwise)
        for one, other in zip(found, expected, strict=True):
            assert all(same(a, b) for a, b in zip(one, other, strict=True))


class Scaled(BlockQuantizer):
    def __call__(self, x: Tensor, *layouts: bool, **of: bool) -> Operand:
        return super().__call__(2 * x, *layouts, **of)


def test_only_plain_quantizers_of_blocks_cast_together() -> None:
    plain, mx = BlockQuantizer(WEIGHT), QuantizeSpec(format=E4M3, granularity=MX)
    others: list[Quantizer] = [
        Scaled(WEIGHT),
        BlockQuantizer(mx),
        BlockQuantizer(QuantizeSpec(format=E4M3, granularity=BLOCK_1X128, inf_to_nan=True)),
        CurrentQuantizer(QuantizeSpec(format=E4M3)),
        StochasticQuantizer(QuantizeSpec(format=E4M3, granularity=BLOCK_1X128, rounding="stochastic")),
        PairedQuantizer(plain, BlockQuantizer(WEIGHT)),
        lambda *of: plain(*of),
    ]
    assert casts_together(plain, plain)
    for other in others:
        assert not casts_together(plain, other)
        assert not casts_together(other, plain)


def decoded(operand: Operand, rows: int, columns: int) -> list[Tensor]:
    from octavo.kernels import expanded

    both = ((operand.codes, operand.scale), (operand.codes_t, operand.scale_t))
    found = []
    for codes, scale in both:
        assert codes is not None
        assert scale is not None
        found.append(codes.float() * expanded(scale, codes))
    return [found[0][:rows, :columns], found[1][:columns, :rows].t()]


@pytest.mark.parametrize("power_of_two", [True, False])
def test_blocks_of_an_fp8_weight_are_taken_as_they_are(power_of_two: bool) -> None:
    """Both layouts hold its very values, which quantizing again would not all keep."""
    q = octavo.quantize(torch.randn(300, 200), E4M3, (128, 128), power_of_two=power_of_two)

    def never(*_: object) -> Operand:
        raise AssertionError("its codes need no quantizer")

    operand = operand_of(q, never, True, True, BLOCK_128X128)
    for values in decoded(operand, 300, 200):
        assert torch.equal(values, q.dequantize())
    fresh = BlockQuantizer(WEIGHT)(torch.randn(300, 200), True, True)
    for a, b in zip(operand[:4], fresh[:4], strict=True):
        assert a is not None
        assert b is not None
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    assert operand_of(q, never, True, False, BLOCK_128X128)[2:4] == (None, None)
    assert operand_of(q, never, False, True, BLOCK_128X128)[:2] == (None, None)


@pytest.mark.parametrize("granularity", ["tensor", "row", (1, 128), "mx"], ids=str)
def test_any_other_fp8_weight_is_quantized_anew(granularity: str | tuple[int, int]) -> None:
    """A product is by blocks in both operands, so one scale a tensor will not do."""
    q = octavo.quantize(torch.randn(300, 200), E4M3, granularity)
    operand = operand_of(q, BlockQuantizer(WEIGHT), True, True, BLOCK_128X128)
    expected = BlockQuantizer(WEIGHT)(q.dequantize(), True, True)
    assert all(same(a, b) for a, b in zip(operand, expected, strict=True))


def test_a_weight_in_blocks_serves_a_recipe_without() -> None:
    q = octavo.quantize(torch.randn(300, 200), E4M3, (128, 128))
    current = CurrentQuantizer(QuantizeSpec(format=E4M3))
    operand = operand_of(q, current, True, True, TENSOR)
    assert all(same(a, b) for a, b in zip(operand, current(q.dequantize(), True, True), strict=True))


@pytest.mark.parametrize("inside", [octavo.recipes.CurrentScaling(), BlockScaling()], ids=["tensor", "block"])
def test_layers_that_hold_fp8_weights_alone_run_by_block(inside: octavo.recipes.Recipe) -> None:
    with octavo.quantized_init(recipe=inside):
        layer = octavo.Linear(200, 300)
    assert isinstance(layer.weight, QuantizedTensor)
    x = torch.randn(5, 200, requires_grad=True)
    with octavo.autocast(recipe=BlockScaling()):
        y = layer(x)
    y.sum().backward()
    x_values = octavo.quantize(x.detach(), E4M3, (1, 128), power_of_two=True).dequantize(torch.float64)
    w = layer.weight.detach().dequantize(torch.float64)
    if inside != BlockScaling():
        w = octavo.quantize(w.float(), E4M3, (128, 128), power_of_two=True).dequantize(torch.float64)
    exact = x_values @ w.t() + layer.bias.double()
    # K = 200 float32 sums of the terms, the bias and the output: 203 roundings.
    limit = (x_values.abs() @ w.abs().t() + layer.bias.abs()) * 203 * 2.0**-24
    assert bool(((y.double() - exact).abs() <= limit).all())
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())
