"""cross_entropy: the reference against float64 and torch's own, the twin against float64 within the same bounds."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels.interpreting import exact_conversions, interpreted, silent
from torch import Tensor

from octavo.kernels.cross_entropy import (
    LossRule,
    check_rule,
    cross_entropy,
    cross_entropy_gradient,
    cross_entropy_gradient_reference,
    cross_entropy_reference,
    cross_entropy_with_gradient,
    unsupported_reasons,
)

BF16 = torch.bfloat16
DTYPES = (torch.float32, BF16, torch.float16)
RULES = (LossRule(), LossRule(3), LossRule(-100, 0.1), LossRule(-100, 0.0, 1e-2), LossRule(-1, 0.25, 1e-3))
SHAPES = ((1, 1), (5, 2), (7, 33), (40, 300), (3, 1024))
INF, NAN = float("inf"), float("nan")
UNIT = 2.0**-24
FACTORS = (torch.tensor(0.5).expand(6), torch.arange(18.0).reshape(6, 3)[:, 1], torch.tensor([0.5]))


def inputs(shape: tuple[int, int], dtype: torch.dtype, rule: LossRule, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Logits of rows of different size and mean, and targets some of which are ignored."""
    rows, columns = shape
    size = torch.exp2(torch.randint(-3, 4, (rows, 1), device=device).float())
    logits = torch.randn(shape, device=device) * size + 3 * torch.randn(rows, 1, device=device)
    targets = torch.randint(0, columns, (rows,), device=device)
    if rows > 2:
        targets[2] = rule.ignore_index
    return logits.to(dtype), targets


def exact(logits: Tensor, targets: Tensor, rule: LossRule, factor: Tensor | None = None) -> tuple[Tensor, ...]:
    """(loss, lse, gradient) in float64, written out with torch's own functions."""
    x = logits.double().requires_grad_()
    ignored = targets == rule.ignore_index
    classes = torch.where(ignored, 0, targets).long()
    lse = x.logsumexp(1)
    loss = torch.nn.functional.cross_entropy(x, classes, label_smoothing=rule.label_smoothing, reduction="none")
    loss = torch.where(ignored, 0.0, loss + rule.z_loss * lse.square())
    weights = torch.ones_like(loss) if factor is None else factor.double().expand(loss.shape)
    (gradient,) = torch.autograd.grad((loss * weights).sum(), x)
    return loss.detach(), torch.where(ignored, 0.0, lse).detach(), gradient


def bounds(logits: Tensor, targets: Tensor, rule: LossRule, factor: Tensor | None = None) -> tuple[Tensor, ...]:
    """How far (loss, lse, gradient) may be from those of float64, for finite logits; u = 2^-24, V classes.

    An exponential of t is off by (2 |t| + 8) u relative: t and t log2 e are rounded, and the hardware's 2^t, like each
    factor by which an online softmax rescales what it has, is within 2^-21. The exponents of one term add up to
    |x - max|, its factors are V / 2 at the most in these tests. A sum of V terms is off by V u. So log of the sum of
    exponentials is off by (5 V + 16 + 2 sum p |x - max|) u, the logarithm's own error 8 u + 4 u |log|, and lse, the sum
    with the maximum, by 2 u |lse| more. The loss is of y = x - max: it adds six roundings of its terms, and of the mean
    of y 2 V u, its own and those of moving it to a larger maximum, count times a step that no |y| before is below; a
    probability is off by (2 |x - lse| + 8) u + that of lse, relative, and its gradient by four roundings.
    """
    x, num_classes = logits.double(), logits.shape[1]
    lse, largest = x.logsumexp(1), x.amax(1)
    p = (x - lse[:, None]).exp()
    off = (x - largest[:, None]).abs()
    log_off = UNIT * (5 * num_classes + 24 + 2 * (p * off).sum(1) + 4 * (lse - largest).abs())
    lse_off = log_off + UNIT * 2 * lse.abs()
    at = x.gather(1, torch.where(targets == rule.ignore_index, 0, targets).long()[:, None])[:, 0]
    smoothed = rule.label_smoothing * off.mean(1)
    size = (lse - largest).abs() + (at - largest).abs() + smoothed + rule.z_loss * lse.square()
    loss_off = log_off + lse_off * 2 * rule.z_loss * lse.abs() + UNIT * (6 * size + (2 * num_classes + 8) * smoothed)
    relative = UNIT * (2 * (x - lse[:, None]).abs() + 16) + lse_off[:, None]
    grown = p * (1 + 2 * rule.z_loss * lse.abs())[:, None]
    dx_off = relative * grown + 4 * UNIT * (grown + rule.label_smoothing / num_classes)
    one_hot = torch.zeros_like(x).scatter(1, torch.where(targets == rule.ignore_index, 0, targets).long()[:, None], 1.0)
    dx_off = dx_off + 4 * UNIT * one_hot
    if factor is not None:
        dx_off = dx_off * factor.double().abs().reshape(-1, 1)
    gradient = exact(logits, targets, rule, factor)[2]
    info = torch.finfo(logits.dtype)
    # Rounded once more; below the normal numbers to half of the smallest one.
    dx_off = dx_off + info.eps / 2 * (gradient.abs() + dx_off) + info.smallest_normal * info.eps
    return loss_off, lse_off, dx_off


def assert_close(
    found: tuple[Tensor, ...], logits: Tensor, targets: Tensor, rule: LossRule, factor: Any = None
) -> None:
    for value, expected, bound in zip(
        found, exact(logits, targets, rule, factor), bounds(logits, targets, rule, factor), strict=True
    ):
        assert value.shape == expected.shape
        assert bool(((value.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_loss_and_gradient_are_those_of_float64(rule: LossRule, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        logits, targets = inputs(shape, dtype, rule)
        given = logits.clone()
        loss, lse = cross_entropy(logits, targets, rule)
        gradient = cross_entropy_gradient(logits, targets, lse, None, rule)
        assert torch.equal(logits, given)
        assert (loss.dtype, lse.dtype, gradient.dtype) == (torch.float32, torch.float32, dtype)
        assert_close((loss, lse, gradient), logits, targets, rule)
        # In place, from the loss on and afterwards.
        over = logits.clone()
        both = cross_entropy_with_gradient(over, targets, rule)
        assert all(torch.equal(a, b) for a, b in zip(both, (loss, lse), strict=True))
        assert torch.equal(over, gradient)
        factor = torch.randn(shape[0])
        scaled = cross_entropy_gradient(logits, targets, lse, factor, rule, in_place=True)
        assert scaled is logits
        assert_close((loss, lse, scaled), given, targets, rule, factor)


def test_one_factor_is_that_of_every_row() -> None:
    logits, targets = inputs((6, 20), torch.float32, RULES[0])
    _, lse = cross_entropy(logits, targets)
    expected = cross_entropy_gradient(logits, targets, lse, torch.full((6,), 0.7))
    for factor in (torch.tensor(0.7), torch.tensor([0.7])):
        assert torch.equal(cross_entropy_gradient(logits, targets, lse, factor), expected)


def special_rows(dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Rows with what is not finite: see `assert_special`."""
    logits = torch.randn(9, 50, device=device).to(dtype)
    logits[0, 10:40] = -INF  # masked
    logits[1, 5] = -INF  # the target itself is masked
    logits[2] = -INF
    logits[3, 7] = NAN
    logits[4, 7] = INF
    logits[5] = NAN  # ignored
    logits[6, 49] = -INF
    targets = torch.tensor([3, 5, 3, 3, 3, -100, 2, 50, -1], device=device)  # the last two are no classes
    return logits, targets


def assert_special(loss: Tensor, lse: Tensor, gradient: Tensor, logits: Tensor, targets: Tensor) -> None:
    finite, whole = [0, 6], logits[[0, 6]].double()
    expected = torch.nn.functional.cross_entropy(whole, targets[finite], reduction="none")
    torch.testing.assert_close(loss[finite].double(), expected, rtol=1e-5, atol=1e-5)
    p = whole.softmax(1)
    p[[0, 1], targets[finite]] -= 1
    torch.testing.assert_close(gradient[finite].double(), p, rtol=1e-2, atol=1e-5)
    assert bool((gradient[0, 10:40] == 0).all())
    # Its loss is infinite, its gradient is not.
    assert float(loss[1]) == INF
    assert bool(gradient[1].isfinite().all())
    assert float(gradient[1, 5]) == -1
    assert loss[[2, 3, 4, 7, 8]].isnan().all()
    assert gradient[[2, 3, 7, 8]].isnan().all()
    assert gradient[4, 7].isnan()
    assert float(loss[5]) == float(lse[5]) == 0
    assert gradient[5].tolist() == [0.0] * 50


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_stays_in_its_row_and_a_target_that_is_no_class_is_nan(dtype: torch.dtype) -> None:
    logits, targets = special_rows(dtype)
    loss, lse = cross_entropy_reference(logits, targets, RULES[0])
    gradient = cross_entropy_gradient_reference(logits, targets, lse, None, RULES[0])
    assert_special(loss, lse, gradient, logits, targets)


def test_label_smoothing_of_a_masked_class_is_infinite_as_torch_has_it() -> None:
    logits, targets = torch.randn(2, 6), torch.tensor([1, 2])
    logits[0, 4] = -INF
    loss, _ = cross_entropy(logits, targets, LossRule(-100, 0.1))
    expected = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=0.1, reduction="none")
    assert float(loss[0]) == float(expected[0]) == INF
    assert math.isclose(float(loss[1]), float(expected[1]), rel_tol=1e-6)


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[3e38, 3e38, -3e38], [-3e38, -3e38, -3e38]])
    loss, _ = cross_entropy(logits, torch.tensor([0, 2]))
    # Beside 3e38 log 2 and log 3 would be lost: its neighbours are 2^104 apart.
    torch.testing.assert_close(loss, torch.tensor([2.0, 3.0]).log(), rtol=1e-6, atol=0)


FAR = (LossRule(), LossRule(-100, 0.1), LossRule(-100, 1.0))


@pytest.mark.parametrize("rule", FAR, ids=str)
@pytest.mark.parametrize("offset", [1e2, -1e4, 1e6])
def test_logits_far_from_zero_lose_nothing_of_the_loss(offset: float, rule: LossRule) -> None:
    logits, targets = inputs((20, 300), torch.float32, rule)
    logits = logits + offset
    loss, lse = cross_entropy(logits, targets, rule)
    assert_close((loss, lse, cross_entropy_gradient(logits, targets, lse, None, rule)), logits, targets, rule)


def test_no_rows_have_no_loss() -> None:
    logits, targets = torch.randn(0, 5), torch.zeros(0, dtype=torch.int64)
    loss, lse = cross_entropy_with_gradient(logits, targets)
    assert loss.shape == lse.shape == (0,)
    assert cross_entropy_gradient(logits, targets, lse).shape == (0, 5)


def test_targets_of_32_bits_are_classes_too() -> None:
    logits, targets = inputs((6, 20), torch.float32, RULES[0])
    for a, b in zip(cross_entropy(logits, targets.int()), cross_entropy(logits, targets), strict=True):
        assert torch.equal(a, b)


def test_bad_arguments_are_named() -> None:
    logits, targets = torch.randn(4, 8), torch.tensor([0, 1, 8, 7])
    with pytest.raises(ValueError, match=r"targets hold 8: with 8 classes they are 0 to 7, or ignore_index = -100"):
        cross_entropy(logits, targets)
    with pytest.raises(ValueError, match=r"targets hold -100: .* ignore_index = 5"):
        cross_entropy_with_gradient(logits, torch.full((4,), -100), LossRule(5))
    with pytest.raises(ValueError, match=r"found torch.float64 of shape \(4, 8\)"):
        cross_entropy(logits.double(), targets)
    with pytest.raises(ValueError, match=r"V of 1 or more.*found torch.float32 of shape \(4, 0\)"):
        cross_entropy(logits[:, :0], targets)
    with pytest.raises(ValueError, match=r"targets are torch\.float32: expected classes in int64 or int32"):
        cross_entropy(logits, targets.float())
    with pytest.raises(ValueError, match=r"targets have shape \(3,\).*take one a row, \(4,\)"):
        cross_entropy(logits, targets[:3])
    with pytest.raises(ValueError, match=r"factor is torch.float32 of shape \(2,\)"):
        cross_entropy_gradient(logits, targets, torch.zeros(4), torch.zeros(2))
    with pytest.raises(ValueError, match="share memory"):
        cross_entropy_with_gradient(logits[:1].expand(4, 8), targets)
    for wrong in (LossRule(label_smoothing=1.5), LossRule(label_smoothing=-0.1), LossRule(label_smoothing=NAN)):
        with pytest.raises(ValueError, match=r"label_smoothing is .*: expected a number from 0 to 1"):
            check_rule(wrong)
    for z_loss in (-1.0, INF, True):
        with pytest.raises(ValueError, match=r"z_loss is .*: expected a number of 0 or more"):
            check_rule(LossRule(z_loss=z_loss))
    with pytest.raises(ValueError, match=r"ignore_index is 1\.5: expected an integer"):
        check_rule(LossRule(1.5))  # type: ignore[arg-type]
    assert "need a CUDA device" in unsupported_reasons(logits)[0]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_gives_the_same_bits_in_one_graph(backend: str) -> None:
    rule = LossRule(-100, 0.1, 1e-3)

    def all_of_it(x: Tensor, targets: Tensor, factor: Tensor) -> Any:
        logits, over = x * 2, x * 2
        loss, lse = cross_entropy(logits, targets, rule)
        beside = cross_entropy_gradient(logits, targets, lse, factor, rule)
        both = cross_entropy_with_gradient(over, targets, rule)
        return loss, lse, beside, cross_entropy_gradient(logits, targets, lse, factor, rule, True), over, *both

    function = torch.compile(all_of_it, fullgraph=True, backend=backend, dynamic=True)
    for rows in (20, 33):
        x, targets = inputs((rows, 40), BF16, rule)
        factor = torch.randn(rows)
        for found, expected in zip(function(x, targets, factor), all_of_it(x, targets, factor), strict=True):
            assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="targets hold 40"):
        function(x, torch.full((33,), 40), factor)


# The twin.


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    from octavo.kernels.cross_entropy import triton_kernel

    exact_conversions(monkeypatch)
    monkeypatch.setattr(triton_kernel, "_BLOCK", 64)
    return triton_kernel


@interpreted
@silent
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 2), (4, 64), (4, 129), (3, 300)], ids=str)
def test_the_twin_is_as_close_as_its_reference(kernels: Any, shape: tuple[int, int], rule: LossRule) -> None:
    for dtype in DTYPES:
        logits, targets = inputs(shape, dtype, rule)
        wide = torch.full((shape[0], shape[1] + 5), NAN).to(dtype)
        wide[:, 2 : 2 + shape[1]] = logits
        for view in (wide[:, 2 : 2 + shape[1]], logits.t().clone(memory_format=torch.contiguous_format).t())[
            : 1 + (dtype == BF16)
        ]:
            loss, lse = kernels.cross_entropy_triton(view, targets, rule, False)
            factor = torch.randn(shape[0])
            gradient = kernels.cross_entropy_gradient_triton(view, targets, lse, factor, rule, False)
            assert torch.equal(view, logits)
            assert_close((loss, lse, gradient), logits, targets, rule, factor)
            both = kernels.cross_entropy_triton(view, targets.int(), rule, True)
            assert all(torch.equal(a, b) for a, b in zip(both, (loss, lse), strict=True))
            assert_close((loss, lse, view), logits, targets, rule)
        assert bool(wide[:, :2].isnan().all())
        assert bool(wide[:, 2 + shape[1] :].isnan().all())


@interpreted
@silent
@pytest.mark.parametrize("rule", FAR, ids=str)
@pytest.mark.parametrize("offset", [1e2, -1e4, 1e6])
def test_the_twin_of_logits_far_from_zero_loses_nothing_of_the_loss(
    kernels: Any, offset: float, rule: LossRule
) -> None:
    """In blocks each of which has a larger maximum than the one before, and the other way round."""
    logits, targets = inputs((6, 300), torch.float32, rule)
    ramp = torch.arange(300) / 30
    for x in (logits + ramp + offset, logits - ramp + offset):
        loss, lse = kernels.cross_entropy_triton(x, targets, rule, False)
        gradient = kernels.cross_entropy_gradient_triton(x, targets, lse, None, rule, False)
        assert_close((loss, lse, gradient), x, targets, rule)


@interpreted
@silent
@pytest.mark.parametrize("factor", FACTORS, ids=("expanded", "strided", "one"))
def test_the_twin_takes_factors_that_lie_apart_or_in_one_place(kernels: Any, factor: Tensor) -> None:
    """The gradient of a sum is one number, expanded; reading behind it would give what happens to lie there."""
    rule = LossRule(-100, 0.1)
    logits, targets = inputs((6, 150), BF16, rule)
    _, lse = kernels.cross_entropy_triton(logits, targets, rule, False)
    found = kernels.cross_entropy_gradient_triton(logits, targets, lse, factor, rule, False)
    expected = kernels.cross_entropy_gradient_triton(logits, targets, lse, factor.expand(6).clone(), rule, False)
    assert torch.equal(found, expected)


@interpreted
@silent
def test_the_twin_overwrites_from_what_is_kept(kernels: Any) -> None:
    rule = LossRule(-100, 0.1)
    logits, targets = inputs((6, 150), BF16, rule)
    _, lse = kernels.cross_entropy_triton(logits, targets, rule, False)
    for factor in (None, torch.tensor(0.3), torch.randn(6)):
        expected = kernels.cross_entropy_gradient_triton(logits, targets, lse, factor, rule, False)
        for given in (logits.clone(), logits.t().clone(memory_format=torch.contiguous_format).t()):
            assert kernels.cross_entropy_gradient_triton(given, targets, lse, factor, rule, True) is given
            assert torch.equal(given, expected)


@interpreted
@silent
@pytest.mark.parametrize("block", [16, 64])
def test_the_twin_keeps_what_is_not_finite_in_its_row(
    kernels: Any, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """Blocks in which every logit is masked come first, in the middle and alone."""
    monkeypatch.setattr(kernels, "_BLOCK", block)
    for dtype in DTYPES:
        logits, targets = special_rows(dtype)
        logits[6, :32] = -INF
        targets[6] = 40
        loss, lse = kernels.cross_entropy_triton(logits, targets, RULES[0], False)
        gradient = kernels.cross_entropy_gradient_triton(logits, targets, lse, None, RULES[0], False)
        assert_special(loss, lse, gradient, logits, targets)


# What Triton makes of it.


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", [32000, 128256, 50257])
def test_rows_are_read_and_written_sixteen_bytes_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, columns: int, dtype: torch.dtype
) -> None:
    """Also those of an odd number of classes, if they begin at multiples of 16 elements, as products give them."""
    pytest.importorskip("triton")
    from tests.kernels.variants import compiled, launches_of, stack_and_local_bytes

    from octavo.kernels.cross_entropy import triton_kernel

    logits = torch.ones(2, -(-columns // 16) * 16, dtype=dtype)[:, :columns]
    targets = torch.zeros(2, dtype=torch.int64)
    [launch] = launches_of(
        monkeypatch,
        triton_kernel,
        "_launch_kernel",
        lambda: triton_kernel.cross_entropy_triton(logits, targets, LossRule(-100, 0.1, 1e-3), True),
    )
    variant = compiled(triton_kernel.cross_entropy_kernel, launch)
    ptx = str(variant.asm["ptx"])
    # 16 elements a thread, in the loop of each pass.
    wide = 16 * dtype.itemsize // 16
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) >= 2 * wide
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) >= wide
    assert ("cvt.rn.bf16x2.f32" in ptx) == (dtype == BF16)
    # A float32 tail of single elements takes a register or two more than there are.
    assert sum(stack_and_local_bytes(variant, tmp_path)) <= (0 if dtype == BF16 else 8)


@pytest.mark.parametrize("capability", [90, 100])
def test_every_kind_of_launch_compiles_down_to_one_class(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: int
) -> None:
    """Of one class Triton makes constants; of fewer classes than threads each takes an element."""
    pytest.importorskip("triton")
    from tests.kernels.variants import compiled, launches_of, stack_and_local_bytes

    from octavo.kernels.cross_entropy import triton_kernel

    def call() -> None:
        for columns, dtype in ((1, BF16), (2, torch.float16), (33, torch.float32), (1000, BF16)):
            logits, targets = torch.ones(3, columns, dtype=dtype), torch.zeros(3, dtype=torch.int32)
            triton_kernel.cross_entropy_triton(logits, targets, LossRule(), False)
            triton_kernel.cross_entropy_triton(logits, targets.long(), LossRule(-1, 0.1, 1e-3), True)
            for factor in (None, torch.ones(()), torch.ones(3)):
                triton_kernel.cross_entropy_gradient_triton(logits, targets, torch.ones(3), factor, LossRule(), False)

    launches = launches_of(monkeypatch, triton_kernel, "_launch_kernel", call)
    assert len({launch.key for launch in launches}) == 20
    for launch in launches:
        variant = compiled(triton_kernel.cross_entropy_kernel, launch, capability)
        assert f".target sm_{capability}" in variant.asm["ptx"]
        assert stack_and_local_bytes(variant, tmp_path) == [0, 0]


def test_equal_keys_are_one_variant_of_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from tests.kernels.variants import launches_of, specialized

    from octavo.kernels.cross_entropy import triton_kernel

    def call() -> None:
        shapes = [(1, 1), (1, 2), (16, 16), (7, 13), (40, 48), (2, 9000)]
        for shape, dtype, rule in itertools.product(shapes, DTYPES, RULES[1:3]):
            wide = torch.ones(shape[0], shape[1] + 16, dtype=dtype)
            kinds = (torch.ones(shape, dtype=dtype), wide[:, : shape[1]], wide[:, 1 : 1 + shape[1]])
            for x, number in itertools.product(kinds, (0, 1)):
                targets = torch.zeros(shape[0] + 1, dtype=(torch.int64, torch.int32)[number])[number:][: shape[0]]
                triton_kernel.cross_entropy_triton(x, targets, rule, bool(number))
                for factor in (None, torch.ones(()), torch.ones(shape[0] + 1)[number:][: shape[0]]):
                    lse = torch.zeros(shape[0] + 1)[number:][: shape[0]]
                    triton_kernel.cross_entropy_gradient_triton(x, targets, lse, factor, rule, bool(number))

    variants: dict[Any, Any] = {}
    for launch in launches_of(monkeypatch, triton_kernel, "_launch_kernel", call):
        variant = specialized(triton_kernel.cross_entropy_kernel, launch)
        assert variants.setdefault((launch.key, launch.warps), variant) == variant, launch.key
    assert len(variants) > 20


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_on_a_gpu_the_twin_is_as_close_as_its_reference(rule: LossRule) -> None:
    for number, shape in enumerate([*SHAPES, (100, 50257), (64, 128256)]):
        logits, targets = inputs(shape, DTYPES[number % 3], rule, "cuda")
        loss, lse = cross_entropy(logits, targets, rule)
        factor = torch.randn(shape[0], device="cuda")
        gradient = cross_entropy_gradient(logits, targets, lse, factor, rule)
        assert_close((loss, lse, gradient), logits, targets, rule, factor)
        over = logits.clone()
        both = cross_entropy_with_gradient(over, targets, rule)
        assert all(torch.equal(a, b) for a, b in zip(both, (loss, lse), strict=True))
        assert torch.equal(over, cross_entropy_gradient(logits, targets, lse, None, rule))
        assert_close((loss, lse, over), logits, targets, rule)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu_a_target_that_is_no_class_is_nan_and_nothing_waits(dtype: torch.dtype) -> None:
    logits, targets = special_rows(dtype, "cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss, lse = cross_entropy(logits, targets)
        gradient = cross_entropy_gradient(logits, targets, lse)
        over = logits.clone()
        cross_entropy_with_gradient(over, targets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_special(loss, lse, gradient, logits, targets)
    assert_special(loss, lse, over, logits, targets)
