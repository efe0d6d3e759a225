"""norm_backward: the reference against autograd in float64, the twin against the reference, given the same means."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from tests.kernels.fused_twins import parameters, rows_of
from tests.kernels.interpreting import exact_conversions, interpreted, silent
from tests.kernels.matrices import SHAPES, memory_orders
from torch import Tensor

from octavo.kernels.norm_backward import (
    MOST_COLUMNS,
    norm_backward,
    norm_backward_reference,
    unsupported_reasons,
)
from octavo.kernels.norm_cast import Norm
from octavo.kernels.norm_cast.reference import statistics

BF16 = torch.bfloat16
KINDS = ("layer", "rms")
ALL = (True, True, True)
FULL_SHAPES = [shape for shape in SHAPES if shape[0] and shape[1]]


def finite_rows(shape: tuple[int, int], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Rows of different size and mean."""
    size = torch.exp2(torch.randint(-3, 4, (shape[0], 1), device=device).float())
    return (torch.randn(shape, device=device) * size + torch.randn(shape[0], 1, device=device)).to(dtype)


def exact(dy: Tensor, x: Tensor, norm: Norm, weight: Tensor | None) -> list[Tensor]:
    """(dx, dweight, dbias) by autograd in float64, with a bias of 0 and, where there is none, a weight of 1."""
    columns = x.shape[1]
    leaf = x.double().requires_grad_()
    w = (torch.ones(columns, device=x.device) if weight is None else weight).double().requires_grad_()
    b = torch.zeros(columns, device=x.device, dtype=torch.float64, requires_grad=True)
    factor = w + 1 if norm.zero_centered and weight is not None else w
    if norm.kind == "layer":
        y = torch.nn.functional.layer_norm(leaf, (columns,), factor, b, norm.epsilon)
    else:
        y = torch.nn.functional.rms_norm(leaf, (columns,), factor, norm.epsilon) + b
    return list(torch.autograd.grad(y, (leaf, w, b), dy.double()))


def assert_close(found: Any, dy: Tensor, x: Tensor, norm: Norm, weight: Tensor | None) -> None:
    """Within what float32 can lose, given statistics that are as exact as float32 allows.

    A sum of n terms is off by at most n u of the sum of magnitudes, u = 2^-24, in whatever order. xhat is off by
    (K + 8) u (|xhat| + |mean| rstd): its statistics are such sums. So dweight is off by (M + K + 10) u of its sum of
    magnitudes; dx is a sum of three, each off by (2 K + 16) u of its own magnitude, and rounded to its dtype.
    """
    unit, (rows, columns) = 2.0**-24, x.shape
    x64, dy64 = x.double(), dy.double()
    centre = x64.mean(1, keepdim=True) if norm.kind == "layer" else torch.zeros_like(x64[:, :1])
    rstd = ((x64 - centre).square().mean(1, keepdim=True) + norm.epsilon).rsqrt()
    xhat = ((x64 - centre) * rstd).abs() + centre.abs() * rstd
    factor = torch.ones_like(x64[0]) if weight is None else (weight.double() + norm.zero_centered)
    g = (dy64 * factor).abs()
    size_dx = rstd * (g + g.mean(1, keepdim=True) + xhat * (g * xhat).mean(1, keepdim=True))
    bounds = (
        (3 * columns + 24) * unit * size_dx + torch.finfo(x.dtype).eps * size_dx,
        (rows + 2 * columns + 24) * unit * (dy64.abs() * xhat).sum(0),
        rows * unit * dy64.abs().sum(0),
    )
    for value, expected, bound in zip(found, exact(dy, x, norm, weight), bounds, strict=True):
        assert bool(((value.double() - expected).abs() <= bound + 1e-30).all())


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_autograd_in_float64(kind: str, dtype: torch.dtype) -> None:
    for shape, zero_centered in (((33, 96), False), ((1, 7), True), ((200, 3), True), ((40, 300), False)):
        norm, x = Norm(kind, (1e-3).hex(), zero_centered), finite_rows(shape, dtype)
        dy = torch.randn(shape).to(dtype)
        for weight in (None, parameters(shape[1])[0], parameters(shape[1], BF16)[0]):
            found = norm_backward(dy, x, norm, weight, *statistics(x, norm))
            assert_close(found, dy, x, norm, weight)
            assert (found[0].dtype, found[1].dtype, found[2].dtype) == (dtype, torch.float32, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_needed(kind: str) -> None:
    norm, x, dy = Norm(kind), torch.randn(4, 8), torch.randn(4, 8)
    given = statistics(x, norm)
    whole = norm_backward(dy, x, norm, torch.ones(8), *given)
    for needs in itertools.product((True, False), repeat=3):
        part = norm_backward(dy, x, norm, torch.ones(8), *given, needs)
        for needed, a, b in zip(needs, part, whole, strict=True):
            assert (a is not None) == needed
            assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)], ids=str)
def test_an_empty_matrix_has_gradients_of_zero(shape: tuple[int, int]) -> None:
    norm, x = Norm("layer"), torch.zeros(shape)
    dx, dweight, dbias = norm_backward(x, x, norm, None, *statistics(x, norm))
    assert dx.shape == shape
    assert dweight.tolist() == dbias.tolist() == [0.0] * shape[1]


def test_a_row_that_is_not_finite_stays_alone_in_dx() -> None:
    norm, x = Norm("layer"), rows_of((20, 32), torch.float32)
    dx, dweight, dbias = norm_backward(torch.randn(20, 32), x, norm, None, *statistics(x, norm))
    assert bool(dx[[0, 1, *range(4, 20)]].isfinite().all())
    assert bool(dx[2:4].isnan().all())
    assert bool(dweight.isnan().all())
    assert bool(dbias.isfinite().all())


def test_bad_arguments_are_named() -> None:
    x, norm = torch.randn(4, 8), Norm("layer")
    mean, rstd = statistics(x, norm)
    with pytest.raises(ValueError, match=r"dy has shape \(4, 7\); for x of shape \(4, 8\) it takes the same"):
        norm_backward(torch.randn(4, 7), x, norm, None, mean, rstd)
    with pytest.raises(ValueError, match="mean is missing: LayerNorm has one, RMSNorm has none"):
        norm_backward(x, x, norm, None, None, rstd)
    with pytest.raises(ValueError, match=r"norm_backward takes a floating-point matrix as x \[M, K\]"):
        norm_backward(x, x[0], norm, None, mean, rstd)
    assert "need a CUDA device" in unsupported_reasons(x)[0]
    assert "8193 columns: a program holds rows of up to 8192" in unsupported_reasons(torch.empty(1, 8193))[1]


@pytest.mark.slow
def test_compiled_code_gives_the_same_bits_in_one_graph() -> None:
    weight = parameters(40)[0]

    def both(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Any:
        first = norm_backward(dy, x, Norm("layer"), weight, mean, rstd)
        return first, norm_backward(dy, x, Norm("rms"), None, None, rstd, (True, False, False))

    function = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (20, 33):
        x, dy = torch.randn(rows, 40).to(BF16), torch.randn(rows, 40)
        given = statistics(x, Norm("layer"))
        for found, expected in zip(function(dy, x, *given), both(dy, x, *given), strict=True):
            assert all(a is b or torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# The twin.


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    from octavo.kernels.norm_backward import triton_kernel

    exact_conversions(monkeypatch)
    return triton_kernel


@interpreted
@silent
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [*FULL_SHAPES, (40, 300)], ids=str)
def test_the_twin_is_as_close_as_its_reference(kernels: Any, shape: tuple[int, int], kind: str) -> None:
    for number, (dtype, grad_dtype) in enumerate(itertools.product((BF16, torch.float16, torch.float32), repeat=2)):
        weight = (None, *(parameters(shape[1], dtype)[0] for dtype in (torch.float32, BF16)))[number % 3]
        norm = Norm(kind, (1e-5).hex(), bool(number % 2))
        x, dy = finite_rows(shape, dtype), torch.randn(shape).to(grad_dtype)
        several = number == 0 and shape == (17, 31)
        for _, view in list(memory_orders(x))[: None if several else 1]:
            found = kernels.norm_backward_triton(dy, view, norm, weight, *statistics(x, norm), ALL)
            assert_close(found, dy, x, norm, weight)
            assert found[0].dtype == dtype
            # The compiler takes the results of an operator for memory of their own, and aligned.
            assert len({one.untyped_storage().data_ptr() for one in found}) == len(found)


@interpreted
@silent
def test_programs_take_turns_and_leave_out_what_is_not_needed(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for programs, tile in ((1, 64), (3, 128), (2, 4096)):
        monkeypatch.setattr(kernels, "_most_programs", lambda x, tile, p=programs: p)
        monkeypatch.setattr(kernels, "_TILE", tile)
        monkeypatch.setattr(kernels, "_A_THREAD", 2)
        norm, x, dy = Norm("layer"), finite_rows((50, 30), BF16), torch.randn(50, 30)
        weight, given = parameters(30)[0], statistics(x, norm)
        whole = kernels.norm_backward_triton(dy, x, norm, weight, *given, ALL)
        assert_close(whole, dy, x, norm, weight)
        for needs in itertools.product((True, False), repeat=3):
            part = kernels.norm_backward_triton(dy, x, norm, weight, *given, needs)
            for needed, a, b in zip(needs, part, whole, strict=True):
                assert (a is not None) == needed
                assert a is None or torch.equal(a, b)


@interpreted
@silent
def test_the_twin_keeps_what_is_not_finite_in_its_row(kernels: Any) -> None:
    norm, x = Norm("layer"), rows_of((20, 30), torch.float32)
    dx, dweight, dbias = kernels.norm_backward_triton(torch.randn(20, 30), x, norm, None, *statistics(x, norm), ALL)
    assert bool(dx[[0, 1, *range(4, 20)]].isfinite().all())
    assert bool(dx[2:4].isnan().all())
    assert bool(dweight.isnan().all())
    assert bool(dbias.isfinite().all())


# What Triton makes of it.


@pytest.mark.parametrize("columns", [1280, 4096, 8192])
def test_rows_are_read_and_written_sixteen_bytes_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, columns: int
) -> None:
    pytest.importorskip("triton")
    from tests.kernels.variants import HOPPER, launches_of, specialized, stack_and_local_bytes

    from octavo.kernels.norm_backward import triton_kernel

    x, norm = torch.ones(64, columns, dtype=BF16), Norm("layer")
    weight, given = parameters(columns, BF16)[0], statistics(x, norm)

    def call() -> None:
        triton_kernel.norm_backward_triton(x, x.clone(), norm, weight, *given, ALL)

    [launch] = launches_of(monkeypatch, triton_kernel, "_launch_kernel", call)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = triton_kernel.norm_backward_kernel
    names, kinds = kernel.arg_names, specialized(kernel, launch)
    source = ASTSource(
        fn=kernel,
        signature={name: kind for name, (kind, _) in zip(names, kinds, strict=True)},
        constexprs={(place,): value for place, (kind, value) in enumerate(kinds) if kind == "constexpr"},
        attrs={(place,): [["tt.divisibility", 16]] for place, (_, about) in enumerate(kinds) if about == "D"},
    )
    options = {"num_warps": launch.warps} | triton_kernel.OPTIONS
    variant = triton.compile(source, target=GPUTarget("cuda", HOPPER, 32), options=options)
    ptx = str(variant.asm["ptx"])
    # 16 elements a thread of dy and x, and of dx; of the weight fewer where several rows share it.
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) in (5, 6)
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) >= 2
    assert "cvt.rn.bf16x2.f32" in ptx
    assert "div.rn.f32" in ptx
    assert not re.search(r"\bfma\.rn\.f32", ptx)
    assert ".ftz" not in ptx
    assert stack_and_local_bytes(variant, tmp_path) == [0, 0]


def test_equal_keys_are_one_variant_of_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from tests.kernels.variants import launches_of, specialized

    from octavo.kernels.norm_backward import triton_kernel

    def call() -> None:
        shapes = [(1, 2), (16, 16), (7, 13), (40, 48)]
        for shape, dtype, kind in itertools.product(shapes, (BF16, torch.float32), KINDS):
            norm, wide = Norm(kind, zero_centered=shape[0] == 7), torch.ones(shape[0], shape[1] + 1, dtype=dtype)
            for x, number in itertools.product((torch.ones(shape, dtype=dtype), wide[:, 1:]), (0, 1)):
                weight = torch.ones(shape[1] + 1, dtype=(dtype, BF16)[number])[number:][: shape[1]]
                needs = (True, bool(number), not number)
                for given, dy in ((weight, x), (None, torch.ones(shape))):
                    triton_kernel.norm_backward_triton(dy, x, norm, given, *statistics(x, norm), needs)

    variants: dict[Any, Any] = {}
    for launch in launches_of(monkeypatch, triton_kernel, "_launch_kernel", call):
        variant = specialized(triton_kernel.norm_backward_kernel, launch)
        assert variants.setdefault((launch.key, launch.warps), variant) == variant, launch.key
    assert len(variants) > 20


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_the_twin_is_as_close_as_its_reference(kind: str) -> None:
    shapes = [*FULL_SHAPES, (5000, 1280), (4500, 4096), (300, MOST_COLUMNS), (130, 9001)]
    for number, shape in enumerate(shapes):
        dtype = (BF16, torch.float32)[number % 2]
        x, dy = finite_rows(shape, dtype, "cuda"), torch.randn(shape, device="cuda").to(dtype)
        norm, weight = Norm(kind, zero_centered=bool(number % 3)), parameters(shape[1], device="cuda")[0]
        given = statistics(x, norm)
        found = norm_backward(dy, x, norm, weight, *given)
        assert_close(found, dy, x, norm, weight)
        again = norm_backward(dy, x, norm, weight, *given)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), "the same in every run"
        expected = norm_backward_reference(dy, x, norm, weight, *given, ALL)
        assert [t.dtype for t in found] == [t.dtype for t in expected]
