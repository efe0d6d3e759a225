"""activation_channel_amax: the reference against torch, the twin against the reference and float64."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from tests.kernels.exact_activations import TRANSCENDENTAL, base_of, input_of, result_range
from tests.kernels.fused_twins import with_some_specials
from tests.kernels.interpreting import interpreted, silent
from tests.kernels.matrices import SHAPES, memory_orders
from torch import Tensor

from octavo.kernels.activation_cast import activation_output
from octavo.kernels.activation_channel_amax import (
    activation_channel_amax,
    activation_channel_amax_reference,
    unsupported_reasons,
)
from octavo.kernels.activations import ACTIVATIONS

BF16 = torch.bfloat16
# f(0) is not 0 of the last.
SOME = ("reglu", "swiglu", "sigmoid")
FULL_SHAPES = [shape for shape in SHAPES if shape[0] and shape[1] > 1]


@pytest.mark.parametrize("activation", ["swiglu", "gelu_tanh", "sreglu"])
def test_each_channel_has_the_largest_finite_magnitude_of_its_results(activation: str) -> None:
    x, gathered = input_of((50, 20), activation, BF16), torch.tensor(0.5)
    x[3, 4], x[7, 9] = float("inf"), float("nan")
    found = activation_channel_amax(x, activation, BF16, gathered)
    y = activation_output(x, activation, BF16).output
    expected = torch.where(y.isfinite(), y.abs(), 0).float().amax(0)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert gathered == expected.max()
    larger = torch.tensor(1e9)
    activation_channel_amax(x, activation, BF16, larger)
    assert larger == 1e9


def test_what_the_result_is_rounded_through_is_looked_at() -> None:
    x = torch.tensor([[1.0 + 2.0**-9]])
    assert activation_channel_amax(x, "relu") == 1.0 + 2.0**-9
    assert activation_channel_amax(x, "relu", BF16) == 1.0


@pytest.mark.parametrize("shape", [(0, 6), (6, 0), (0, 0)], ids=str)
def test_without_tokens_the_amaxes_are_zero(shape: tuple[int, int]) -> None:
    gathered = torch.tensor(2.0)
    found = activation_channel_amax(torch.empty(shape[0], 2 * shape[1]), "swiglu", BF16, gathered)
    assert found.tolist() == [0.0] * shape[1]
    assert gathered == 2.0


def test_bad_arguments_are_named() -> None:
    x = torch.randn(4, 9)
    with pytest.raises(ValueError, match=r"unknown activation 'mish'"):
        activation_channel_amax(x, "mish")
    with pytest.raises(ValueError, match=r"swiglu multiplies two halves .* found 9"):
        activation_channel_amax(x, "swiglu")
    with pytest.raises(ValueError, match=r"found torch.int64 of shape \(4, 9\)"):
        activation_channel_amax(x.long(), "relu")
    with pytest.raises(ValueError, match=r"found torch.float64"):
        activation_channel_amax(x, "relu", torch.float64)
    assert "need a CUDA device" in unsupported_reasons(x)[0]


def test_compiled_code_gives_the_same_bits_in_one_graph() -> None:
    function = torch.compile(
        lambda x, gathered: activation_channel_amax(x, "swiglu", BF16, gathered),
        fullgraph=True, backend="aot_eager", dynamic=True,
    )  # fmt: skip
    for rows in (20, 33):
        x, gathered = torch.randn(rows, 40).to(BF16), torch.tensor(0.1)
        assert torch.equal(function(x, gathered), activation_channel_amax(x, "swiglu", BF16))
        assert gathered == activation_channel_amax(x, "swiglu", BF16).max()


# The twin.


def twin_is_reference(function: Any, device: str, shapes: list[tuple[int, int]], activations: Any) -> None:
    for number, (shape, activation) in enumerate(itertools.product(shapes, activations)):
        dtype, through = (BF16, torch.float16, torch.float32)[number % 3], (None, BF16, torch.float16)[number % 3]
        x = with_some_specials(input_of(shape, activation, dtype, device), activation)
        several = shape == (17, 31) and activation == "swiglu"
        for _, view in list(memory_orders(x))[: None if several else 1]:
            found, expected = function(view, activation, through), activation_channel_amax_reference(
                view, activation, through
            )  # fmt: skip
            if base_of(activation) not in TRANSCENDENTAL:
                assert torch.equal(found, expected)
                continue
            low, high = (end.double() for end in result_range(view, activation).rounded(through))
            finite, crossing = low.isfinite() & high.isfinite(), (low < 0) & (high > 0)
            least = torch.where(finite & ~crossing, torch.minimum(low.abs(), high.abs()), 0).amax(0)
            most = torch.where(finite, torch.maximum(low.abs(), high.abs()), 0).amax(0)
            for amaxes in (found, expected):
                assert ((least <= amaxes.double()) & (amaxes.double() <= most)).all()


@interpreted
@silent
def test_the_twin_is_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.kernels.interpreting import exact_conversions

    from octavo.kernels.activation_channel_amax import triton_kernel

    exact_conversions(monkeypatch)
    monkeypatch.setattr(triton_kernel, "_PROGRAMS", 8)
    shapes = [shape for shape in FULL_SHAPES if shape[0] * shape[1] < 5000]
    twin_is_reference(triton_kernel.activation_channel_amax_triton, "cpu", [*shapes, (150, 40)], SOME)


# What Triton makes of it.


def test_rows_are_read_sixteen_bytes_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    pytest.importorskip("triton")
    from tests.kernels.variants import compiled, launches_of, stack_and_local_bytes

    from octavo.kernels.activation_channel_amax import triton_kernel

    x = input_of((8192, 512), "swiglu", BF16)
    [launch] = launches_of(
        monkeypatch, triton_kernel, "_launch", lambda: triton_kernel.activation_channel_amax_triton(x, "swiglu", BF16)
    )
    variant = compiled(triton_kernel.activation_channel_amax_kernel, launch)
    # 16 elements a thread of either half.
    assert len(re.findall(r"ld\.global\.v4\.b32", variant.asm["ptx"])) == 4
    assert sum(stack_and_local_bytes(variant, tmp_path)) == 0
    assert launch.programs == launch.constants[-1] * 4


def test_equal_keys_are_one_variant_of_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from tests.kernels.variants import launches_of, specialized

    from octavo.kernels.activation_channel_amax import triton_kernel

    def call() -> None:
        for shape, dtype in itertools.product([(1, 2), (16, 32), (7, 14), (40, 64)], (BF16, torch.float32)):
            for x in (torch.ones(shape, dtype=dtype), torch.ones(shape[0], shape[1] + 1, dtype=dtype)[:, 1:]):
                triton_kernel.activation_channel_amax_triton(x, "gelu_tanh", None)

    variants: dict[Any, Any] = {}
    for launch in launches_of(monkeypatch, triton_kernel, "_launch", call):
        variant = specialized(triton_kernel.activation_channel_amax_kernel, launch)
        assert variants.setdefault((launch.key, launch.warps), variant) == variant, launch.key
    assert len(variants) > 10


# On a GPU.


@pytest.mark.gpu
def test_on_a_gpu_the_twin_is_its_reference() -> None:
    def function(x: Tensor, activation: str, through: torch.dtype | None) -> Tensor:
        return activation_channel_amax(x, activation, through)

    twin_is_reference(function, "cuda", [*FULL_SHAPES, (70, 130), (4096, 1280), (1000, 9002)], ACTIVATIONS)
