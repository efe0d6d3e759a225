"""activation_backward_cast: the reference against autograd and Octavo's cast, the twin against the reference."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from tests.kernels.agreement import assert_same
from tests.kernels.exact_activations import exact_gradient, gradient_range, input_of
from tests.kernels.fused_twins import GRADIENT_SCALE as SCALE
from tests.kernels.fused_twins import finite_bf16, gradient_is_reference, gradients, specials, within_range
from tests.kernels.interpreting import exact_conversions, interpreted, silent
from tests.kernels.matrices import SHAPES, memory_orders
from torch import Tensor

from octavo.formats import E4M3, E5M2, cast
from octavo.kernels.activation_backward_cast import (
    activation_backward_cast,
    activation_backward_output,
    activation_backward_output_reference,
    unsupported_reasons,
)
from octavo.kernels.activations import ACTIVATIONS, GATED
from octavo.kernels.cast_transpose import ScaleRule, cast_transpose

BF16 = torch.bfloat16
FULL_SHAPES = [shape for shape in SHAPES if shape[0] and shape[1]]


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name not in GATED])
def test_the_reference_is_autograds_gradient_at_every_bf16(activation: str) -> None:
    x = finite_bf16()
    grad = torch.ones_like(x)
    within_range(activation_backward_output_reference(grad, x, activation, torch.float32)[0], grad, x, activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_reference_is_autograds_gradient_of_random_data(activation: str) -> None:
    x, grad = input_of((60, 50), activation, torch.float32), torch.randn(60, 50)
    found = activation_backward_output(grad, x, activation, torch.float32).output
    assert found.shape == x.shape
    within_range(found, grad, x, activation)


@pytest.mark.parametrize("activation", ["relu", "srelu"])
def test_at_kinks_and_where_nothing_is_finite_the_gradient_is_torchs(activation: str) -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[0.0, -0.0, inf, -inf, nan, 1.0, -1.0, 2.0, 0.0]])
    grad = torch.tensor([[1.0, nan, 1.0, nan, 1.0, nan, inf, inf, inf]])
    found = activation_backward_output(grad, x, activation, torch.float32).output
    assert_same((found.abs(),), (exact_gradient(grad, x, activation).abs(),))


@pytest.mark.parametrize("inf_to_nan", [False, True])
@pytest.mark.parametrize("through", [None, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["gelu_erf", "reglu"])
def test_codes_and_sums_are_those_of_the_gradient_rounded_on_the_way(
    activation: str, through: torch.dtype | None, inf_to_nan: bool
) -> None:
    x, grad = input_of((50, 70), activation, BF16), torch.randn(50, 70).to(BF16)
    x[3, 4], grad[4, 5], grad[5, 6] = 5.0, float("inf"), float("nan")
    scale, gathered = torch.tensor(SCALE), torch.tensor(0.5)
    out = activation_backward_cast(
        grad, x, activation, E5M2, scale, through=through, gathered=gathered, inf_to_nan=inf_to_nan, column_sum=True
    )
    dx = activation_backward_output(grad, x, activation, torch.float32).output
    dx = dx if through is None else dx.to(through).float()
    scaled = dx * (1 / scale)
    expected = cast(torch.where(dx.isinf(), float("nan"), scaled) if inf_to_nan else scaled, E5M2)
    rows, columns = x.shape
    assert torch.equal(out.codes[:rows, :columns].view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(out.codes_t.view(torch.uint8), out.codes.view(torch.uint8).t())
    assert not out.codes.view(torch.uint8)[rows:].any()
    assert not out.codes.view(torch.uint8)[:, columns:].any()
    assert gathered == dx[dx.isfinite()].abs().max()
    # float32 sums of 50 rows: at most 50 roundings of the sum of magnitudes.
    error = (out.column_sum.double() - dx.double().sum(0)).abs()
    assert (error <= 50 * 2.0**-24 * dx.double().abs().sum(0))[dx.isfinite().all(0)].all()
    assert torch.equal(out.column_sum.isfinite(), dx.isfinite().all(0))
    assert out.scale == scale
    assert out.scale.data_ptr() != scale.data_ptr()


def test_what_is_gathered_only_grows_and_sums_come_only_if_wanted() -> None:
    x, grad, gathered = torch.randn(20, 64), torch.randn(20, 64), torch.tensor(1e6)
    out = activation_backward_cast(grad, x, "silu", E4M3, torch.tensor(0.01), gathered=gathered)
    assert gathered == 1e6
    assert out.column_sum is None
    assert out.codes.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("shape", [(0, 6), (6, 0), (0, 0)], ids=str)
def test_an_empty_matrix_has_empty_codes_and_sums_of_zero(shape: tuple[int, int]) -> None:
    grad = torch.empty(shape[0], shape[1] // 2)
    out = activation_backward_cast(grad, torch.empty(shape), "swiglu", E5M2, torch.tensor(1.0), column_sum=True)
    assert out.codes.shape == tuple(-(-n // 16) * 16 for n in shape)
    assert out.column_sum.tolist() == [0.0] * shape[1]
    assert activation_backward_output(grad, torch.empty(shape), "swiglu", BF16).amaxes.tolist() == [0.0]


def test_the_gradient_in_high_precision_and_its_amax_leave_the_cast_to_cast_transpose() -> None:
    x, grad = input_of((40, 48), "swiglu", BF16), torch.randn(40, 48).to(BF16)
    result = activation_backward_output(grad, x, "swiglu", BF16)
    assert result.amaxes.amax() == result.output.abs().max().float()
    by_amax = cast_transpose(
        result.output, E5M2, result.amaxes, result.amaxes, rule=ScaleRule(), inf_to_nan=True, column_sum=True
    )
    by_scale = activation_backward_cast(grad, x, "swiglu", E5M2, by_amax.scale, through=BF16, column_sum=True)
    assert_same(tuple(by_scale), (by_amax.codes, by_amax.scale, by_amax.codes_t, by_amax.column_sum))


def test_bad_arguments_are_named() -> None:
    x, one = torch.randn(4, 8), torch.ones(())
    with pytest.raises(ValueError, match=r"grad has shape \(4, 8\); for swiglu of x .* it takes \[4, 4\]"):
        activation_backward_cast(x, x, "swiglu", E5M2, one)
    with pytest.raises(ValueError, match=r"unknown activation 'tanh'"):
        activation_backward_output(x, x, "tanh", BF16)
    with pytest.raises(ValueError, match=r"as grad \[M, K\], found torch.int64"):
        activation_backward_cast(x.long(), x, "relu", E5M2, one)
    with pytest.raises(ValueError, match="one float32 scale"):
        activation_backward_cast(x, x, "relu", E5M2, torch.ones(4, 1))
    with pytest.raises(ValueError, match=r"rounds through .* found torch.float64"):
        activation_backward_cast(x, x, "relu", E5M2, one, through=torch.float64)
    assert "need a CUDA device" in unsupported_reasons(x, E4M3)[0]


@pytest.mark.slow
def test_compiled_code_gives_the_same_bits_in_one_graph() -> None:
    def both(grad: Tensor, x: Tensor, scale: Tensor, gathered: Tensor) -> Any:
        out = activation_backward_cast(grad, x, "swiglu", E5M2, scale, through=BF16, gathered=gathered, column_sum=True)
        return *out, *activation_backward_output(x, x, "relu", BF16)

    function = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (20, 33):
        grad, x, scale = torch.randn(rows, 40).to(BF16), torch.randn(rows, 80).to(BF16), torch.tensor(SCALE)
        gathered, expected_gathered = torch.tensor(0.1), torch.tensor(0.1)
        assert_same(function(grad, x, scale, gathered), both(grad, x, scale, expected_gathered))
        assert gathered == expected_gathered > 1


# The twin.


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    from octavo.kernels.activation_backward_cast import triton_kernel

    exact_conversions(monkeypatch)
    return triton_kernel


@interpreted
@silent
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_twin_is_its_reference(kernels: Any, activation: str) -> None:
    for number, shape in enumerate([*FULL_SHAPES, (70, 130), (20, 60)]):
        dtype, through = (BF16, torch.float16, torch.float32)[number % 3], (None, BF16, torch.float16)[number % 3]
        grad = gradients(shape, dtype)
        x = specials(input_of(shape, activation, dtype), grad, activation)
        gradient_is_reference(kernels.activation_backward_cast_triton, grad, x, activation, through, number)
        if shape == (17, 31) and activation in ("relu", "swiglu"):
            for (_, a), (_, b) in zip(memory_orders(grad), memory_orders(x), strict=True):
                gradient_is_reference(kernels.activation_backward_cast_triton, a, b, activation, through, number)


@interpreted
@silent
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name not in GATED])
def test_the_twins_gradient_lies_within_its_bound_at_every_bf16(kernels: Any, activation: str) -> None:
    """With exact exponentials and reciprocals in place of the hardware's: the form's own error."""
    x = finite_bf16()
    grad = torch.ones_like(x)
    within_range(kernels.activation_backward_output_triton(grad, x, activation, torch.float32)[0], grad, x, activation)


@interpreted
@silent
def test_the_twin_of_the_output_is_its_reference(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_OUTPUT_BLOCK", 512)
    monkeypatch.setattr("octavo.kernels.activation_cast.triton_kernel._MOST_PARTIALS", 4)
    output_is_reference(kernels.activation_backward_output_triton, "cpu")


def output_is_reference(function: Any, device: str) -> None:
    for shape, activation in itertools.product([*FULL_SHAPES, (150, 40)], ("relu", "sreglu", "swiglu")):
        grad = gradients(shape, BF16, device)
        x = specials(input_of(shape, activation, BF16, device), grad, activation)
        output, amaxes = function(grad, x, activation, BF16)
        assert amaxes.numel() & (amaxes.numel() - 1) == 0
        largest = torch.where(output.isfinite(), output, 0).abs().max().float()
        expected = activation_backward_output_reference(grad, x, activation, BF16)[0]
        if activation == "swiglu":
            low, high = gradient_range(grad, x, activation).rounded(BF16)
            sure = low.isfinite()
            assert ((low <= output) & (output <= high))[sure].all()
            assert not output[~sure].isfinite().any()
            expected = output
        assert_same((output, amaxes.amax()), (expected, largest))


# What Triton makes of it.


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu_erf", "swiglu", "relu"])
def test_blocks_are_read_and_written_sixteen_bytes_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, activation: str
) -> None:
    pytest.importorskip("triton")
    from tests.kernels.variants import compiled, launches_of, stack_and_local_bytes

    from octavo.kernels.activation_backward_cast import triton_kernel

    grad, x, scale = torch.empty(8192, 512, dtype=BF16), input_of((8192, 512), activation, BF16), torch.ones(())

    def call() -> None:
        triton_kernel.activation_backward_cast_triton(grad, x, activation, E5M2, scale, BF16, scale, True, True)

    [launch] = launches_of(monkeypatch, triton_kernel, "_launch_cast", call)
    variant = compiled(triton_kernel.activation_backward_cast_kernel, launch)
    ptx = variant.asm["ptx"]
    # 16 elements a thread of even rows, as many of odd ones: four loads an operand, four stores a half of the result.
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == (12 if activation in GATED else 8)
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == (8 if activation in GATED else 4)
    assert "cvt.rn.satfinite.e5m2x2.f32" in ptx
    assert not re.search(r"cvt\.rn\.bf16\.f32|div\.(full|approx)", ptx)
    # One exponential and one reciprocal an element, for function and gradient.
    exponentials = 0 if activation == "relu" else 32
    assert ptx.count("ex2.approx.ftz.f32") == exponentials
    assert ptx.count("rcp.approx.ftz.f32") == exponentials
    assert sum(stack_and_local_bytes(variant, tmp_path)) == 0


def test_equal_keys_are_one_variant_of_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from tests.kernels.variants import launches_of, specialized

    from octavo.kernels.activation_backward_cast import triton_kernel

    scale = torch.ones(2)

    def call(function: str) -> None:
        for shape, dtype, number in itertools.product(
            [(1, 1), (16, 16), (7, 7), (40, 48)], (BF16, torch.float32), (0, 1)
        ):
            for offset in (0, 1):
                activation, through = ("gelu_erf", "swiglu")[number], (None, BF16)[number]
                grad = torch.ones(shape[0], shape[1] + offset, dtype=dtype)[:, offset:]
                x = torch.ones(shape[0], shape[1] * (number + 1) + 3, dtype=BF16)[:, : shape[1] * (number + 1)]
                if function == "_launch_output":
                    triton_kernel.activation_backward_output_triton(grad, x, activation, through or torch.float32)
                else:
                    triton_kernel.activation_backward_cast_triton(
                        grad, x, activation, E5M2, scale[number], through, scale[1], bool(number), not offset
                    )

    for launcher, kernel in (
        ("_launch_cast", triton_kernel.activation_backward_cast_kernel),
        ("_launch_output", triton_kernel.activation_backward_output_kernel),
    ):
        variants: dict[Any, Any] = {}
        for launch in launches_of(monkeypatch, triton_kernel, launcher, lambda launcher=launcher: call(launcher)):
            variant = specialized(kernel, launch)
            assert variants.setdefault((launch.key, launch.warps), variant) == variant, launch.key
        assert len(variants) > 10


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_on_a_gpu_the_twin_is_its_reference(activation: str) -> None:
    def function(grad: Tensor, x: Tensor, a: str, f: Any, s: Tensor, t: Any, g: Tensor, n: bool, c: bool) -> Any:
        return activation_backward_cast(grad, x, a, f, s, through=t, gathered=g, inf_to_nan=n, column_sum=c)

    for number, shape in enumerate([*FULL_SHAPES, (70, 130), (20, 60), (4096, 1280), (1000, 9002)]):
        dtype, through = (BF16, torch.float16, torch.float32)[number % 3], (None, BF16, torch.float16)[number % 3]
        grad = gradients(shape, dtype, "cuda")
        x = specials(input_of(shape, activation, dtype, "cuda"), grad, activation)
        gradient_is_reference(function, grad, x, activation, through, number)


@pytest.mark.gpu
def test_on_a_gpu_the_twins_gradient_lies_within_its_bound_at_every_bf16() -> None:
    x = finite_bf16("cuda")
    grad = torch.ones_like(x)
    for activation in ACTIVATIONS:
        if activation not in GATED:
            found = activation_backward_output(grad, x, activation, torch.float32).output
            within_range(found, grad, x, activation)


@pytest.mark.gpu
def test_on_a_gpu_the_output_is_its_reference() -> None:
    output_is_reference(activation_backward_output, "cuda")


@pytest.mark.gpu
def test_on_a_gpu_sums_are_the_same_in_every_run() -> None:
    x, grad = input_of((9000, 1280), "gelu_erf", BF16, "cuda"), gradients((9000, 1280), BF16, "cuda")
    scale = torch.tensor(SCALE, device="cuda")
    first, again = (
        activation_backward_cast(grad, x, "gelu_erf", E5M2, scale, column_sum=True).column_sum for _ in range(2)
    )
    assert_same((first,), (again,))
