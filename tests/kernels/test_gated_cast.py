"""gated_cast: its reference against that of activation_cast on halves of one matrix, its twin against the reference."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from tests.kernels.agreement import assert_same
from tests.kernels.exact_activations import assert_codes_within, input_of, result_range
from tests.kernels.fused_twins import ACTIVATION_SCALE as SCALE
from tests.kernels.interpreting import exact_conversions, interpreted, silent
from tests.kernels.matrices import SHAPES, memory_orders, with_specials
from torch import Tensor

from octavo.formats import E4M3, E5M2
from octavo.kernels.activation_cast import activation_cast, activation_output
from octavo.kernels.activations import GATED
from octavo.kernels.gated_cast import (
    gated_cast,
    gated_cast_reference,
    gated_output,
    gated_output_reference,
    unsupported_reasons,
)

BF16 = torch.bfloat16
FULL_SHAPES = [shape for shape in SHAPES if shape[0] and shape[1]]
BASES = {base: kind for kind, base in GATED.items()}


def halves(shape: tuple[int, int], activation: str, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    return input_of(shape, activation, dtype, device), input_of(shape, activation, dtype, device)


@pytest.mark.parametrize("through", [None, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", BASES)
def test_two_matrices_give_the_codes_of_their_halves_in_one(activation: str, through: torch.dtype | None) -> None:
    # (64 columns: torch's vector code rounds an exponential otherwise than its code for the rest of a row.)
    gate, up = halves((50, 64), activation, BF16)
    gate[3, 4], up[4, 5], gate[5, 6] = float("inf"), float("nan"), float("-inf")
    scale, gathered, expected_gathered = torch.tensor(SCALE), torch.tensor(0.5), torch.tensor(0.5)
    found = gated_cast(gate, up, activation, E4M3, scale, through=through, gathered=gathered)
    both = torch.cat([gate, up], 1)
    expected = activation_cast(both, BASES[activation], E4M3, scale, through=through, gathered=expected_gathered)
    assert_same((*found, gathered), (*expected, expected_gathered))
    assert found.scale.data_ptr() != scale.data_ptr()
    dtype = through or torch.float32
    assert_same(gated_output(gate, up, activation, dtype), activation_output(both, BASES[activation], dtype))


def test_the_first_matrix_is_the_one_that_is_activated() -> None:
    gate, up = torch.tensor([[-2.0, 3.0]]), torch.tensor([[5.0, -7.0]])
    assert gated_output(gate, up, "relu", torch.float32).output.tolist() == [[0.0, -21.0]]


def test_what_is_not_wanted_is_not_there_and_what_is_gathered_only_grows() -> None:
    gate, up, gathered = torch.randn(20, 64), torch.randn(20, 64), torch.tensor(1e6)
    found = gated_cast(gate, up, "silu", E5M2, torch.tensor(0.01), gathered=gathered, columnwise=False)
    assert gathered == 1e6
    assert found.codes_t is None
    assert found.codes is not None
    assert found.codes.dtype == torch.float8_e5m2
    assert gated_cast(gate, up, "silu", E5M2, torch.tensor(0.01), rowwise=False).codes is None


def test_bad_arguments_are_named() -> None:
    gate, one = torch.randn(4, 8), torch.ones(())
    with pytest.raises(ValueError, match=r"up has shape \(4, 7\); for a gate of shape \(4, 8\) it takes the same"):
        gated_cast(gate, torch.randn(4, 7), "silu", E4M3, one)
    with pytest.raises(ValueError, match=r"unknown activation 'swiglu' of a gate: expected one of gelu_tanh, "):
        gated_cast(gate, gate, "swiglu", E4M3, one)
    with pytest.raises(ValueError, match=r"as up \[M, K\], found torch.int64"):
        gated_output(gate, gate.long(), "silu", BF16)
    with pytest.raises(ValueError, match="one float32 scale"):
        gated_cast(gate, gate, "silu", E4M3, one.double())
    assert "need a CUDA device" in unsupported_reasons(gate, E4M3)[0]


@pytest.mark.slow
def test_compiled_code_gives_the_same_bits_in_one_graph() -> None:
    def both(gate: Tensor, up: Tensor, scale: Tensor, gathered: Tensor) -> Any:
        out = gated_cast(gate, up, "silu", E4M3, scale, through=BF16, gathered=gathered)
        only = gated_cast(gate, up, "gelu_tanh", E4M3, scale, rowwise=False)
        return *out, only.codes_t, *gated_output(gate, up, "relu", BF16)

    function = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (20, 33):
        gate, up = torch.randn(rows, 40).to(BF16), torch.randn(rows, 40).to(BF16)
        scale, gathered, expected_gathered = torch.tensor(SCALE), torch.tensor(0.1), torch.tensor(0.1)
        assert_same(function(gate, up, scale, gathered), both(gate, up, scale, expected_gathered))
        assert gathered == expected_gathered > 1


# The twin.


def twin_is_reference(function: Any, gate: Tensor, up: Tensor, activation: str, number: int) -> None:
    """Of relu kinds bit for bit; of the others within what the twin's function is allowed, see `exact_activations`."""
    through, format = (None, BF16, torch.float16)[number % 3], (E4M3, E5M2)[number % 2]
    rowwise, columnwise = number % 4 != 2, number % 4 != 3
    scale = torch.tensor(SCALE, device=gate.device)
    gathered, expected_gathered = torch.full((2,), 2.0**-7, device=gate.device).unbind()
    arguments = (gate, up, activation, format, scale, through)
    codes, used, codes_t = function(*arguments, gathered, rowwise, columnwise)
    assert used == scale
    if activation in ("relu", "srelu"):
        expected = gated_cast_reference(*arguments, expected_gathered, rowwise, columnwise)
        assert_same((codes, used, codes_t, gathered), (*expected, expected_gathered))
        return
    allowed = result_range(torch.cat([gate, up], 1), BASES[activation])
    assert_codes_within(codes, codes_t, gathered, allowed, scale, through, 2.0**-7)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    from octavo.kernels.gated_cast import triton_kernel

    exact_conversions(monkeypatch)
    return triton_kernel


@interpreted
@silent
@pytest.mark.parametrize("activation", BASES)
def test_the_twin_is_its_reference(kernels: Any, activation: str) -> None:
    for number, shape in enumerate([*FULL_SHAPES, (70, 130)]):
        gate, up = halves(shape, activation, (BF16, torch.float16, torch.float32)[number % 3])
        if activation == "relu":
            gate, up = with_specials(gate), with_specials(up)
        twin_is_reference(kernels.gated_cast_triton, gate, up, activation, number)
        if shape == (17, 31):
            for (_, a), (_, b) in zip(memory_orders(gate), reversed(list(memory_orders(up))), strict=True):
                twin_is_reference(kernels.gated_cast_triton, a, b, activation, number)


def output_is_reference(function: Any, device: str) -> None:
    for shape in [*FULL_SHAPES, (150, 40)]:
        gate, up = (with_specials(half) for half in halves(shape, "relu", BF16, device))
        output, amaxes = function(gate, up, "relu", BF16)
        assert amaxes.numel() & (amaxes.numel() - 1) == 0
        expected, largest = gated_output_reference(gate, up, "relu", BF16)
        assert_same((output, amaxes.amax()), (expected, largest[0]))


@interpreted
@silent
def test_the_twin_of_the_output_is_its_reference(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_OUTPUT_BLOCK", 512)
    monkeypatch.setattr("octavo.kernels.activation_cast.triton_kernel._MOST_PARTIALS", 4)
    output_is_reference(kernels.gated_output_triton, "cpu")


# What Triton makes of it.


def test_blocks_are_read_and_written_sixteen_bytes_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    pytest.importorskip("triton")
    from tests.kernels.variants import compiled, launches_of, stack_and_local_bytes

    from octavo.kernels.gated_cast import triton_kernel

    (gate, up), scale = halves((8192, 512), "silu", BF16), torch.ones(())

    def call() -> None:
        triton_kernel.gated_cast_triton(gate, up, "silu", E4M3, scale, BF16, scale)

    [launch] = launches_of(monkeypatch, triton_kernel, "_launch_cast", call)
    variant = compiled(triton_kernel.gated_cast_kernel, launch)
    ptx = variant.asm["ptx"]
    # 16 elements a thread of even rows, as many of odd ones: four loads a matrix; two stores a layout.
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == 8
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == 4
    assert ptx.count("ex2.approx.ftz.f32") == 32
    assert sum(stack_and_local_bytes(variant, tmp_path)) == 0


def test_equal_keys_are_one_variant_of_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from tests.kernels.variants import launches_of, specialized

    from octavo.kernels.gated_cast import triton_kernel

    scale = torch.ones(2)

    def call(function: str) -> None:
        shapes = [(1, 2), (16, 32), (7, 14), (40, 64)]
        for (rows, columns), dtype, number in itertools.product(shapes, (BF16, torch.float32), (0, 1)):
            gate, up = torch.ones(rows, columns, dtype=dtype), torch.ones(rows, columns + 1, dtype=BF16)[:, 1:]
            for a, b in ((gate, up), (up, gate), (gate, gate)):
                through = (None, BF16)[number]
                if function == "_launch_output":
                    triton_kernel.gated_output_triton(a, b, "silu", through or torch.float32)
                else:
                    flags = (bool(number), True) if number else (True, False)
                    triton_kernel.gated_cast_triton(a, b, "silu", E4M3, scale[number], through, scale[1], *flags)

    for launcher, kernel in (
        ("_launch_cast", triton_kernel.gated_cast_kernel),
        ("_launch_output", triton_kernel.gated_output_kernel),
    ):
        variants: dict[Any, Any] = {}
        for launch in launches_of(monkeypatch, triton_kernel, launcher, lambda launcher=launcher: call(launcher)):
            variant = specialized(kernel, launch)
            assert variants.setdefault((launch.key, launch.warps), variant) == variant, launch.key
        assert len(variants) > 10


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("activation", BASES)
def test_on_a_gpu_the_twin_is_its_reference(activation: str) -> None:
    def function(a: Tensor, b: Tensor, f: str, form: Any, s: Tensor, t: Any, g: Tensor, r: bool, c: bool) -> Any:
        return gated_cast(a, b, f, form, s, through=t, gathered=g, rowwise=r, columnwise=c)

    for number, shape in enumerate([*FULL_SHAPES, (70, 130), (4096, 1280), (1000, 4501)]):
        gate, up = halves(shape, activation, (BF16, torch.float16, torch.float32)[number % 3], "cuda")
        twin_is_reference(function, gate, up, activation, number)


@pytest.mark.gpu
def test_on_a_gpu_the_output_is_its_reference() -> None:
    output_is_reference(gated_output, "cuda")


@pytest.mark.gpu
def test_on_a_gpu_compiled_code_gives_the_bits_of_eager_code() -> None:
    def both(gate: Tensor, up: Tensor, scale: Tensor, gathered: Tensor) -> Any:
        out = gated_cast(gate, up, "silu", E4M3, scale, through=BF16, gathered=gathered)
        return *out, gated_cast(gate, up, "silu", E4M3, scale, through=BF16, columnwise=False).codes

    gate, up = halves((300, 512), "silu", BF16, "cuda")
    scale, (gathered, expected) = torch.tensor(SCALE, device="cuda"), torch.zeros(2, device="cuda").unbind()
    assert_same(torch.compile(both, fullgraph=True)(gate, up, scale, gathered), both(gate, up, scale, expected))
    assert gathered == expected > 0
