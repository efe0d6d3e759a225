"""Sizes of groups as callers give them, checked: integers that the host knows, or a tensor that it does not look at.

    m_splits    [4, 0, 9], or an integer tensor [E]: rows of each group, 0 or more, which sum to the rows of x

A tensor on a CPU is looked at. One on a device, or one that a compiler traces, is checked by its shape, dtype and
device alone; its values are asserted where they are, and nothing waits for them.
"""

from __future__ import annotations

import numbers
import reprlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def is_integer(value: Any) -> bool:
    """True for an integer of any kind; a bool is none."""
    return type(value) is not bool and isinstance(value, (numbers.Integral, torch.SymInt))


def host_knows(m_splits: Tensor) -> bool:
    """True if its values can be had without waiting for a device, and outside of a trace."""
    return not m_splits.is_cuda and not torch.compiler.is_compiling()


def sizes_on_host(m_splits: Any, num_groups: int, what: str = "groups") -> tuple[int, ...]:
    """The sizes as integers; a tensor is asked for them.

    Args:
        m_splits: what a caller gave.
        num_groups: how many sizes are expected.
        what: the groups are called in errors.

    Raises:
        ValueError: not so many integers of 0 or more.
    """
    if isinstance(m_splits, Tensor):
        check_size_tensor(m_splits, num_groups, m_splits.device, what)
    entries = _entries(m_splits, num_groups)
    if len(entries) != num_groups:
        raise ValueError(
            f"m_splits has {len(entries)} entries for {num_groups} {what}: give one each, 0 for one without a token"
        )
    for index, size in enumerate(entries):
        if not is_integer(size):
            raise ValueError(f"m_splits[{index}] is {reprlib.repr(size)}: {_expected(num_groups)}")
        if size < 0:
            raise ValueError(f"m_splits[{index}] is {size}: a number of tokens is 0 or more")
    # Those of NumPy too become Python's own.
    known: tuple[Any, ...] = (int, torch.SymInt)
    return tuple(size if isinstance(size, known) else int(size) for size in entries)


def check_size_tensor(m_splits: Tensor, num_groups: int, device: torch.device, what: str = "groups") -> None:
    """What is known of sizes without looking at them.

    Raises:
        ValueError: no integers, not one a group, or on another device than `device`.
    """
    if m_splits.dtype not in _INTEGERS or m_splits.dim() != 1 or m_splits.device != device:
        raise ValueError(
            f"m_splits is a tensor of {m_splits.dtype}, of shape {tuple(m_splits.shape)}, on {m_splits.device}:"
            f" {_expected(num_groups)} on {device}"
        )
    if m_splits.shape[0] != num_groups:
        raise ValueError(
            f"m_splits has {m_splits.shape[0]} entries for {num_groups} {what}: give one each, 0 for one without a"
            " token"
        )


def assert_sizes(m_splits: Tensor, rows: int) -> None:
    """Tell the device to check that sizes are 0 or more and sum to `rows`."""
    fits = (m_splits >= 0).all() & (m_splits.sum() == rows)
    torch._assert_async(fits, "m_splits must be 0 or more and sum to the number of rows")


def _entries(m_splits: Any, num_groups: int) -> Sequence[Any]:
    if isinstance(m_splits, (list, tuple)):
        return m_splits
    # Tensors, and what NumPy has.
    listed = m_splits.tolist() if hasattr(m_splits, "tolist") else m_splits
    if not isinstance(listed, Sequence) or isinstance(listed, (str, bytes)):
        raise ValueError(f"m_splits is {reprlib.repr(m_splits)}: {_expected(num_groups)}")
    return listed


def _expected(num_groups: int) -> str:
    shown = ", ".join(["4", "0", "9"][:num_groups]) + (", ..." if num_groups > 3 else "")
    return (
        f"expected integers, one for each of {num_groups}: give a list, [{shown}], or an integer tensor [{num_groups}]"
    )
