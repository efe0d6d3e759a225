"""octavo.Padding and octavo.Unpadding: the tokens of each expert filled up with zeros to a multiple, and back.

    x, m_splits = padding(x, m_splits)          [M, H] -> [M', H], sizes rounded up to a multiple of 16
    y = grouped_linear(x, m_splits)
    y = unpadding(y, the sizes before)          [M', H] -> [M, H]

`octavo.GroupedLinear` needs neither: it pads inside. They serve several layers in a row that would each do so.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from octavo.functional.group_padding import (
    pad_groups,
    pad_groups_on_device,
    padded_splits,
    unpad_groups,
    unpad_groups_on_device,
)
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
            m_splits: rows of each group: integers, or a tensor [num_gemms] on the device, which is not looked at; then
                M' is as many rows as any sizes need, and the last group has what is left over.
        """
        if isinstance(m_splits, Tensor):
            _check_sizes(m_splits.shape[0], self.num_gemms)
            return pad_groups_on_device(x, m_splits, self.multiple)
        _check_sizes(len(m_splits), self.num_gemms)
        _check_rows(x, sum(m_splits))
        whole = padded_splits(m_splits, self.multiple)
        return (x if whole == list(m_splits) else pad_groups(x, m_splits, self.multiple)), whole

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
            num_rows: M, which is needed of sizes on the device.
        """
        if isinstance(m_splits, Tensor):
            _check_sizes(m_splits.shape[0], self.num_gemms)
            if num_rows is None:
                raise ValueError("m_splits is a tensor, whose sum is not asked of the device: give num_rows as well")
            return unpad_groups_on_device(x, m_splits, self.multiple, num_rows)
        _check_sizes(len(m_splits), self.num_gemms)
        whole = padded_splits(m_splits, self.multiple)
        _check_rows(x, sum(whole))
        return x if whole == list(m_splits) else unpad_groups(x, m_splits, self.multiple)

    def extra_repr(self) -> str:
        """Options."""
        return f"num_gemms={self.num_gemms}, multiple={self.multiple}"


def _check_options(num_gemms: int, multiple: int) -> None:
    for name, value in (("num_gemms", num_gemms), ("multiple", multiple)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} is {value!r}: expected an integer of 1 or more")


def _check_sizes(given: int, expected: int) -> None:
    if given != expected:
        raise ValueError(f"m_splits has {given} entries for {expected} groups: give one a group, 0 for an empty one")


def _check_rows(x: Tensor, rows: int) -> None:
    if x.dim() != 2 or x.shape[0] != rows:
        raise ValueError(f"x has shape {tuple(x.shape)}, and the sizes sum to {rows}: expected [{rows}, H]")
