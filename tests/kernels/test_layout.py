"""Padding to the alignment of FP8 products."""

from __future__ import annotations

import torch

from octavo.kernels import ALIGNMENT, pad_matrix, pad_row_scale, padded


def test_extents_go_up_to_the_next_multiple_of_sixteen() -> None:
    assert ALIGNMENT == 16
    assert [padded(n) for n in (0, 1, 15, 16, 17, 767)] == [0, 16, 16, 16, 32, 768]


def test_a_matrix_is_filled_up_at_its_end() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    filled = pad_matrix(x, value=7.0)
    assert filled.shape == (16, 16)
    assert torch.equal(filled[:2, :3], x)
    assert filled.sum() == x.sum() + 7.0 * (256 - 6)
    assert pad_matrix(x)[2:].count_nonzero() == pad_matrix(x)[:, 3:].count_nonzero() == 0


def test_what_is_aligned_is_not_copied() -> None:
    x, scale = torch.ones(32, 16), torch.ones(32, 1)
    assert pad_matrix(x) is x
    assert pad_row_scale(scale) is scale
    assert pad_row_scale(torch.tensor(3.0)).item() == 3.0


def test_a_row_scale_is_filled_up_with_ones() -> None:
    filled = pad_row_scale(torch.full((3, 1), 5.0))
    assert filled.flatten().tolist() == [5.0] * 3 + [1.0] * 13
