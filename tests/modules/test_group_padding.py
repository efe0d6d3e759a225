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
