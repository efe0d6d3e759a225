"""norm_cast: the reference against torch and Octavo's cast, the twin against the reference, given its statistics."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from tests.kernels.agreement import assert_same, steps_between
from tests.kernels.fused_twins import NORM_SCALE as SCALE
from tests.kernels.fused_twins import parameters, rows_of, run_norm
from tests.kernels.interpreting import exact_conversions, interpreted, silent
from tests.kernels.matrices import SHAPES, memory_orders
from torch import Tensor

from octavo.formats import E4M3, E5M2, cast
from octavo.kernels.cast_transpose import ScaleRule, cast_transpose
from octavo.kernels.norm_cast import (
    Norm,
    norm_cast,
    norm_cast_reference,
    norm_output,
    norm_output_reference,
    unsupported_reasons,
)
from octavo.kernels.norm_cast.reference import normalised

BF16 = torch.bfloat16
KINDS = ("layer", "rms")
FULL_SHAPES = [shape for shape in SHAPES if shape[0] and shape[1]]


def exact(x: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """By torch, in float64."""
    w = None if weight is None else weight.double() + norm.zero_centered
    b = None if bias is None else bias.double()
    if norm.kind == "layer":
        return torch.nn.functional.layer_norm(x.double(), (x.shape[1],), w, b, norm.epsilon)
    y = torch.nn.functional.rms_norm(x.double(), (x.shape[1],), w, norm.epsilon)
    return y if b is None else y + b


def bound(x: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None, amplification: float = 1.0) -> Tensor:
    """How far a result of float32 may be from the exact one.

    A sum of K terms is off by at most K 2^-24 of the sum of magnitudes, in whatever order. So the mean is off by
    K u mean|x|, the variance by (2 K + 4) u of itself (times `amplification`, where a difference of two numbers gives
    it), rstd by half of that, and four more roundings follow.
    """
    x, unit = x.double(), (x.shape[1] + 8) * 2.0**-24
    centre = x.mean(1, keepdim=True) if norm.kind == "layer" else 0.0
    rstd = ((x - centre).square().mean(1, keepdim=True) + norm.epsilon).rsqrt()
    scale = 1.0 if weight is None else (weight.double() + norm.zero_centered).abs()
    shift = 0.0 if bias is None else bias.double().abs()
    size = (x - centre).abs() * amplification + x.abs().mean(1, keepdim=True)
    return 2 * unit * (size * rstd * scale + shift) + 1e-30


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_the_reference_normalises_as_torch_does(kind: str, dtype: torch.dtype) -> None:
    for columns, zero_centered, epsilon in ((1, False, 1e-5), (96, True, 1e-6), (300, False, 0.1)):
        norm = Norm(kind, epsilon.hex(), zero_centered, torch.float32)
        x = torch.randn(33, columns).mul(3).add(1).to(dtype)
        for weight, bias in itertools.product((None, parameters(columns)[0]), (None, parameters(columns, BF16)[1])):
            output = norm_output_reference(x, norm, weight, bias)[0]
            error = (output.double() - exact(x, norm, weight, bias)).abs()
            assert (error <= bound(x, norm, weight, bias)).all()


@pytest.mark.parametrize("through", [None, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_the_cast_of_the_result_rounded_on_the_way(kind: str, through: torch.dtype | None) -> None:
    norm, x = Norm(kind, through=through), rows_of((50, 70))
    weight, bias = parameters(70)
    scale, gathered = torch.tensor(SCALE), torch.tensor(0.5)
    out = norm_cast(x, norm, weight, bias, E4M3, scale, gathered=gathered, return_output=True)
    # In steps of torch's own, from the statistics.
    y = x.float() if out.mean is None else x.float().sub(out.mean.unsqueeze(1))
    y = y.mul(out.rstd.unsqueeze(1)).mul(weight).add(bias)
    y = y if through is None else y.to(through).float()
    expected = cast(y * (1 / scale), E4M3)
    assert torch.equal(out.codes[:50, :70].view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(out.codes_t.view(torch.uint8), out.codes.view(torch.uint8).t())
    assert not out.codes.view(torch.uint8)[50:].any()
    assert not out.codes.view(torch.uint8)[:, 70:].any()
    assert (out.codes.shape, out.codes_t.shape) == ((64, 80), (80, 64))
    assert gathered == y[y.isfinite()].abs().max()
    assert out.output.dtype == (through or BF16)
    assert torch.equal(out.output.nan_to_num(-7.0), y.to(out.output.dtype).nan_to_num(-7.0))
    assert out.scale == scale
    assert out.scale.data_ptr() != scale.data_ptr()


def test_rounding_on_the_way_changes_some_codes() -> None:
    x, scale = torch.randn(64, 512), torch.tensor(0.01)
    straight = norm_cast(x, Norm("rms"), None, None, E4M3, scale).codes.view(torch.uint8)
    rounded = norm_cast(x, Norm("rms", through=BF16), None, None, E4M3, scale).codes.view(torch.uint8)
    # bf16 has 16 values for every one of E4M3's, of which one lies in the middle of two codes, so that all that rounds
    # to it (1/16) goes to the even one: half of that goes elsewhere than before.
    assert 0.5 / 32 < (straight != rounded).float().mean() < 2 / 32


def test_zero_centered_weights_are_their_distance_from_one() -> None:
    x, scale = torch.randn(20, 64), torch.tensor(0.01)
    weight = torch.randint(-8, 8, (64,)) / 16
    around = norm_cast(x, Norm("layer", zero_centered=True), weight, None, E4M3, scale)
    plain = norm_cast(x, Norm("layer"), weight + 1, None, E4M3, scale)
    assert_same(around, plain)


def test_what_is_gathered_only_grows_and_what_is_not_wanted_is_not_there() -> None:
    x, scale, gathered = torch.randn(20, 64), torch.tensor(0.01), torch.tensor(1e6)
    out = norm_cast(x, Norm("rms"), None, None, E5M2, scale, gathered=gathered, columnwise=False)
    assert gathered == 1e6
    assert (out.codes_t, out.output, out.mean) == (None, None, None)
    assert out.codes.dtype == torch.float8_e5m2


def test_zeros_stay_zeros_and_a_row_that_is_not_finite_is_nan_alone() -> None:
    x = rows_of((20, 32), torch.float32)
    out = norm_cast(x, Norm("layer"), None, None, E4M3, torch.tensor(0.01))
    values = out.codes.float()
    assert not values[0].any()
    assert not values[1].any()
    assert values[2, :32].isnan().all()
    assert values[3, :32].isnan().all()
    assert values[4:, :32].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_an_empty_matrix_has_empty_codes(shape: tuple[int, int]) -> None:
    gathered = torch.tensor(2.0)
    out = norm_cast(torch.empty(shape), Norm("rms"), None, None, E4M3, torch.tensor(1.0), gathered=gathered)
    assert out.codes.shape == tuple(-(-n // 16) * 16 for n in shape)
    assert gathered == 2.0
    assert norm_output(torch.empty(shape), Norm("layer"), None, None).amaxes.tolist() == [0.0]


def test_the_result_in_high_precision_and_its_amax_leave_the_cast_to_cast_transpose() -> None:
    x = rows_of((40, 48))
    norm, (weight, bias) = Norm("layer", through=BF16), parameters(48)
    result = norm_output(x, norm, weight, bias)
    assert result.amaxes.amax() == result.output[result.output.isfinite()].abs().max().float()
    by_amax = cast_transpose(result.output, E4M3, result.amaxes, result.amaxes, rule=ScaleRule())
    by_scale = norm_cast(x, norm, weight, bias, E4M3, by_amax.scale)
    assert_same((by_scale.codes, by_scale.codes_t), (by_amax.codes, by_amax.codes_t))


def test_bad_arguments_are_named() -> None:
    x, one = torch.randn(4, 8), torch.ones(())
    with pytest.raises(ValueError, match=r"unknown normalisation 'batch'"):
        norm_cast(x, Norm("batch"), None, None, E4M3, one)
    with pytest.raises(ValueError, match=r"weight has shape \(4,\).*it takes \[8\]"):
        norm_cast(x, Norm("layer"), torch.ones(4), None, E4M3, one)
    with pytest.raises(ValueError, match=r"found torch.float32 of shape \(8,\)"):
        norm_cast(x[0], Norm("layer"), None, None, E4M3, one)
    with pytest.raises(ValueError, match="one float32 scale"):
        norm_cast(x, Norm("layer"), None, None, E4M3, torch.ones(4, 1))
    with pytest.raises(ValueError, match=r"rounds through .* found torch.int8"):
        norm_output(x, Norm("layer", through=torch.int8), None, None)
    assert "need a CUDA device" in unsupported_reasons(x, E4M3)[0]


@pytest.mark.slow
def test_compiled_code_gives_the_same_bits_in_one_graph() -> None:
    weight, bias = parameters(40)
    norm = Norm("layer", through=BF16)

    def both(x: Tensor, scale: Tensor, gathered: Tensor) -> Any:
        out = norm_cast(x, norm, weight, bias, E4M3, scale, gathered=gathered, return_output=True)
        result = norm_output(x, Norm("rms"), weight, None)
        return *out, result.output, result.amaxes, result.rstd

    function = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (20, 33):
        x, scale = torch.randn(rows, 40).to(BF16), torch.tensor(SCALE)
        gathered, expected_gathered = torch.tensor(0.1), torch.tensor(0.1)
        assert_same(function(x, scale, gathered), both(x, scale, expected_gathered))
        assert gathered == expected_gathered > 1


# The twin.


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    from octavo.kernels.norm_cast import triton_kernel

    exact_conversions(monkeypatch)
    return triton_kernel


@interpreted
@silent
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [*FULL_SHAPES, (40, 300)], ids=str)
def test_the_twin_is_its_reference(kernels: Any, shape: tuple[int, int], kind: str) -> None:
    cases = itertools.product((BF16, torch.float16, torch.float32), (None, BF16))
    for number, (dtype, through) in enumerate(cases):
        weight, bias = parameters(shape[1], (torch.float32, BF16)[number % 2])
        weight, bias = (weight, bias) if number % 4 < 2 else (weight if number % 4 == 2 else None, None)
        norm = Norm(kind, (1e-5).hex(), bool(number % 2), through)
        x = rows_of(shape, dtype)
        several = number == 0 and shape == (17, 31)
        for _, view in list(memory_orders(x))[: None if several else 1]:
            run_norm(kernels.norm_cast_triton, view, norm, weight, bias, number)


@interpreted
@silent
def test_every_block_gives_the_same(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks for long rows, for many rows, and few programs that take turns."""
    for block, programs in (((32, 64, 8, 0), 3), ((16, 128, 4, 1), 1), ((32, 256, 8, 0), 2)):
        monkeypatch.setattr(kernels, "_cast_block", lambda x, b=block, p=programs: (kernels.Block(*b), p))
        for number, shape in enumerate(((90, 128), (70, 200))):
            run_norm(
                kernels.norm_cast_triton, rows_of(shape), Norm("layer", through=BF16), *parameters(shape[1]), number
            )


@interpreted
@silent
def test_an_infinite_result_leaves_the_largest_finite_one_to_be_gathered(kernels: Any) -> None:
    x = rows_of((40, 50), torch.float32)
    weight, bias = parameters(50)
    weight[7], bias[9], weight[10] = float("inf"), -float("inf"), 1e30
    for number, through in enumerate((None, torch.float16)):
        run_norm(kernels.norm_cast_triton, x, Norm("layer", through=through), weight, bias, number)


@interpreted
@silent
@pytest.mark.parametrize("kind", KINDS)
def test_the_twin_of_the_output_is_its_reference(kernels: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = {bytes: (block, 4) for bytes, (block, _) in kernels._OUTPUT_BLOCKS.items()}
    monkeypatch.setattr(kernels, "_OUTPUT_BLOCKS", blocks)
    for number, shape in enumerate([*FULL_SHAPES, (150, 40)]):
        weight, bias = parameters(shape[1])
        norm = Norm(kind, through=(None, BF16)[number % 2])
        x = rows_of(shape, (BF16, torch.float32)[number % 2])
        output, amaxes, mean, rstd = kernels.norm_output_triton(x, norm, weight, bias)
        assert amaxes.numel() & (amaxes.numel() - 1) == 0
        assert amaxes.numel() <= 4
        y = normalised(x, norm, weight, bias, mean, rstd).to(norm.through or x.dtype)
        largest = torch.where(y.isfinite(), y, 0).abs().max().float()
        assert_same((output, amaxes.amax()), (y, largest))


@interpreted
@silent
def test_a_mean_that_dwarfs_the_spread_costs_no_accuracy(kernels: Any) -> None:
    x = torch.randn(32, 512) + 1000
    _, _, _, _, mean, rstd = kernels.norm_cast_triton(x, Norm("layer"), None, None, E4M3, torch.tensor(1.0))
    x64 = x.double()
    exact_rstd = (x64.var(1, correction=0) + 1e-5).rsqrt()
    # Sums of squares without a shift would lose 20 of 24 bits.
    assert ((rstd.double() - exact_rstd).abs() <= 1e-5 * exact_rstd).all()
    assert ((mean.double() - x64.mean(1)).abs() <= 1000 * 2.0**-23).all()


# What Triton makes of it.


@pytest.mark.parametrize("columns", [1280, 4096, 14336])
def test_rows_are_read_and_codes_written_sixteen_bytes_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, columns: int
) -> None:
    pytest.importorskip("triton")
    from tests.kernels.variants import launches_of

    from octavo.kernels.norm_cast import triton_kernel

    x, scale = torch.empty(8192, columns, dtype=BF16), torch.ones(())
    weight, bias = parameters(columns, BF16)
    monkeypatch.setattr(triton_kernel, "_FEW_ROWS", 0)

    def call() -> None:
        triton_kernel.norm_cast_triton(x, Norm("layer", through=BF16), weight, bias, E4M3, scale, scale)

    [launch] = launches_of(monkeypatch, triton_kernel, "_launch_kernel", call)
    ptx, stack = compiled_with(triton_kernel, launch, tmp_path)
    # 16 elements a thread of even rows and as many of odd ones: in each sweep four loads of x; two stores a layout.
    assert len(re.findall(r"ld\.global\.L1::evict_last\S*\.v4\.b32", ptx)) == 4
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == 4
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert "cvt.rn.bf16x2.f32" in ptx
    # Statistics by rounding divisions and roots; products and sums apart: what is fused is in those alone.
    assert "sqrt.rn.f32" in ptx
    assert "div.rn.f32" in ptx
    assert not re.search(r"\bfma\.rn\.f32|\bmad\.", ptx.replace("mad.lo", "").replace("mad.wide", ""))
    assert ".ftz" not in ptx
    # What does not fit into 128 registers lies outside of the loops.
    assert stack <= 32


def compiled_with(module: Any, launch: Any, folder: Any) -> tuple[str, int]:
    """(PTX, bytes of the stack) of a launch with the options of its module."""
    import triton
    from tests.kernels.variants import HOPPER, specialized, stack_and_local_bytes
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = module.norm_cast_kernel
    names, kinds = kernel.arg_names, specialized(kernel, launch)
    source = ASTSource(
        fn=kernel,
        signature={name: kind for name, (kind, _) in zip(names, kinds, strict=True)},
        constexprs={(place,): value for place, (kind, value) in enumerate(kinds) if kind == "constexpr"},
        attrs={(place,): [["tt.divisibility", 16]] for place, (_, about) in enumerate(kinds) if about == "D"},
    )
    options = {"num_warps": launch.warps} | module.OPTIONS
    variant = triton.compile(source, target=GPUTarget("cuda", HOPPER, 32), options=options)
    return str(variant.asm["ptx"]), sum(stack_and_local_bytes(variant, folder))


def test_equal_keys_are_one_variant_of_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from tests.kernels.variants import launches_of, specialized

    from octavo.kernels.norm_cast import triton_kernel

    scale = torch.ones(2)

    def call() -> None:
        for shape, dtype, kind in itertools.product(
            [(1, 1), (16, 16), (7, 13), (40, 48)], (BF16, torch.float32), KINDS
        ):
            wide = torch.ones(shape[0], shape[1] + 1, dtype=dtype)
            for x in (torch.ones(shape, dtype=dtype), wide[:, 1:]):
                for number in (0, 1):
                    weight = torch.ones(shape[1] + 1, dtype=(dtype, BF16)[number])[number:][: shape[1]]
                    norm = Norm(kind, zero_centered=bool(number), through=(None, BF16)[number])
                    triton_kernel.norm_cast_triton(
                        x, norm, weight, (weight, None)[number], E4M3, scale[number], scale[1], bool(number), not number
                    )
                    triton_kernel.norm_output_triton(x, norm, weight, None)

    variants: dict[Any, Any] = {}
    for launch in launches_of(monkeypatch, triton_kernel, "_launch_kernel", call):
        variant = specialized(triton_kernel.norm_cast_kernel, launch)
        assert variants.setdefault((launch.key, launch.warps), variant) == variant, launch.key
    assert len(variants) > 20


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_the_twin_is_its_reference(kind: str) -> None:
    shapes = [*FULL_SHAPES, (5000, 1280), (4500, 4096), (300, 16384), (130, 9001)]
    for number, (shape, through) in enumerate(itertools.product(shapes, (None, BF16))):
        weight, bias = parameters(shape[1], device="cuda")
        x = rows_of(shape, (BF16, torch.float32)[number % 2], "cuda")
        run_norm(
            lambda x, n, w, b, f, s, g, c, o: norm_cast(
                x, n, w, b, f, s, gathered=g, columnwise=c, return_output=o
            ),
            x, Norm(kind, through=through), weight, bias, number,
        )  # fmt: skip


@pytest.mark.gpu
def test_on_a_gpu_few_codes_differ_from_those_of_exact_statistics() -> None:
    x, (weight, bias) = torch.randn(4096, 4096, device="cuda").to(BF16), parameters(4096, device="cuda")
    norm, scale = Norm("layer", through=BF16), torch.tensor(SCALE, device="cuda")
    found = norm_cast(x, norm, weight, bias, E4M3, scale)
    expected = norm_cast_reference(x, norm, weight, bias, E4M3, scale)
    steps = steps_between(found.codes, expected[0])
    # A result within a relative d of the middle of two bf16 values (256 a binade) may round to the other one, and one
    # in about 16 of those to another code: 2 * 256 d / 16 to 2 * 256 d, d being some 2^-22 of statistics and result.
    assert steps.max() <= 1
    assert (steps > 0).float().mean() <= 512 * 2.0**-22
