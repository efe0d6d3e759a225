"""activation_cast: the reference against torch and Octavo's cast, the twin against the reference and float64."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from tests.kernels.agreement import assert_same
from tests.kernels.exact_activations import exact, input_of
from tests.kernels.fused_twins import ACTIVATION_SCALE as SCALE
from tests.kernels.fused_twins import activation_is_reference, finite_bf16, with_some_specials, within_bounds
from tests.kernels.interpreting import exact_conversions, interpreted, silent
from tests.kernels.matrices import SHAPES, memory_orders, with_specials
from torch import Tensor

from octavo.formats import E4M3, E5M2, cast
from octavo.kernels.activation_cast import (
    activation_cast,
    activation_cast_reference,
    activation_output,
    activation_output_reference,
    unsupported_reasons,
)
from octavo.kernels.activations import ACTIVATIONS, GATED
from octavo.kernels.cast_transpose import ScaleRule, cast_transpose

BF16 = torch.bfloat16
FULL_SHAPES = [shape for shape in SHAPES if shape[0] and shape[1]]


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name not in GATED])
def test_the_reference_is_torchs_function_at_every_bf16(activation: str) -> None:
    within_bounds(activation_output_reference(finite_bf16(), activation, torch.float32)[0], finite_bf16(), activation)


@pytest.mark.parametrize("activation", GATED)
def test_of_a_gated_kind_the_first_half_is_activated(activation: str) -> None:
    x = torch.randn(40, 60)
    found = activation_output(x, activation, torch.float32).output
    assert found.shape == (40, 30)
    torch.testing.assert_close(found.double(), exact(x.double(), activation), rtol=1e-5, atol=1e-6)
    swapped = torch.cat([x[:, 30:], x[:, :30]], dim=1)
    assert (activation_output(swapped, activation, torch.float32).output - found).abs().max() > 0.1


@pytest.mark.parametrize("through", [None, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["gelu_tanh", "srelu", "swiglu", "sigmoid"])
def test_codes_are_the_cast_of_the_result_rounded_on_the_way(activation: str, through: torch.dtype | None) -> None:
    x, scale, gathered = input_of((50, 70), activation, BF16), torch.tensor(SCALE), torch.tensor(0.5)
    x[3, 4], x[4, 5] = float("inf"), float("nan")
    out = activation_cast(x, activation, E4M3, scale, through=through, gathered=gathered)
    y = activation_output(x, activation, torch.float32).output
    y = y if through is None else y.to(through).float()
    expected = cast(y * (1 / scale), E4M3)
    assert torch.equal(out.codes[:50, :70].view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(out.codes_t.view(torch.uint8), out.codes.view(torch.uint8).t())
    assert not out.codes.view(torch.uint8)[50:].any()
    assert not out.codes.view(torch.uint8)[:, 70:].any()
    assert (out.codes.shape, out.codes_t.shape) == ((64, 80), (80, 64))
    assert gathered == y[y.isfinite()].abs().max()
    assert out.scale == scale
    assert out.scale.data_ptr() != scale.data_ptr()


def test_what_is_gathered_only_grows_and_what_is_not_wanted_is_not_there() -> None:
    x, scale, gathered = torch.randn(20, 64), torch.tensor(0.01), torch.tensor(1e6)
    out = activation_cast(x, "relu", E5M2, scale, gathered=gathered, columnwise=False)
    assert gathered == 1e6
    assert out.codes_t is None
    assert out.codes.dtype == torch.float8_e5m2
    assert activation_cast(x, "relu", E5M2, scale, rowwise=False).codes is None


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_zeros_nan_and_infinity_pass_as_through_torch(activation: str) -> None:
    columns = 2 if activation in GATED else 1
    values = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e30, -1e30])
    x = values[:, None].repeat(1, columns)
    x[:, columns - 1] = 1.0 if columns == 2 else x[:, 0]
    found = activation_output(x, activation, torch.float32).output
    expected = exact(x.double(), activation).float()
    assert torch.equal(found.nan_to_num(-7.0), expected.nan_to_num(-7.0))


@pytest.mark.parametrize("shape", [(0, 6), (6, 0), (0, 0)], ids=str)
def test_an_empty_matrix_has_empty_codes(shape: tuple[int, int]) -> None:
    gathered = torch.tensor(2.0)
    out = activation_cast(torch.empty(shape), "swiglu", E4M3, torch.tensor(1.0), gathered=gathered)
    assert out.codes.shape == (-(-shape[0] // 16) * 16, -(-shape[1] // 32) * 16)
    assert gathered == 2.0
    assert activation_output(torch.empty(shape), "swiglu", BF16).amaxes.tolist() == [0.0]


def test_the_result_in_high_precision_and_its_amax_leave_the_cast_to_cast_transpose() -> None:
    x = input_of((40, 48), "geglu_erf", BF16)
    result = activation_output(x, "geglu_erf", BF16)
    assert result.amaxes.amax() == result.output.abs().max().float()
    by_amax = cast_transpose(result.output, E4M3, result.amaxes, result.amaxes, rule=ScaleRule())
    by_scale = activation_cast(x, "geglu_erf", E4M3, by_amax.scale, through=BF16)
    assert_same((by_scale.codes, by_scale.codes_t), (by_amax.codes, by_amax.codes_t))


def test_bad_arguments_are_named() -> None:
    x, one = torch.randn(4, 9), torch.ones(())
    with pytest.raises(ValueError, match=r"unknown activation 'mish': expected one of gelu_tanh, "):
        activation_cast(x, "mish", E4M3, one)
    with pytest.raises(ValueError, match=r"swiglu multiplies two halves .* found 9"):
        activation_cast(x, "swiglu", E4M3, one)
    with pytest.raises(ValueError, match=r"found torch.int64 of shape \(4, 9\)"):
        activation_cast(x.long(), "relu", E4M3, one)
    with pytest.raises(ValueError, match="one float32 scale"):
        activation_cast(x, "relu", E4M3, one.double())
    with pytest.raises(ValueError, match=r"found torch.float64"):
        activation_output(x, "relu", torch.float64)
    assert "need a CUDA device" in unsupported_reasons(x, E4M3)[0]


@pytest.mark.parametrize("through", [BF16, torch.float16], ids=str)
def test_factors_of_channels_come_after_the_rounding_and_change_the_exponent_alone(through: torch.dtype) -> None:
    """Codes, output and amax are those of the rounded result, times a power of two a column."""
    x, scale, gathered = input_of((30, 40), "swiglu", BF16), torch.tensor(2.0**-7), torch.tensor(0.0)
    channels = torch.exp2(torch.randint(-6, 7, (40,)).float())
    out = activation_cast(x, "swiglu", E4M3, scale, through=through, gathered=gathered, channels=channels)
    y = activation_output(x, "swiglu", through).output.float() * channels
    expected = cast_transpose(y, E4M3, scale, scale)
    assert_same((out.codes, out.codes_t), (expected.codes, expected.codes_t))
    assert gathered == y.abs().max()
    result = activation_output(x, "swiglu", torch.float32, channels)
    assert torch.equal(result.output, activation_output(x, "swiglu", torch.float32).output * channels)
    assert result.amaxes.amax() == result.output.abs().max()
    with pytest.raises(ValueError, match=r"float32 channels \[40\], .*, found torch.float32 of shape \(41,\)"):
        activation_cast(x, "swiglu", E4M3, scale, channels=torch.ones(41))


@pytest.mark.slow
def test_compiled_code_gives_the_same_bits_in_one_graph() -> None:
    def both(x: Tensor, scale: Tensor, gathered: Tensor) -> Any:
        out = activation_cast(x, "swiglu", E4M3, scale, through=BF16, gathered=gathered)
        only = activation_cast(x, "gelu_tanh", E4M3, scale, rowwise=False)
        return *out, only.codes_t, *activation_output(x, "srelu", BF16)

    function = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (20, 33):
        x, scale = torch.randn(rows, 40).to(BF16), torch.tensor(SCALE)
        gathered, expected_gathered = torch.tensor(0.1), torch.tensor(0.1)
        assert_same(function(x, scale, gathered), both(x, scale, expected_gathered))
        assert gathered == expected_gathered > 1


# The twin.


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    from octavo.kernels.activation_cast import triton_kernel

    exact_conversions(monkeypatch)
    return triton_kernel


@interpreted
@silent
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_twin_is_its_reference(kernels: Any, activation: str) -> None:
    for number, shape in enumerate([*FULL_SHAPES, (70, 130)]):
        dtype, through = (BF16, torch.float16, torch.float32)[number % 3], (None, BF16, torch.float16)[number % 3]
        x = with_some_specials(input_of(shape, activation, dtype), activation)
        several = shape == (17, 31) and activation in ("relu", "swiglu")
        for _, view in list(memory_orders(x))[: None if several else 1]:
            activation_is_reference(kernels.activation_cast_triton, view, activation, through, number)


@interpreted
@silent
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name not in GATED])
def test_the_twins_function_lies_within_its_bound_at_every_bf16(kernels: Any, activation: str) -> None:
    """With exact exponentials and reciprocals in place of the hardware's: the form's own error."""
    found, _ = kernels.activation_output_triton(finite_bf16(), activation, torch.float32)
    within_bounds(found, finite_bf16(), activation)


@interpreted
@silent
def test_what_pads_a_matrix_is_no_part_of_the_amax(kernels: Any) -> None:
    """sigmoid(0) is 1/2."""
    x, scale, gathered = torch.full((5, 7), -8.0), torch.tensor(SCALE), torch.zeros(())
    kernels.activation_cast_triton(x, "sigmoid", E4M3, scale, None, gathered)
    output, amaxes = kernels.activation_output_triton(x, "sigmoid", torch.float32)
    assert gathered == output[0, 0] == amaxes.amax() < 0.001


def channels_are_reference(cast_of: Any, output_of: Any, device: str) -> None:
    for shape in [*FULL_SHAPES, (70, 130)]:
        x = with_specials(input_of(shape, "reglu", BF16, device))
        scale, gathered, expected_gathered = torch.tensor(SCALE, device=device), *torch.zeros(2, device=device)
        channels = torch.exp2(torch.randint(-6, 7, (shape[1],), device=device).float())
        found = cast_of(x, "reglu", E4M3, scale, BF16, gathered, True, True, channels)
        expected = activation_cast_reference(x, "reglu", E4M3, scale, BF16, expected_gathered, True, True, channels)
        assert_same((*found, gathered), (*expected, expected_gathered))
        found, expected = output_of(x, "reglu", BF16, channels), activation_output_reference(x, "reglu", BF16, channels)
        assert_same((found[0], found[1].amax()), (expected[0], expected[1].amax()))


@interpreted
@silent
def test_the_twin_multiplies_its_channels(kernels: Any) -> None:
    channels_are_reference(kernels.activation_cast_triton, kernels.activation_output_triton, "cpu")


@interpreted
@silent
def test_the_twin_of_the_output_is_its_reference(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_OUTPUT_BLOCK", 512)
    monkeypatch.setattr(kernels, "_MOST_PARTIALS", 4)
    output_is_reference(kernels.activation_output_triton, "cpu")


def output_is_reference(function: Any, device: str) -> None:
    for shape, activation in itertools.product([*FULL_SHAPES, (150, 40)], ("relu", "sreglu", "silu")):
        x = with_specials(input_of(shape, activation, BF16, device))
        output, amaxes = function(x, activation, BF16)
        assert amaxes.numel() & (amaxes.numel() - 1) == 0
        largest = torch.where(output.isfinite(), output, 0).abs().max().float()
        expected = activation_output_reference(x, activation, BF16)[0]
        if activation == "silu":
            nan = expected.isnan()
            assert torch.equal(nan, output.isnan())
            assert ((output - expected).abs() <= expected.abs() * 2.0**-7 + 1e-30)[expected.isfinite()].all()
            expected = output
        assert_same((output, amaxes.amax()), (expected, largest))


# What Triton makes of it.


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu_erf", "swiglu", "relu"])
def test_blocks_are_read_and_written_sixteen_bytes_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, activation: str
) -> None:
    pytest.importorskip("triton")
    from tests.kernels.variants import compiled, launches_of, stack_and_local_bytes

    from octavo.kernels.activation_cast import triton_kernel

    x, scale = input_of((8192, 512), activation, BF16), torch.ones(())
    channels = torch.ones(512) if activation == "swiglu" else None

    def call() -> None:
        triton_kernel.activation_cast_triton(x, activation, E4M3, scale, BF16, scale, channels=channels)

    [launch] = launches_of(monkeypatch, triton_kernel, "_launch_cast", call)
    variant = compiled(triton_kernel.activation_cast_kernel, launch)
    ptx = variant.asm["ptx"]
    # 16 elements a thread of even rows, as many of odd ones: four loads, twice that if gated, and the factors of 16
    # columns; two stores a layout.
    factors = 0 if channels is None else 4
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == (8 if activation in GATED else 4) + factors
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == 4
    # Pairs are rounded and cast together; of exponentials and reciprocals one each an element.
    assert not re.search(r"cvt\.rn\.bf16\.f32", ptx)
    assert ptx.count("cvt.rn.bf16x2.f32") == 16
    exponentials = 0 if activation == "relu" else 32
    assert ptx.count("ex2.approx.ftz.f32") == exponentials
    assert ptx.count("rcp.approx.ftz.f32") == exponentials
    assert not re.search(r"div\.(full|approx)", ptx)
    assert sum(stack_and_local_bytes(variant, tmp_path)) == 0


def test_equal_keys_are_one_variant_of_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from tests.kernels.variants import launches_of, specialized

    from octavo.kernels.activation_cast import triton_kernel

    scale = torch.ones(2)

    def call(function: str) -> None:
        for shape, dtype, number in itertools.product(
            [(1, 2), (16, 32), (7, 14), (40, 64)], (BF16, torch.float32), (0, 1)
        ):
            for x in (torch.ones(shape, dtype=dtype), torch.ones(shape[0], shape[1] + 1, dtype=dtype)[:, 1:]):
                activation, through = ("gelu_tanh", "swiglu")[number], (None, BF16)[number]
                factors = torch.ones(x.shape[1] // (1 + number) + 1)
                for channels in (None, factors[:-1], factors[1:]):
                    if function == "_launch_output":
                        triton_kernel.activation_output_triton(x, activation, through or torch.float32, channels)
                        continue
                    flags = (bool(number), True) if number else (True, False)
                    arguments = (x, activation, E4M3, scale[number], through, scale[1], *flags, channels)
                    triton_kernel.activation_cast_triton(*arguments)

    for launcher, kernel in (
        ("_launch_cast", triton_kernel.activation_cast_kernel),
        ("_launch_output", triton_kernel.activation_output_kernel),
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
    def function(x: Tensor, a: str, f: Any, s: Tensor, t: Any, g: Tensor, rowwise: bool, columnwise: bool) -> Any:
        return activation_cast(x, a, f, s, through=t, gathered=g, rowwise=rowwise, columnwise=columnwise)

    for number, shape in enumerate([*FULL_SHAPES, (70, 130), (4096, 1280), (1000, 9002)]):
        dtype, through = (BF16, torch.float16, torch.float32)[number % 3], (None, BF16, torch.float16)[number % 3]
        x = with_some_specials(input_of(shape, activation, dtype, "cuda"), activation)
        activation_is_reference(function, x, activation, through, number)


@pytest.mark.gpu
def test_on_a_gpu_the_twins_function_lies_within_its_bound_at_every_bf16() -> None:
    for activation in ACTIVATIONS:
        if activation not in GATED:
            within_bounds(
                activation_output(finite_bf16("cuda"), activation, torch.float32).output.cpu(),
                finite_bf16(),
                activation,
            )


@pytest.mark.gpu
def test_on_a_gpu_the_twin_multiplies_its_channels() -> None:
    def function(
        x: Tensor, a: str, f: Any, s: Tensor, t: Any, g: Tensor, rowwise: bool, columnwise: bool, channels: Tensor
    ) -> Any:
        wanted = {"rowwise": rowwise, "columnwise": columnwise}
        return activation_cast(x, a, f, s, through=t, gathered=g, channels=channels, **wanted)

    channels_are_reference(function, activation_output, "cuda")


@pytest.mark.gpu
def test_on_a_gpu_the_output_is_its_reference() -> None:
    output_is_reference(activation_output, "cuda")
