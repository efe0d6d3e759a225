"""row_cast: its reference against the separate operations, its twin against the reference, and what it compiles to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels.agreement import assert_same
from tests.kernels.exact_activations import input_of
from tests.kernels.fused_twins import parameters, rows_of
from tests.kernels.interpreting import exact_conversions, interpreted, silent
from tests.kernels.matrices import SHAPES, memory_orders, with_specials
from tests.kernels.sources import RULES
from torch import Tensor

from octavo.formats import E4M3, E5M2, decode
from octavo.kernels.activation_cast import activation_output
from octavo.kernels.activations import PLAIN
from octavo.kernels.amax import amax
from octavo.kernels.cast_transpose import ScaleRule, cast_transpose
from octavo.kernels.gated_cast import gated_output
from octavo.kernels.norm_cast import Norm, norm_output
from octavo.kernels.norm_cast.reference import normalised, statistics
from octavo.kernels.row_cast import (
    WIDEST,
    gated_row_cast,
    gated_row_cast_reference,
    norm_row_cast,
    norm_row_cast_reference,
    row_cast,
    row_cast_reference,
    unsupported_reasons,
)
from octavo.scaling import ROW

BF16 = torch.bfloat16
FULL_SHAPES = [shape for shape in SHAPES if shape[0] and shape[1] > 1]
NORMS = [Norm("layer", through=BF16), Norm("rms", (1e-6).hex(), True, BF16), Norm("rms", through=torch.float32)]


def separately(y: Tensor, rule: ScaleRule) -> tuple[Tensor | None, ...]:
    return cast_transpose(y, E4M3, amax(y, ROW), None, rule=rule)[:2]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_codes_and_scales_are_those_of_an_amax_and_a_cast(rule: ScaleRule) -> None:
    x = with_specials(torch.randn(21, 70).to(BF16))
    expected = separately(x, rule)
    assert_same(row_cast(x, E4M3, rule), expected)
    assert_same(row_cast_reference(x, E4M3, rule), expected)


def test_a_row_has_the_scale_of_its_largest_finite_entry() -> None:
    x = torch.tensor([[1.0, -3.0], [0.0, 0.0], [float("inf"), 0.5]])
    codes, scale = row_cast(x, E4M3, ScaleRule())
    assert codes.shape == (16, 16)
    assert torch.equal(scale[:3, 0], torch.tensor([3 / E4M3.max, 1.0, 0.5 / E4M3.max]))
    assert (scale[3:] == 1).all()
    assert torch.equal(decode(codes)[0, :2] * scale[0], decode(codes)[0, :2] * (3 / E4M3.max))
    assert decode(codes)[2, :2].tolist() == [E4M3.max, E4M3.max]


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_a_normalisation_is_one_and_then_a_cast(norm: Norm) -> None:
    x, (weight, bias) = rows_of((21, 70)), parameters(70)
    y, _, mean, rstd = norm_output(x, norm, weight, bias)
    expected = *separately(y, ScaleRule()), y, mean, rstd
    assert_same(norm_row_cast(x, norm, weight, bias, E4M3, ScaleRule(), return_output=True), expected)
    assert_same(norm_row_cast_reference(x, norm, weight, bias, E4M3, ScaleRule(), True), expected)
    assert norm_row_cast(x, norm, weight, bias, E4M3, ScaleRule()).output is None


@pytest.mark.parametrize("through", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", PLAIN)
def test_an_activation_is_one_and_then_a_cast(activation: str, through: torch.dtype) -> None:
    gate, up = (input_of((21, 64), activation, BF16) for _ in range(2))
    for second in (up, None):
        y = (
            activation_output(gate, activation, through).output
            if second is None
            else gated_output(gate, second, activation, through).output
        )
        expected = separately(y, ScaleRule())
        assert_same(gated_row_cast(gate, second, activation, E4M3, ScaleRule(), through=through), expected)
        assert_same(gated_row_cast_reference(gate, second, activation, E4M3, ScaleRule(), through), expected)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"row_cast takes a floating-point matrix as x \[M, K\], found torch.int64"):
        row_cast(torch.zeros(2, 2, dtype=torch.int64), E4M3, ScaleRule())
    with pytest.raises(ValueError, match=r"up has shape \(2, 3\)"):
        gated_row_cast(torch.ones(2, 2), torch.ones(2, 3), "silu", E4M3, ScaleRule(), through=BF16)
    with pytest.raises(ValueError, match="unknown activation 'swiglu'"):
        gated_row_cast(torch.ones(2, 2), None, "swiglu", E4M3, ScaleRule(), through=BF16)
    reasons = unsupported_reasons(torch.ones(2, WIDEST + 1), E4M3)
    assert "need a CUDA device" in reasons[0]
    assert reasons[-1] == f"rows of {WIDEST + 1} columns: a program holds {WIDEST} at most"


# The twin.


def row_twin_is_reference(function: Any, x: Tensor, rule: ScaleRule) -> None:
    for format in (E4M3, E5M2):
        assert_same(function(x, format, rule), row_cast_reference(x, format, rule))


def norm_twin_is_reference(function: Any, x: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None) -> None:
    """Statistics within their bound; then all else bit for bit, with those statistics."""
    codes, scale, output, mean, rstd = function(x, norm, weight, bias, E4M3, ScaleRule(), True)
    exact_mean, exact_rstd = statistics(x, norm)
    finite = x.float().isfinite().all(1)
    unit = (x.shape[1] + 8) * 2.0**-24
    if mean is not None:
        assert exact_mean is not None
        assert ((mean - exact_mean).abs() <= 2 * unit * x.float().abs().mean(1))[finite].all()
    assert ((rstd - exact_rstd).abs() <= 4 * unit * exact_rstd + 2.0**-149)[finite].all()
    y = normalised(x, norm, weight, bias, mean, rstd).to(norm.through or x.dtype)
    assert_same((output, codes, scale), (y, *row_cast_reference(y, E4M3, ScaleRule())))
    assert_same(function(x, norm, weight, bias, E4M3, ScaleRule())[:2], (codes, scale))


def gated_twin_is_reference(function: Any, activation: str, shape: tuple[int, int], device: str) -> None:
    """relu to the bit; of the others, one code beside the reference's at most, under nearly its scale."""
    gate, up = (input_of(shape, activation, BF16, device) for _ in range(2))
    for second in (up, None):
        codes, scale = function(gate, second, activation, E4M3, ScaleRule(), BF16)
        expected, own = gated_row_cast_reference(gate, second, activation, E4M3, ScaleRule(), BF16)
        if activation in ("relu", "srelu"):
            assert_same((codes, scale), (expected, own))
        else:
            assert torch.allclose(scale, own, rtol=2.0**-7, atol=0)
            values, exact = decode(codes) * scale, decode(expected) * own
            assert ((values - exact).abs() <= exact.abs() / 7 + own * E4M3.min_normal / 2).all()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("triton")
    exact_conversions(monkeypatch)
    from octavo.kernels.row_cast import launch

    return launch


@interpreted
@silent
@pytest.mark.parametrize("shape", FULL_SHAPES, ids=str)
def test_the_twin_is_its_reference(kernels: Any, shape: tuple[int, int]) -> None:
    for number, dtype in enumerate((BF16, torch.float16, torch.float32)):
        x = with_specials(torch.randn(shape).to(dtype))
        for _, view in list(memory_orders(x))[: None if shape == (17, 31) else 1]:
            row_twin_is_reference(kernels.row_cast_triton, view, RULES[number])


@interpreted
@silent
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_the_twin_of_a_normalisation_is_its_reference(kernels: Any, norm: Norm) -> None:
    for shape in ((21, 70), (5, 1040), (16, 64)):
        weight, bias = parameters(shape[1])
        norm_twin_is_reference(kernels.norm_row_cast_triton, rows_of(shape), norm, weight, bias)
        norm_twin_is_reference(kernels.norm_row_cast_triton, rows_of(shape), norm, weight.to(BF16), None)


@interpreted
@silent
@pytest.mark.parametrize("activation", PLAIN)
def test_the_twin_of_an_activation_is_its_reference(kernels: Any, activation: str) -> None:
    for shape in ((21, 70), (5, 1040)):
        gated_twin_is_reference(kernels.gated_row_cast_triton, activation, shape, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 768), (33, 1000), (2048, 4096), (64, 14336), (8, WIDEST)], ids=str)
def test_on_a_gpu_the_twin_is_its_reference(shape: tuple[int, int]) -> None:
    row_twin_is_reference(row_cast, with_specials(torch.randn(shape, device="cuda").to(BF16)), ScaleRule())
    weight, bias = parameters(shape[1], device="cuda")

    def normed(x: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
        return norm_row_cast(x, norm, weight, bias, *rest[:2], return_output=len(rest) > 2)

    def gated(gate: Tensor, up: Tensor | None, name: str, format: Any, rule: ScaleRule, through: torch.dtype) -> Any:
        return gated_row_cast(gate, up, name, format, rule, through=through)

    for norm in NORMS:
        norm_twin_is_reference(normed, rows_of(shape, device="cuda"), norm, weight, bias)
    for activation in PLAIN:
        gated_twin_is_reference(gated, activation, shape, "cuda")


@pytest.mark.parametrize("columns", [768, 4096, 14336, WIDEST])
@pytest.mark.parametrize("kind", ["row", "norm", "gated"])
def test_a_row_stays_in_registers_and_is_read_by_16_bytes(
    kind: str, columns: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    from tests.kernels.variants import HOPPER, compiled, launches_of, stack_and_local_bytes

    from octavo.kernels.row_cast import launch, triton_kernel

    x, weight = torch.ones(32, columns, dtype=BF16), torch.ones(columns, dtype=BF16)
    calls = {
        "row": lambda: launch.row_cast_triton(x, E4M3, ScaleRule()),
        "norm": lambda: launch.norm_row_cast_triton(x, NORMS[1], weight, None, E4M3, ScaleRule(), True),
        "gated": lambda: launch.gated_row_cast_triton(x, x, "silu", E4M3, ScaleRule(), BF16),
    }
    kernel = getattr(
        triton_kernel, {"row": "row_cast", "norm": "norm_row_cast", "gated": "gated_row_cast"}[kind] + "_kernel"
    )
    (one,) = launches_of(monkeypatch, launch, f"_launch_{kind}", calls[kind])
    variant = compiled(kernel, one, HOPPER)
    assert "ld.global" in variant.asm["ptx"]
    assert ".v4.b32" in variant.asm["ptx"]
    assert "cvt.rn.satfinite.e4m3x2.f32" in variant.asm["ptx"]
    assert stack_and_local_bytes(variant, tmp_path) == [0, 0]
