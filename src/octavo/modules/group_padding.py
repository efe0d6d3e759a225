"""octavo.Padding and octavo.Unpadding: the tokens of each expert filled up with zeros to a multiple, and back.

    x, m_splits = padding(x, m_splits)          [M, H] -> [M', H], sizes rounded up to a multiple of 16
    y = grouped_linear(x, m_splits)
    y = unpadding(y, the sizes before)          [M', H] -> [M, H]

`octavo.GroupedLinear` needs neither: it pads inside. They serve several layers in a row that would each do so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from octavo.functional.group_padding import (
    pad_groups,
    pad_groups_on_device,
    padded_splits,
    unpad_groups,
    unpad_groups_on_device,
)
from octavo.functional.grouped_sizes import assert_sizes, check_size_tensor, host_knows, is_integer, sizes_on_host
from octavo.kernels import ALIGNMENT


class Padding(nn.Module):
    """Fills up the rows of each group with zeros.

    Args:
        num_gemms: how many groups.
        multiple: to a multiple of it: 16 for FP8 products, 32 for those with scales of MX.
    """

    def __init__(self, num_gemms: int, multiple: int = ALIGNMENT) -> None:
        super().__init__()
        _check_options(num_gemms, multiple)
        self.num_gemms, self.multiple = num_gemms, multiple

    def forward(self, x: Tensor, m_splits: Sequence[int] | Tensor) -> tuple[Tensor, list[int] | Tensor]:
        """(x [M', H], its sizes).

        Args:
            x: [M, H].
            m_splits: rows of each group: integers, or an integer tensor [num_gemms] on the device of x. One on a GPU is
                not looked at: its values are asserted there. Of any tensor M' is as many rows as any sizes need, and
                the last group has what is left over.

        Raises:
            ValueError: sizes are no integers of 0 or more, one a group, or do not sum to M.
        """
        if isinstance(m_splits, Tensor):
            _check_matrix(x)
            _check_tensor(m_splits, self.num_gemms, x, x.shape[0])
            return pad_groups_on_device(x, _wide(m_splits), self.multiple)
        splits = sizes_on_host(m_splits, self.num_gemms)
        _check_rows(x, sum(splits))
        whole = padded_splits(splits, self.multiple)
        return (x if whole == list(splits) else pad_groups(x, splits, self.multiple)), whole

    def extra_repr(self) -> str:
        """Options."""
        return f"num_gemms={self.num_gemms}, multiple={self.multiple}"


class Unpadding(nn.Module):
    """Takes out what `Padding` filled up.

    Args:
        num_gemms, multiple: as of `Padding`.
    """

    def __init__(self, num_gemms: int, multiple: int = ALIGNMENT) -> None:
        super().__init__()
        _check_options(num_gemms, multiple)
        self.num_gemms, self.multiple = num_gemms, multiple

    def forward(self, x: Tensor, m_splits: Sequence[int] | Tensor, num_rows: int | None = None) -> Tensor:
        """x [M, H] without the padding.

        Args:
            x: [M', H].
            m_splits: rows of each group, before they were padded.
            num_rows: M, which is needed of sizes in a tensor.

        Raises:
            ValueError: sizes are no integers of 0 or more, one a group; or they, padded, are not those of x; or their
                sum is not `num_rows`.
        """
        if num_rows is not None and (not is_integer(num_rows) or num_rows < 0):
            raise ValueError(f"num_rows is {num_rows!r}: expected an integer of 0 or more, the sum of m_splits")
        if isinstance(m_splits, Tensor):
            if num_rows is None:
                raise ValueError("m_splits is a tensor, whose sum is not asked of the device: give num_rows as well")
            _check_matrix(x)
            _check_tensor(m_splits, self.num_gemms, x, num_rows)
            _check_room(x, m_splits, self.multiple, num_rows)
            return unpad_groups_on_device(x, _wide(m_splits), self.multiple, num_rows)
        splits = sizes_on_host(m_splits, self.num_gemms)
        if num_rows is not None and num_rows != sum(splits):
            raise ValueError(f"num_rows is {num_rows}, and m_splits sums to {sum(splits)}: give that, or leave it out")
        whole = padded_splits(splits, self.multiple)
        _check_rows(x, sum(whole))
        return x if whole == list(splits) else unpad_groups(x, splits, self.multiple)

    def extra_repr(self) -> str:
        """Options."""
        return f"num_gemms={self.num_gemms}, multiple={self.multiple}"


def _check_options(num_gemms: int, multiple: int) -> None:
    for name, value in (("num_gemms", num_gemms), ("multiple", multiple)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} is {value!r}: expected an integer of 1 or more")


def _check_tensor(m_splits: Tensor, num_groups: int, x: Tensor, rows: int) -> None:
    """Sizes in a tensor, which sum to `rows`."""
    check_size_tensor(m_splits, num_groups, x.device)
    if not host_knows(m_splits):
        assert_sizes(m_splits, rows)
        return
    total = sum(sizes_on_host(m_splits, num_groups))
    if total != rows:
        raise ValueError(
            f"m_splits {m_splits.tolist()} sums to {total}, and there are {rows} rows: each is of one group"
        )


def _check_room(x: Tensor, m_splits: Tensor, multiple: int, num_rows: int) -> None:
    """x has the rows that sizes padded to the multiple take."""
    if x.shape[0] < num_rows:
        raise ValueError(f"x has shape {tuple(x.shape)} and num_rows is {num_rows}: padding leaves no fewer than those")
    needed = (torch.div(_wide(m_splits) + (multiple - 1), multiple, rounding_mode="floor") * multiple).sum()
    if not host_knows(m_splits):
        torch._assert_async(needed <= x.shape[0], "x has fewer rows than m_splits padded to the multiple")
    elif x.shape[0] < int(needed):
        raise ValueError(
            f"x has shape {tuple(x.shape)}, and m_splits {m_splits.tolist()} padded to multiples of {multiple} sums to"
            f" {int(needed)}: give what Padding(..., {multiple}) made of these sizes"
        )


def _wide(m_splits: Tensor) -> Tensor:
    """Of 32 bits at least, which padded sizes fit into."""
    return m_splits.to(torch.promote_types(m_splits.dtype, torch.int32))


def _check_matrix(x: Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}: expected [rows, H], as x.flatten(0, -2) gives")


def _check_rows(x: Tensor, rows: int) -> None:
    if x.dim() != 2 or x.shape[0] != rows:
        raise ValueError(f"x has shape {tuple(x.shape)}, and the sizes sum to {rows}: expected [{rows}, H]")
