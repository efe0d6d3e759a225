"""te.parallel_cross_entropy against torch's own, with Transformer Engine's arguments."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import octavo.compat.transformer_engine.pytorch as te
from octavo.compat.transformer_engine.pytorch.cross_entropy import parallel_cross_entropy


@pytest.mark.parametrize("reduce_loss", [False, True])
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_loss_and_gradient_are_torchs(reduce_loss: bool, ignored: bool, label_smoothing: float) -> None:
    logits = torch.randn(2, 6, 33, requires_grad=True)
    target = torch.randint(0, 33, (2, 6))
    if ignored:
        target[0, 3:] = -7
    loss = te.parallel_cross_entropy(logits, target, label_smoothing, reduce_loss, None, -7)
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1),
        target.flatten(),
        ignore_index=-7,
        label_smoothing=label_smoothing,
        reduction="mean" if reduce_loss else "none",
    )
    torch.testing.assert_close(loss, expected if reduce_loss else expected.reshape(2, 6))
    given = logits.detach().clone()
    (gradient,) = torch.autograd.grad(loss.square().sum(), logits)
    (expected_gradient,) = torch.autograd.grad(expected.square().sum(), logits)
    torch.testing.assert_close(gradient, expected_gradient)
    assert torch.equal(logits, given)


def test_the_loss_is_float32_and_the_gradient_the_logits_dtype() -> None:
    logits = torch.randn(2, 6, 33, dtype=torch.bfloat16, requires_grad=True)
    loss = parallel_cross_entropy(_input=logits, target=torch.randint(0, 33, (2, 6)), reduce_loss=True)
    loss.backward()
    assert loss.dtype == torch.float32
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_several_ranks_and_missing_tensors_are_refused_with_the_way_out() -> None:
    logits, target = torch.randn(2, 6, 33), torch.zeros(2, 6, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match=r"dist_process_group of 2 ranks .* gather the logits"):
        te.parallel_cross_entropy(logits, target, dist_process_group=SimpleNamespace(size=lambda: 2))
    one = te.parallel_cross_entropy(logits, target, dist_process_group=SimpleNamespace(size=lambda: 1))
    assert torch.equal(one, te.parallel_cross_entropy(logits, target))
    with pytest.raises(ValueError, match="takes logits as inp"):
        te.parallel_cross_entropy(logits, target, _input=logits)
    with pytest.raises(ValueError, match="and target"):
        te.parallel_cross_entropy(logits)
