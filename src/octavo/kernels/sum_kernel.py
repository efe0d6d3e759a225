"""Column sums of a matrix from those of its blocks, added in an order that is always the same.

    out [columns] = sum over parts of sums [parts * columns]

The sums of blocks are one vector: of a matrix with a symbol for its parts the compiler would ask whether that is 1.

`torch.sum` takes longer over so few rows: with it a cast with sums of 8192 x 1280 ran 21.9 us on an H200, with this
kernel 20.0, and compiled code adds as eager code does.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.allocation import new_on
from octavo.kernels.launcher import Key, Launcher, common_alignment

# Extents of what is added at a time.
_PARTS = 32
_COLUMNS = 32
WARPS = 4


@triton.jit(do_not_specialize=("columns", "parts"))
def join_sums_kernel(sums, out, columns, parts, ALIGN: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """COLUMNS columns of sums [parts * columns], PARTS parts at a time -> out [columns]; columns in units of ALIGN."""
    columns = columns * ALIGN
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([PARTS, COLUMNS], tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        inside = (part < parts)[:, None] & (column < columns)[None, :]
        total += tl.load(sums + part[:, None].to(tl.int64) * columns + column[None, :], mask=inside, other=0.0)
    tl.store(out + column, tl.sum(total, axis=0), mask=column < columns)


_launch_join = Launcher(join_sums_kernel)


def joined_sums(sums: Tensor, columns: int) -> Tensor:
    """Sums [K] of those of P blocks of rows, float32 [P * K], on the current device."""
    programs, numbers, constants = join_arguments(sums.shape[0] // columns, columns)
    out = new_on(sums.get_device())((columns,), (1,), torch.float32)
    key = Key.of(tuple(number >> 31 for number in numbers), constants)
    _launch_join(programs, key, (sums, out), numbers, constants, WARPS)
    return out


def join_arguments(parts: Any, columns: Any) -> tuple[Any, tuple[Any, Any], tuple[int, int, int]]:
    """(programs, numbers, constants) of a launch, in traced code too."""
    align = common_alignment(columns)
    return -(-columns // _COLUMNS), (columns // align, parts), (align, _PARTS, _COLUMNS)
