"""gated_backward_cast: its reference against that of activation_backward_cast, its twin against the reference."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from tests.kernels.agreement import assert_same
from tests.kernels.exact_activations import Range, assert_codes_within, gradient_range, input_of
from tests.kernels.fused_twins import GRADIENT_SCALE as SCALE
from tests.kernels.fused_twins import gradients, specials
from tests.kernels.interpreting import exact_conversions, interpreted, silent
from tests.kernels.matrices import SHAPES, memory_orders
from tests.kernels.test_gated_cast import BASES
from torch import Tensor

from octavo.formats import E4M3, E5M2
from octavo.kernels.activation_backward_cast import activation_backward_cast, activation_backward_output
from octavo.kernels.gated_backward_cast import (
    gated_backward_cast,
    gated_backward_cast_reference,
    gated_backward_output,
    gated_backward_output_reference,
    unsupported_reasons,
)

BF16 = torch.bfloat16
FULL_SHAPES = [shape for shape in SHAPES if shape[0] and shape[1]]
Matrices = tuple[Tensor, Tensor, Tensor]


def matrices(shape: tuple[int, int], activation: str, dtype: torch.dtype, device: str = "cpu") -> Matrices:
    """grad, gate, up; of infinite gradients none is multiplied by what may be 0 or just above."""
    grad = gradients(shape, dtype, device)
    gate, up = (specials(input_of(shape, activation, dtype, device), grad, activation) for _ in range(2))
    return grad, gate, torch.where(grad.isinf(), 1.5, up)


def scales(device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Of the gradient of gate and of that of up: not the same."""
    first, second = torch.tensor([SCALE, 3 * SCALE], device=device).unbind()
    return first, second


@pytest.mark.parametrize("through", [None, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", BASES)
def test_two_matrices_give_the_codes_of_their_halves_in_one(activation: str, through: torch.dtype | None) -> None:
    # (64 columns: torch's vector code rounds an exponential otherwise than its code for the rest of a row.)
    grad, gate, up = matrices((50, 64), activation, BF16)
    gate[3, 4], up[4, 5], grad[5, 6], grad[6, 7] = 5.0, 0.0, float("inf"), float("nan")
    gathered = (torch.tensor(0.5), torch.tensor(0.25))
    pair = gated_backward_cast(
        grad, gate, up, activation, E5M2, scales(), through=through, gathered=gathered, column_sums=(True, False)
    )
    both = torch.cat([gate, up], 1)
    for number, (found, scale) in enumerate(zip(pair, scales(), strict=True)):
        half = slice(64 * number, 64 * (number + 1))
        expected = activation_backward_cast(
            grad, both, BASES[activation], E5M2, scale, through=through, column_sum=number == 0
        )
        ours, theirs = (found.codes[:, :64], found.codes_t[:64]), (expected.codes[:, half], expected.codes_t[half])
        assert_same(tuple(one.contiguous() for one in ours), tuple(one.contiguous() for one in theirs))
        assert found.scale == scale
        assert found.scale.data_ptr() != scale.data_ptr()
        if expected.column_sum is not None:
            # In another order: at most 50 roundings of the sum of magnitudes.
            size = expected.codes_t[half].float().nan_to_num(0).abs().sum(1) * scale * 2
            error = (found.column_sum - expected.column_sum[half]).abs()
            assert (error <= 50 * 2.0**-23 * size)[expected.column_sum[half].isfinite()].all()
            assert torch.equal(found.column_sum.isfinite(), expected.column_sum[half].isfinite())
    assert pair[1].column_sum is None
    dtype = through or torch.float32
    dgate, dup = gated_backward_output(grad, gate, up, activation, dtype)
    whole = activation_backward_output(grad, both, BASES[activation], dtype).output
    assert_same((dgate.output, dup.output), (whole[:, :64].contiguous(), whole[:, 64:].contiguous()))
    for largest, start, (output, amaxes) in zip(gathered, (0.5, 0.25), (dgate, dup), strict=True):
        amax = output[output.isfinite()].abs().max().float()
        assert amaxes == amax
        assert largest == max(start, amax)


def test_gradients_are_those_of_autograd() -> None:
    grad, gate, up = torch.randn(20, 30), torch.randn(20, 30, requires_grad=True), torch.randn(20, 30)
    up.requires_grad_()
    (torch.nn.functional.silu(gate) * up).backward(grad)
    dgate, dup = gated_backward_output(grad, gate.detach(), up.detach(), "silu", torch.float32)
    torch.testing.assert_close(dgate.output, gate.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dup.output, up.grad, rtol=1e-5, atol=1e-6)


def test_infinity_becomes_nan_only_if_told_so() -> None:
    grad, ones = torch.full((1, 2), float("inf")), torch.ones(1, 2)
    for inf_to_nan in (True, False):
        for found in gated_backward_cast(grad, ones, ones, "relu", E5M2, scales(), inf_to_nan=inf_to_nan):
            code = found.codes[0, 0].float()
            assert code.isnan() if inf_to_nan else code == E5M2.max


def test_bad_arguments_are_named() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match=r"grad has shape \(4, 7\); for a gate of shape \(4, 8\) it takes the same"):
        gated_backward_cast(torch.randn(4, 7), x, x, "silu", E5M2, scales())
    with pytest.raises(ValueError, match=r"unknown activation 'geglu_tanh' of a gate"):
        gated_backward_output(x, x, x, "geglu_tanh", BF16)
    with pytest.raises(ValueError, match="one float32 scale"):
        gated_backward_cast(x, x, x, "silu", E5M2, (torch.ones(()), torch.ones(4, 1)))
    assert "need a CUDA device" in unsupported_reasons(x, E4M3)[0]


@pytest.mark.slow
def test_compiled_code_gives_the_same_bits_in_one_graph() -> None:
    def both(grad: Tensor, gate: Tensor, up: Tensor, gathered: Tensor) -> Any:
        dgate, dup = gated_backward_cast(
            grad, gate, up, "silu", E5M2, scales(), through=BF16, gathered=(gathered, None), column_sums=(False, True)
        )
        outputs = gated_backward_output(grad, gate, up, "relu", BF16)
        return dgate[:3], tuple(dup), tuple(outputs[0]), tuple(outputs[1])

    function = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (20, 33):
        arguments = matrices((rows, 40), "silu", BF16)
        gathered, expected_gathered = torch.tensor(0.01), torch.tensor(0.01)
        found, expected = function(*arguments, gathered), both(*arguments, expected_gathered)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
        assert gathered == expected_gathered > 0.1


# The twin.


def twin_is_reference(function: Any, arguments: Matrices, activation: str, number: int) -> None:
    """Of relu kinds bit for bit; of the others within what the twin's gradient is allowed, see `exact_activations`."""
    grad, gate, up = arguments
    through, format = (None, BF16, torch.float16)[number % 3], (E4M3, E5M2)[number % 2]
    given = (*arguments, activation, format, scales(str(grad.device)), through)
    sums = (number % 2 == 0, number % 3 == 0)
    starts = 2.0**-7, 2.0**-9
    gathered, expected_gathered = (torch.tensor(starts, device=grad.device).unbind() for _ in range(2))
    pair = function(*given, gathered, bool(number % 2), sums)
    expected = gated_backward_cast_reference(*given, expected_gathered, bool(number % 2), sums)
    allowed = gradient_range(grad, torch.cat([gate, up], 1), BASES[activation])
    for half, (found, other, wanted, largest, start) in enumerate(
        zip(pair, expected, sums, gathered, starts, strict=True)
    ):
        codes, scale, codes_t, total = found
        assert scale == given[5][half]
        assert (total is not None) == wanted
        if activation in ("relu", "srelu"):
            assert_same((codes, codes_t, largest), (other[0], other[2], expected_gathered[half]))
        else:
            columns = slice(gate.shape[1] * half, gate.shape[1] * (half + 1))
            own = Range(allowed.low[:, columns], allowed.high[:, columns])
            assert_codes_within(codes, codes_t, largest, own, scale, through, start, bool(number % 2))
        if total is not None:
            # float32 sums of n rows: at most n roundings of the sum of magnitudes; and the gradients' own distance.
            low, high = (
                end.double()[:, gate.shape[1] * half :][:, : gate.shape[1]] for end in allowed.rounded(through)
            )
            sure = (low.isfinite() & high.isfinite()).all(0)
            slack = (len(grad) * 2.0**-24 * torch.maximum(low.abs(), high.abs())).sum(0)
            assert ((low.sum(0) - slack <= total) & (total <= high.sum(0) + slack))[sure].all()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    from octavo.kernels.gated_backward_cast import triton_kernel

    exact_conversions(monkeypatch)
    return triton_kernel


@interpreted
@silent
@pytest.mark.parametrize("activation", BASES)
def test_the_twin_is_its_reference(kernels: Any, activation: str) -> None:
    for number, shape in enumerate([*FULL_SHAPES, (70, 130), (20, 60)]):
        arguments = matrices(shape, activation, (BF16, torch.float16, torch.float32)[number % 3])
        twin_is_reference(kernels.gated_backward_cast_triton, arguments, activation, number)
        if shape == (17, 31) and activation in ("relu", "silu"):
            for views in zip(*(list(memory_orders(one)) for one in arguments), strict=True):
                given = tuple(view for _, view in views)
                twin_is_reference(kernels.gated_backward_cast_triton, given, activation, number)


def output_is_reference(function: Any, device: str) -> None:
    for shape in [*FULL_SHAPES, (150, 40)]:
        arguments = matrices(shape, "relu", BF16, device)
        expected = gated_backward_output_reference(*arguments, "relu", BF16)
        for (output, amaxes), (other, largest) in zip(function(*arguments, "relu", BF16), expected, strict=True):
            assert amaxes.numel() & (amaxes.numel() - 1) == 0
            assert_same((output, amaxes.amax()), (other, largest[0]))


@interpreted
@silent
def test_the_twin_of_the_output_is_its_reference(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_OUTPUT_BLOCK", 512)
    monkeypatch.setattr("octavo.kernels.activation_cast.triton_kernel._MOST_PARTIALS", 4)
    output_is_reference(kernels.gated_backward_output_triton, "cpu")


# What Triton makes of it.


def test_blocks_are_read_and_written_sixteen_bytes_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    pytest.importorskip("triton")
    from tests.kernels.variants import compiled, launches_of, stack_and_local_bytes

    from octavo.kernels.gated_backward_cast import triton_kernel

    arguments, pair = matrices((8192, 512), "silu", BF16), scales()

    def call() -> None:
        triton_kernel.gated_backward_cast_triton(*arguments, "silu", E5M2, pair, BF16, pair, True, (True, True))

    [launch] = launches_of(monkeypatch, triton_kernel, "_launch_cast", call)
    variant = compiled(triton_kernel.gated_backward_cast_kernel, launch)
    ptx = variant.asm["ptx"]
    # 16 elements a thread of even rows, as many of odd ones: four loads a matrix, four stores a gradient.
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == 12
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == 8
    assert ptx.count("ex2.approx.ftz.f32") == 32
    assert sum(stack_and_local_bytes(variant, tmp_path)) == 0


def test_equal_keys_are_one_variant_of_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from tests.kernels.variants import launches_of, specialized

    from octavo.kernels.gated_backward_cast import triton_kernel

    pair = torch.ones(4).unbind()

    def call(function: str) -> None:
        shapes = [(1, 2), (16, 16), (7, 7), (40, 48)]
        for (rows, columns), dtype, number in itertools.product(shapes, (BF16, torch.float32), (0, 1)):
            odd, even = torch.ones(rows, columns + 1, dtype=dtype)[:, 1:], torch.ones(rows, columns, dtype=BF16)
            for given in ((odd, even, even), (even, odd, even), (even, even, odd), (even, even, even)):
                if function == "_launch_output":
                    triton_kernel.gated_backward_output_triton(*given, "silu", (BF16, torch.float32)[number])
                else:
                    own = pair[number : number + 2]
                    sums = (bool(number), rows == 7)
                    triton_kernel.gated_backward_cast_triton(
                        *given, "silu", E5M2, own, BF16, (own[0], None), True, sums, bool(number)
                    )

    for launcher, kernel in (
        ("_launch_cast", triton_kernel.gated_backward_cast_kernel),
        ("_launch_output", triton_kernel.gated_backward_output_kernel),
    ):
        variants: dict[Any, Any] = {}
        # Sums that did not run are of no interest.
        for launch in launches_of(monkeypatch, triton_kernel, launcher, lambda launcher=launcher: call(launcher)):
            variant = specialized(kernel, launch)
            assert variants.setdefault((launch.key, launch.warps), variant) == variant, launch.key
        assert len(variants) > 10


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("activation", BASES)
def test_on_a_gpu_the_twin_is_its_reference(activation: str) -> None:
    def function(a: Tensor, b: Tensor, c: Tensor, f: str, form: Any, s: Any, t: Any, g: Any, n: bool, sums: Any) -> Any:
        return gated_backward_cast(a, b, c, f, form, s, through=t, gathered=g, inf_to_nan=n, column_sums=sums)

    for number, shape in enumerate([*FULL_SHAPES, (70, 130), (4096, 1280), (1000, 4501)]):
        arguments = matrices(shape, activation, (BF16, torch.float16, torch.float32)[number % 3], "cuda")
        twin_is_reference(function, arguments, activation, number)


@pytest.mark.gpu
def test_on_a_gpu_the_output_is_its_reference() -> None:
    output_is_reference(gated_backward_output, "cuda")


@pytest.mark.gpu
def test_on_a_gpu_compiled_code_gives_the_codes_of_eager_code() -> None:
    def both(grad: Tensor, gate: Tensor, up: Tensor, pair: Any, gathered: Tensor) -> Any:
        dgate, dup = gated_backward_cast(
            grad, gate, up, "silu", E5M2, pair, through=BF16, gathered=(gathered, None), column_sums=(True, False)
        )
        # (Inductor adds sums in an order of its own.)
        return *dgate[:3], *dup[:3]

    arguments, pair = matrices((300, 512), "silu", BF16, "cuda"), scales("cuda")
    gathered, expected = torch.zeros(2, device="cuda").unbind()
    found = torch.compile(both, fullgraph=True)(*arguments, pair, gathered)
    assert_same(found, both(*arguments, pair, expected))
    assert gathered == expected > 0
