"""octavo.cross_entropy: torch's own in float64, and what becomes of the logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.test_cross_entropy import assert_close, inputs
from torch import Tensor

import octavo
from octavo.kernels.cross_entropy import LossRule, cross_entropy_gradient

BF16 = torch.bfloat16
REDUCTIONS = ("mean", "sum", "none")


def backward(loss: Tensor, weights: Tensor | None) -> None:
    """With a gradient that is no 1."""
    (loss * 0.7 if weights is None else loss * weights).sum().backward()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_loss_and_gradient_are_torchs(reduction: Any, overwrite: bool) -> None:
    values, targets, weights = torch.randn(2, 7, 33), torch.randint(0, 33, (2, 7)), torch.randn(2, 7)
    targets[0, 3] = targets[1, 0] = -5
    leaf, exact = values.clone().requires_grad_(), values.double().requires_grad_()
    options = {"ignore_index": -5, "label_smoothing": 0.1, "reduction": reduction}
    loss = octavo.cross_entropy(leaf * 1, targets, **options, overwrite_logits=overwrite)
    expected = torch.nn.functional.cross_entropy(exact.flatten(0, 1), targets.flatten(), **options)
    expected = expected.reshape(loss.shape)
    each = weights if reduction == "none" else None
    backward(loss, each)
    backward(expected, each)
    # float32 with 33 classes: some 10^2 roundings of 6e-8 each of values up to 5.
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)


def test_each_row_is_the_kernels() -> None:
    """With the square of log sum exp, in bfloat16, through rows that do not lie side by side."""
    rule = LossRule(-100, 0.1, 1e-2)
    logits, targets = inputs((9, 40), BF16, rule)
    leaf, factor = logits.t().contiguous().requires_grad_(), torch.randn(9)
    loss = octavo.cross_entropy(leaf.t(), targets, label_smoothing=0.1, z_loss=1e-2, reduction="none")
    loss.backward(factor)
    lse = torch.where(targets == -100, 0.0, logits.double().logsumexp(1)).float()
    assert leaf.grad.dtype == BF16
    assert_close((loss.detach(), lse, leaf.grad.t()), logits, targets, rule, factor)


def test_the_loss_is_float32_and_the_same_without_gradients() -> None:
    logits, targets = torch.randn(6, 20, dtype=BF16, requires_grad=True), torch.randint(0, 20, (6,))
    for reduction in REDUCTIONS:
        loss = octavo.cross_entropy(logits, targets, reduction=reduction)
        with torch.no_grad():
            plain = octavo.cross_entropy(logits, targets, reduction=reduction)
        assert loss.dtype == plain.dtype == torch.float32
        assert torch.equal(loss, plain)
        assert not plain.requires_grad


def test_a_mean_over_no_rows_is_nan_without_a_gradient_as_torchs() -> None:
    logits, targets = torch.randn(3, 5, requires_grad=True), torch.full((3,), -100)
    loss = octavo.cross_entropy(logits, targets)
    assert bool(loss.isnan())
    assert bool(torch.nn.functional.cross_entropy(logits, targets).isnan())
    loss.backward()
    assert torch.equal(logits.grad, torch.zeros(3, 5))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_overwriting_takes_no_memory_and_whoever_kept_the_logits_is_told(device: str) -> None:
    """On a GPU a kernel writes, of which autograd has to be told."""
    leaf, targets = torch.randn(6, 20, device=device, requires_grad=True), torch.randint(0, 20, (6,), device=device)
    logits = leaf * 1
    loss = octavo.cross_entropy(logits, targets, overwrite_logits=True)
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert gradient.data_ptr() == logits.data_ptr()
    lse = leaf.detach().logsumexp(1)
    expected = cross_entropy_gradient(leaf.detach(), targets, lse, torch.tensor(1 / 6, device=device))
    torch.testing.assert_close(gradient, expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, logits)
    # exp keeps its result, which is the logits.
    exponentials = leaf.exp()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        octavo.cross_entropy(exponentials, targets, overwrite_logits=True).backward()
    with pytest.raises(ValueError, match="over the values of a leaf"):
        octavo.cross_entropy(leaf, targets, overwrite_logits=True)


@pytest.mark.parametrize(
    "view", [lambda p: p, lambda p: p[:6], lambda p: p.view(-1, 40)[2:8]], ids=["leaf", "rows", "view"]
)
def test_overwriting_never_loses_the_values_of_a_leaf(view: Any) -> None:
    parameter = torch.nn.Parameter(torch.randn(10, 40))
    logits = view(parameter)
    targets = torch.randint(0, 40, logits.shape[:1])
    with pytest.raises(ValueError, match=r"overwrite_logits .* Parameter of shape \(\d+, 40\): leave it out"):
        octavo.cross_entropy(logits, targets, overwrite_logits=True)
    before = parameter.detach().clone()
    octavo.cross_entropy(logits.clone(), targets, overwrite_logits=True).backward()
    assert torch.equal(parameter, before)
    # Views of what autograd made, as of a product that was padded, are overwritten.
    octavo.cross_entropy((parameter * 1)[:4], targets[:4], overwrite_logits=True).backward()


def test_the_logits_are_kept_and_four_bytes_a_row() -> None:
    logits, targets, kept = torch.randn(6, 20, requires_grad=True), torch.randint(0, 20, (6,)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        octavo.cross_entropy(logits, targets, reduction="sum")
    own = [t for t in kept if t.data_ptr() not in (logits.data_ptr(), targets.data_ptr())]
    assert [(t.dtype, t.numel()) for t in own] == [(torch.float32, 6)]


def test_a_second_derivative_is_refused() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    loss = octavo.cross_entropy(logits, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=r"create_graph=True .* torch\.nn\.functional\.cross_entropy"):
        torch.autograd.grad(loss, logits, create_graph=True)


def test_bad_arguments_are_named() -> None:
    logits, targets = torch.randn(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="reduction is 'average': expected 'mean', 'sum' or 'none'"):
        octavo.cross_entropy(logits, targets, reduction="average")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="classes are the last dimension of logits"):
        octavo.cross_entropy(logits.transpose(1, 2), targets)
    with pytest.raises(ValueError, match=r"logits are torch\.float64"):
        octavo.cross_entropy(logits.double(), targets)
    with pytest.raises(ValueError, match=r"label_smoothing is 2: expected a number from 0 to 1"):
        octavo.cross_entropy(logits, targets, label_smoothing=2)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled), pytest.raises(ValueError, match="targets hold 5: with 5 classes"):
            octavo.cross_entropy(logits, targets + 5)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_compiled_code_gives_the_same_bits_in_one_graph(reduction: Any) -> None:
    def step(x: Tensor, targets: Tensor) -> Tensor:
        return octavo.cross_entropy(x * 2, targets, reduction=reduction, label_smoothing=0.1, overwrite_logits=True)

    function = torch.compile(step, fullgraph=True, backend="aot_eager")
    for rows in (20, 33):
        x, targets, outcomes = torch.randn(rows, 40), torch.randint(0, 40, (rows,)), []
        for call in (step, function):
            leaf = x.clone().requires_grad_()
            loss = call(leaf, targets)
            backward(loss, None)
            outcomes.append((loss, leaf.grad))
        assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_on_a_gpu_nothing_waits_and_a_cuda_graph_replays_it(reduction: Any) -> None:
    rule = LossRule(-100, 0.1)
    logits, targets = inputs((64, 1000), BF16, rule, "cuda")
    static = logits.clone().requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        loss = octavo.cross_entropy(static, targets, label_smoothing=0.1, reduction=reduction)
        (gradient,) = torch.autograd.grad(loss.sum(), static)
        return loss.detach(), gradient

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        expected = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
