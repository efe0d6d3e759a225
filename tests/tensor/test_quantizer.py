"""Quantizers: the codes of an operand in both layouts, and what each takes its scale from."""

from __future__ import annotations

import pytest
import torch

import octavo
from octavo.kernels import ScaleRule
from octavo.scaling import ROW, TENSOR
from octavo.tensor import (
    CurrentQuantizer,
    DelayedQuantizer,
    OperandState,
    Quantizer,
    QuantizeSpec,
    StaticQuantizer,
    UsedScale,
    close_step,
    operand_of,
)


def decoded(codes: torch.Tensor, scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return (codes.float() * scale)[:rows, :columns]


@pytest.mark.parametrize("shape", [(32, 48), (7, 133), (1, 16), (0, 16)])
@pytest.mark.parametrize("granularity", [TENSOR, ROW])
def test_both_layouts_hold_the_matrix(shape: tuple[int, int], granularity: object) -> None:
    x = torch.randn(shape)
    operand = CurrentQuantizer(QuantizeSpec(format=octavo.E4M3, granularity=granularity))(x, True, True)
    name = granularity.name
    expected = octavo.quantize(x, octavo.E4M3, name).dequantize()
    expected_t = octavo.quantize(x.t(), octavo.E4M3, name).dequantize()
    assert torch.equal(decoded(operand.codes, operand.scale, *shape), expected)
    assert torch.equal(decoded(operand.codes_t, operand.scale_t, *shape[::-1]), expected_t)
    for codes, scale in ((operand.codes, operand.scale), (operand.codes_t, operand.scale_t)):
        assert codes.is_contiguous()
        assert codes.shape[0] % 16 == codes.shape[1] % 16 == 0
        assert scale.dim() == 0 or scale.shape == (codes.shape[0], 1)
    assert operand.transposed.codes is operand.codes_t


@pytest.mark.parametrize("granularity", [TENSOR, ROW])
def test_only_the_layouts_asked_for(granularity: object) -> None:
    quantizer = CurrentQuantizer(QuantizeSpec(format=octavo.E4M3, granularity=granularity))
    row, column = quantizer(torch.randn(16, 16), True, False), quantizer(torch.randn(16, 16), False, True)
    assert row.codes is not None
    assert row.codes_t is row.scale_t is None
    assert column.codes_t is not None
    assert column.codes is column.scale is None


def test_a_delayed_quantizer_uses_the_past_and_gathers_the_present() -> None:
    state = OperandState()
    state.scale = torch.tensor(0.5)
    spec = QuantizeSpec(format=octavo.E4M3, scaling="delayed")
    quantizer = DelayedQuantizer(spec, state, gather=True, from_data=False)
    for amax in (3.0, 7.0, 5.0):
        operand = quantizer(torch.full((16, 16), amax), True, True)
        assert operand.scale.item() == operand.scale_t.item() == 0.5
        assert decoded(operand.codes, operand.scale, 16, 16)[0, 0] == amax
    assert state.gathered.item() == 7.0
    close_step([state], torch.zeros(1, 1), [torch.tensor(3.0)], [True])
    assert operand.scale.item() == operand.scale_t.item() == 0.5, "an update leaves what was cast before it alone"
    assert state.scale.item() == 3.0
    state.gathered.fill_(7.0)
    DelayedQuantizer(spec, state, gather=False, from_data=False)(torch.full((16, 16), 9.0), True, False)
    assert state.gathered.item() == 7.0
    measured = DelayedQuantizer(spec, state, gather=False, from_data=True)(torch.full((16, 16), 9.0), True, False)
    assert measured.scale == octavo.quantize(torch.full((16, 16), 9.0), octavo.E4M3).scale


@pytest.mark.parametrize("layouts", [(True, False), (False, True), (True, True)])
def test_a_delayed_quantizer_notes_the_scale_it_used_and_repeats_one_it_is_given(layouts: tuple[bool, bool]) -> None:
    """What a recompute needs: the noted scale, whatever has become of the state, measured or not."""
    spec, x = QuantizeSpec(format=octavo.E4M3, scaling="delayed"), torch.randn(16, 32) * 5
    for from_data in (False, True):
        state, used = OperandState(), UsedScale()
        state.scale = torch.tensor(0.37)
        first = DelayedQuantizer(spec, state, gather=True, from_data=from_data, used=used)(x, *layouts)
        expected = octavo.quantize(x, octavo.E4M3).scale if from_data else torch.tensor(0.37)
        assert torch.equal(used.scale, expected)
        # The next step: another scale, and nothing measured.
        state.scale.fill_(5.0)
        gathered = state.gathered.item()
        assert gathered == x.abs().max().item()
        again = DelayedQuantizer(spec, state, gather=False, from_data=from_data, scale=used.scale)(2 * x, *layouts)
        same = DelayedQuantizer(spec, state, gather=False, from_data=from_data, scale=used.scale)(x, *layouts)
        for name in ("scale", "scale_t"):
            scale = getattr(first, name)
            assert (scale is None) == (getattr(again, name) is None)
            assert scale is None or torch.equal(scale, getattr(again, name))
        for name in ("codes", "codes_t"):
            codes = getattr(first, name)
            assert codes is None or torch.equal(codes.view(torch.uint8), getattr(same, name).view(torch.uint8))
        assert state.gathered.item() == gathered


def quantizers() -> list[Quantizer]:
    state = OperandState()
    return [
        CurrentQuantizer(QuantizeSpec(format=octavo.E4M3)),
        CurrentQuantizer(QuantizeSpec(format=octavo.E5M2, granularity=ROW, inf_to_nan=True)),
        DelayedQuantizer(QuantizeSpec(format=octavo.E5M2, scaling="delayed"), state, gather=True, from_data=False),
        DelayedQuantizer(QuantizeSpec(format=octavo.E5M2, scaling="delayed"), state, gather=True, from_data=True),
        StaticQuantizer(QuantizeSpec(format=octavo.E4M3, scaling="static", static_scale=0.3)),
    ]


@pytest.mark.parametrize("number", range(5))
def test_every_quantizer_gives_column_sums_on_request_and_nothing_else_changes(number: int) -> None:
    # Integers: their sums are exact, in whatever order they are added.
    x = torch.randint(-8, 9, (37, 21)).float()
    quantizer = quantizers()[number]
    without, summed = quantizer(x, True, True), quantizer(x, True, True, True)
    assert without.column_sum is None
    assert summed.column_sum.dtype == torch.float32
    assert torch.equal(summed.column_sum, x.double().sum(0).float())
    for a, b in zip(without[:4], summed[:4], strict=True):
        assert torch.equal(a.float(), b.float())


def test_epsilon_and_powers_of_two_reach_the_scale() -> None:
    x = torch.full((4, 4), 3e-4)
    for epsilon, power_of_two in ((0.0, False), (1e-3, False), (0.0, True), (1e-3, True)):
        spec = QuantizeSpec(format=octavo.E4M3, epsilon=epsilon, power_of_two=power_of_two)
        assert spec.rule == ScaleRule(epsilon.hex(), power_of_two)
        assert spec.rule.epsilon == epsilon
        expected = octavo.quantize(x, octavo.E4M3, epsilon=epsilon, power_of_two=power_of_two).scale
        assert torch.equal(CurrentQuantizer(spec)(x, True, False).scale, expected)
    assert 448 * CurrentQuantizer(QuantizeSpec(format=octavo.E4M3, epsilon=1e-3))(x, True, False).scale.item() == (
        pytest.approx(1e-3, rel=1e-6)
    )


def test_a_static_scale_is_used_to_the_bit() -> None:
    x = torch.randn(32, 32)
    for scale in (0.1, 0.0371, 3.0):
        operand = StaticQuantizer(QuantizeSpec(format=octavo.E4M3, scaling="static", static_scale=scale))(x, True, True)
        expected = octavo.quantize(x, octavo.E4M3, scale=scale)
        assert torch.equal(operand.codes.view(torch.uint8), expected.codes.view(torch.uint8))
        assert torch.equal(operand.codes_t.view(torch.uint8), expected.codes.t().contiguous().view(torch.uint8))
        assert operand.scale == operand.scale_t == expected.scale


def test_infinite_gradients_become_nan_and_other_operands_saturate() -> None:
    x = torch.ones(16, 16)
    x[0, 0] = float("inf")
    for inf_to_nan in (True, False):
        operand = CurrentQuantizer(QuantizeSpec(format=octavo.E5M2, inf_to_nan=inf_to_nan))(x, True, False)
        value = operand.codes.float()[0, 0]
        assert value.isnan() if inf_to_nan else value == octavo.E5M2.max
        assert operand.scale == octavo.quantize(torch.ones(1), octavo.E5M2).scale, "inf decides no scale"


@pytest.mark.parametrize("granularity", ["tensor", "row", "column", (1, 128), (128, 128), "mx"])
def test_an_fp8_weight_enters_with_its_own_codes_where_it_can(granularity: object) -> None:
    q = octavo.quantize(torch.randn(40, 72), octavo.E4M3, granularity)
    spec = QuantizeSpec(format=octavo.E4M3, granularity=TENSOR if granularity == "tensor" else ROW)
    operand = operand_of(q, CurrentQuantizer(spec), True, True)
    if granularity in ("tensor", "row"):
        assert torch.equal(operand.codes[:40, :72].view(torch.uint8), q.codes.view(torch.uint8))
    fresh = CurrentQuantizer(spec)(q.dequantize(), True, True)
    if granularity != "tensor":
        assert torch.equal(operand.codes_t.view(torch.uint8), fresh.codes_t.view(torch.uint8))
        assert torch.equal(operand.scale_t, fresh.scale_t)
    rowwise, columnwise = (
        operand_of(q, CurrentQuantizer(spec), True, False),
        operand_of(q, CurrentQuantizer(spec), False, True),
    )
    assert rowwise.codes_t is None
    assert columnwise.codes is None
    assert torch.equal(columnwise.codes_t.view(torch.uint8), operand.codes_t.view(torch.uint8))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scaling": "later"}, "scaling is 'later'"),
        ({"epsilon": -1.0}, "epsilon is -1.0"),
        ({"scaling": "delayed", "granularity": ROW}, "one scale a tensor"),
        ({"scaling": "static"}, "give both or neither"),
        ({"static_scale": 1.0}, "give both or neither"),
        ({"scaling": "static", "static_scale": -1.0}, "positive and finite"),
        ({"scaling": "static", "static_scale": 1e-50}, "normal numbers"),
        ({"scaling": "static", "static_scale": 1e38}, "normal numbers"),
    ],
)
def test_specs_refuse_what_contradicts_itself(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantizeSpec(format=octavo.E4M3, **fields)


def test_again_casts_with_the_multiplier_of_the_first_cast_to_the_last_bit() -> None:
    """Of 1/m, which is the scale, 1/(1/m) is not always m: values next to the middle of two codes tell."""
    middles = torch.tensor([1.0625 * 2**e for e in range(-5, 8)])
    told = 0
    for amax in torch.linspace(1.0, 2.0, 65):
        multiplier = torch.tensor(448.0) / amax
        near = middles / multiplier
        for _ in range(2):
            near = torch.cat([near, near.nextafter(torch.tensor(0.0)), near.nextafter(torch.tensor(9.0))])
        x = torch.cat([near[near < amax], amax.reshape(1)]).reshape(1, -1).repeat(2, 1)
        other = 1 / (1 / multiplier)
        told += not torch.equal(octavo.cast(x * multiplier, octavo.E4M3), octavo.cast(x * other, octavo.E4M3))
        spec = QuantizeSpec(format=octavo.E4M3, granularity=TENSOR)
        for quantizer in (CurrentQuantizer(spec), DelayedQuantizer(spec, OperandState(), gather=True, from_data=True)):
            first = quantizer(x, True, True)
            again = quantizer.again(x, first.scale, first.scale)
            assert torch.equal(first.codes_t.view(torch.uint8), again.codes_t.view(torch.uint8))
            assert torch.equal(first.scale_t, again.scale_t)
    assert told, "else another multiplier would have made the same codes"
