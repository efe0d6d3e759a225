"""octavo.Padding and octavo.Unpadding: groups filled up with zeros and back, and what that does to a GroupedLinear."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import octavo
from octavo.recipes import CurrentScaling, RowwiseScaling

SPLITS = ([5, 0, 33], [0, 0, 7], [16, 32, 0], [1, 1, 1], [0, 0, 0])


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("multiple", [16, 32])
@pytest.mark.parametrize("on_device", [False, True])
def test_there_and_back(splits: list[int], multiple: int, on_device: bool) -> None:
    rows = sum(splits)
    x = torch.randn(rows, 3, requires_grad=True)
    given = torch.tensor(splits, dtype=torch.int32) if on_device else splits
    padded, sizes = octavo.Padding(3, multiple)(x, given)
    sizes = sizes.tolist() if isinstance(sizes, Tensor) else sizes
    assert sum(sizes) == padded.shape[0]
    starts = [0, sizes[0], sizes[0] + sizes[1]]
    for start, size, whole, part in zip(starts, splits, sizes, x.split(splits), strict=True):
        assert whole % multiple == 0
        assert on_device or whole - size < multiple
        assert torch.equal(padded[start : start + size], part)
        assert bool((padded[start + size : start + whole] == 0).all())
    y = octavo.Unpadding(3, multiple)(padded, given, rows)
    assert torch.equal(y, x)
    dy = torch.randn_like(y)
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], dy)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("recipe", [CurrentScaling(), RowwiseScaling()], ids=lambda r: type(r).__name__)
def test_padding_outside_changes_no_result(recipe: octavo.recipes.Recipe, on_device: bool) -> None:
    layer = octavo.GroupedLinear(3, 48, 32, recipe=recipe)
    padding, unpadding = octavo.Padding(3), octavo.Unpadding(3)
    splits = [5, 0, 33]
    given = torch.tensor(splits) if on_device else splits
    x, dy = torch.randn(38, 48, requires_grad=True), torch.randn(38, 32)
    parameters = [x, *layer.parameters()]
    plain = layer(x, splits)
    y = unpadding(layer(*padding(x, given)), given, 38)
    # Zeros change no code; float32 sums of matrices of other extents may go in another order.
    for one, other in zip(
        [plain, *torch.autograd.grad(plain, parameters, dy)], [y, *torch.autograd.grad(y, parameters, dy)], strict=True
    ):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5 * float(one.detach().abs().max()))


def test_what_is_a_multiple_already_is_not_copied() -> None:
    x = torch.randn(48, 3)
    padded, sizes = octavo.Padding(2)(x, [16, 32])
    assert padded is x
    assert sizes == [16, 32]
    assert octavo.Unpadding(2)(x, [16, 32]) is x


@pytest.mark.parametrize("on_device", [False, True])
def test_compiles_whole(on_device: bool) -> None:
    padding, unpadding = octavo.Padding(2), octavo.Unpadding(2)

    def through(x: Tensor, sizes: Tensor | list[int]) -> Tensor:
        padded, _ = padding(x, sizes)
        return unpadding(padded.sin(), sizes, x.shape[0])

    x, splits = torch.randn(12, 3), [5, 7]
    given = torch.tensor(splits) if on_device else splits
    assert torch.equal(torch.compile(through, fullgraph=True, backend="aot_eager")(x, given), x.sin())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple is 0"):
        octavo.Padding(2, 0)
    with pytest.raises(ValueError, match="num_gemms is 0"):
        octavo.Unpadding(0)
    padding, unpadding = octavo.Padding(2), octavo.Unpadding(2)
    with pytest.raises(ValueError, match="3 entries for 2 groups"):
        padding(torch.randn(12, 3), [4, 4, 4])
    with pytest.raises(ValueError, match="the sizes sum to 11"):
        padding(torch.randn(12, 3), [4, 7])
    with pytest.raises(ValueError, match="the sizes sum to 32"):
        unpadding(torch.randn(12, 3), [4, 7])
    with pytest.raises(ValueError, match="give num_rows"):
        unpadding(torch.randn(32, 3), torch.tensor([4, 7]))


WRONG_SIZES = [
    (torch.tensor([3, 3]), "sums to 6, and there are 10 rows"),
    (torch.tensor([3, 30]), "sums to 33, and there are 10 rows"),
    (torch.tensor([-2, 12]), r"m_splits\[0\] is -2"),
    (torch.tensor([4.0, 6.0]), "float32.*expected integers.*give a list"),
    (torch.tensor([True, False]), "torch.bool.*expected integers"),
    (torch.tensor([[4, 6]]), r"shape \(1, 2\).*expected integers"),
    (torch.tensor(10), r"shape \(\).*expected integers"),
    (torch.tensor([4, 3, 3]), "3 entries for 2 groups"),
    ([-2, 12], r"m_splits\[0\] is -2"),
    ([4.0, 6.0], r"m_splits\[0\] is 4.0: expected integers"),
    ([True, 9], r"m_splits\[0\] is True: expected integers"),
    (None, "m_splits is None: expected integers"),
]


@pytest.mark.parametrize(("sizes", "words"), WRONG_SIZES, ids=str)
def test_sizes_that_do_not_fit_are_refused_both_ways(sizes: Tensor | list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        octavo.Padding(2)(torch.randn(10, 8), sizes)
    # 48 rows: as many as any two sizes of 10 rows could need.
    with pytest.raises(ValueError, match=words):
        octavo.Unpadding(2)(torch.randn(48, 8), sizes, 10)


@pytest.mark.parametrize("on_device", [False, True])
def test_unpadding_invents_no_rows(on_device: bool) -> None:
    sizes = [3, 7]
    given = torch.tensor(sizes) if on_device else sizes
    padded, _ = octavo.Padding(2)(torch.randn(10, 8), given)
    unpadding = octavo.Unpadding(2)
    with pytest.raises(ValueError, match="25"):
        unpadding(padded, given, 25)
    for rows in (10.0, -1, True):
        with pytest.raises(ValueError, match=f"num_rows is {rows}: expected an integer"):
            unpadding(padded, given, rows)
    assert unpadding(padded, given, 10).shape == (10, 8)


def test_rows_that_were_not_padded_are_not_taken_out() -> None:
    with pytest.raises(ValueError, match=r"m_splits \[3, 7\] padded to multiples of 16 sums to 32"):
        octavo.Unpadding(2)(torch.randn(31, 8), torch.tensor([3, 7]), 10)
    with pytest.raises(ValueError, match=r"\(9, 8\) and num_rows is 10"):
        octavo.Unpadding(2)(torch.randn(9, 8), torch.tensor([3, 7]), 10)
    for one in (octavo.Padding(2), octavo.Unpadding(2)):
        with pytest.raises(ValueError, match=r"\(2, 5, 8\): expected \[rows, H\]"):
            one(torch.randn(2, 5, 8), torch.tensor([3, 7]), *([10] if isinstance(one, octavo.Unpadding) else []))


@pytest.mark.parametrize("which", ["padding", "unpadding"])
def test_what_only_the_device_knows_is_asserted_there(which: str) -> None:
    """A compiler traces the assertion that a device is given."""
    one = octavo.Padding(2) if which == "padding" else octavo.Unpadding(2)
    x, more = (torch.randn(10, 8), ()) if which == "padding" else (torch.randn(48, 8), (10,))
    compiled = torch.compile(one, fullgraph=True, backend="aot_eager")
    compiled(x, torch.tensor([3, 7]), *more)
    for sizes in ([3, 3], [-2, 12]):
        with pytest.raises(RuntimeError, match="m_splits must be 0 or more and sum to"):
            compiled(x, torch.tensor(sizes), *more)


def test_small_integers_hold_what_padding_makes_of_them() -> None:
    x, sizes = torch.randn(120, 8), torch.tensor([120, 0], dtype=torch.int8)
    padded, whole = octavo.Padding(2, 32)(x, sizes)
    assert int(whole.sum()) == padded.shape[0]
    assert torch.equal(octavo.Unpadding(2, 32)(padded, sizes, 120), x)
