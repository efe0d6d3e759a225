"""What ends each half of a transformer layer: dropout's and drop path's expectation, and one expression."""

from __future__ import annotations

import torch

from octavo.functional.bias_dropout_add import bias_dropout_add, drop_path, drop_path_of_packed


def test_without_anything_to_drop_it_is_a_sum() -> None:
    x, bias, residual = torch.randn(5, 3, 8), torch.randn(8), torch.randn(5, 3, 8)
    assert torch.equal(bias_dropout_add(x, bias, residual, 0.0, True), residual + (x + bias))
    assert torch.equal(bias_dropout_add(x, None, residual, 0.5, False), residual + x)


def test_dropout_drops_the_sum_with_the_bias_and_never_the_residual() -> None:
    x, bias, residual = torch.zeros(200, 100), torch.ones(100), torch.full((200, 100), 7.0)
    out = bias_dropout_add(x, bias, residual, 0.25, True)
    # 1 / (1 - 0.25), exactly rounded once, or nothing.
    kept = out != 7.0
    assert torch.equal(out[kept], (residual + bias / 0.75)[kept])
    # 20,000 draws: six standard deviations are 6 sqrt(0.25 * 0.75 / 20000).
    assert abs(float(kept.float().mean()) - 0.75) < 6 * (0.25 * 0.75 / 20000) ** 0.5


def test_drop_path_drops_samples_whole() -> None:
    x, residual = torch.randn(5, 1000, 8), torch.randn(5, 1000, 8)
    keep = drop_path(x, 0.5, 1)
    out = bias_dropout_add(x, None, residual, 0.0, True, keep)
    gone = (out == residual).all(-1).all(0)
    # The factor is 2: exact.
    assert torch.equal(out, torch.where(gone[:, None], residual, residual + 2 * x))
    assert abs(float(gone.float().mean()) - 0.5) < 6 * (0.25 / 1000) ** 0.5


def test_drop_path_of_packed_sequences_drops_them_whole() -> None:
    cu = torch.arange(0, 3001, 3, dtype=torch.int32)
    keep = drop_path_of_packed(torch.randn(3002, 8), 0.5, cu)
    assert keep.shape == (3002, 1)
    of_sequence = keep[:3000, 0].reshape(-1, 3)
    assert torch.equal(of_sequence, of_sequence[:, :1].expand(-1, 3))
    assert set(of_sequence.flatten().tolist()) == {0.0, 2.0}
    assert abs(float((of_sequence[:, 0] == 0).float().mean()) - 0.5) < 6 * (0.25 / 1000) ** 0.5


def test_it_compiles_without_a_break() -> None:
    x, residual, keep = torch.randn(5, 3, 8), torch.randn(5, 3, 8), torch.full((1, 3, 1), 2.0)
    torch._dynamo.reset()
    compiled = torch.compile(bias_dropout_add, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, None, residual, 0.0, True, keep), torch.addcmul(residual, x, keep))
