"""Sums of products of codes as Hopper's FP8 tensor cores make them, in plain PyTorch, bit by bit.

    accumulator [M, N] = sum over K of a [M, K] * b [N, K]

One step of the tensor core takes 32 products and what its register holds:

    E        = the largest exponent among the products that are not zero, and the register's
    register = truncate(sum of trunc(term * 2^(13 - E)) * 2^(E - 13), 13 fraction bits)

Sources. Alignment to the largest exponent, 14 bits, what is below them truncated: DeepSeek-AI, "DeepSeek-V3 Technical
Report", 2024, 3.5.2. A register of 13 fraction bits: SageAttention2, arXiv:2411.10958. Steps of 32, the register in the
alignment, a product's exponent as the sum of its operands' (of a subnormal: its format's least), truncation toward
zero, zero as +0: Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor Cores", arXiv:2512.07004; Xie et al.,
"MMA-Sim", arXiv:2511.10909. Promotion to float32 every 128 of K: CUTLASS, `GmmaFP8Accumulation`, four instructions of
32. All of it together is what the packages mmasim 2.1.1 and mmaemu 0.1.0 compute; the latter replays an H100's outputs.

Scales by block. As cuBLASLt 13 multiplies on an H200, seen bit for bit: the sum of a block of 128 enters by a fused
multiply-add, times both scales if those of b are by 128x128, else first times that of a.

What it does not do: cuBLASLt may split K of outputs that are too small to fill the card, and add the parts in float32;
which products it splits depends on its version and on the card, and none is split here. NaN and infinities are IEEE's;
the bits of a NaN are not the hardware's.

The price: about fifty times the time of a product in float32 on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.formats import decode, format_of

STEP = 32
FRACTION_BITS = 13
PROMOTED = 128
# Elements of the output that are summed together: 32 products of each are held, in 8 bytes each; on a CPU 8 MiB.
_TILE = {"cpu": 2**15}
_TILE_ELSEWHERE = 2**20
_WIDEST = 512
# What stands for the exponent of zero: below that of any product, and 2^(13 - E) is still a float32.
_LEAST = -100
# One exponent more is eight binary digits in a weight, so that the sum of 32 weights does not reach the next exponent.
_DIGITS = 8
_DROPPED = (1 << (23 - FRACTION_BITS)) - 1


class _Operand(NamedTuple):
    """An operand, K first and filled up with zeros to whole steps.

    Attributes:
        values: float32 [K', M].
        weights: float64 [K', M], 2^(8 e) of a value of exponent e, 0 of zero.
    """

    values: Tensor
    weights: Tensor


def hopper_sum(
    a: Tensor,
    b: Tensor,
    promoted: bool,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    period: int = PROMOTED,
    joined: bool = False,
) -> Tensor:
    """The accumulator of each element of the output -> float32 [M, N]; any device.

    Args:
        a, b: codes [M, K] and [N, K], of any format.
        promoted: every `period` of K the register is added to float32, to nearest even, and starts again at zero:
            "precise".
        scale_a, scale_b: float32 [ceil(K / period), M] and [ceil(K / period), N]: of each period; needs `promoted`.
        period: a multiple of 32.
        joined: the register times the product of both scales is added by one rounding; False: the register times
            scale_a, rounded, times scale_b is.
    """
    # 1. Values and exponents; NaN and infinities are zero until step 3.  [K', M], [K', N]
    left, right = _operand(a), _operand(b)
    out = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    # 2. Tile by tile, so that 32 products of every element fit the memory.  [m, n]
    every = period if promoted else max(left.values.shape[0], 1)
    for rows, columns in _tiles(out):
        tile = out[rows, columns]
        # Products as float32, and as integers.  [32, m, n]
        terms = out.new_empty(STEP, *tile.shape)
        work = terms, torch.empty_like(terms, dtype=torch.int32)
        for chunk, start in enumerate(range(0, left.values.shape[0], every)):
            whole = slice(start, start + every)
            register = _register(_part(left, whole, rows), _part(right, whole, columns), work)
            if scale_a is None or scale_b is None:
                tile += register
            else:
                _add_scaled(tile, register, scale_a[chunk, rows, None], scale_b[chunk, columns], joined)
    # 3. Where IEEE's sum is not finite, it is the result.
    return _with_specials(out, a, b)


def _add_scaled(tile: Tensor, register: Tensor, scale_a: Tensor, scale_b: Tensor, joined: bool) -> None:
    """tile [m, n] += register [m, n] by scales [m, 1] and [n], as a fused multiply-add."""
    one, other = (register, scale_a * scale_b) if joined else (register * scale_a, scale_b)
    # The product of two float32 is exact in float64. The sum is rounded to float64 and then to float32, which differs
    # from one rounding where the first lands on a tie of the second: about once in 2^29.
    tile.copy_(torch.addcmul(tile.double(), one.double(), other.double()))


def _operand(codes: Tensor) -> _Operand:
    values = torch.nan_to_num(decode(codes), nan=0.0, posinf=0.0, neginf=0.0).t()
    values = torch.nn.functional.pad(values, (0, 0, 0, -codes.shape[1] % STEP)).contiguous()
    # Subnormals keep the least exponent of their format.
    least = math.frexp(format_of(codes.dtype).min_normal)[1] - 1
    exponents = (torch.frexp(values).exponent - 1).clamp(min=least).to(torch.int64)
    # 2^(8 e) by its bits: exp2 is not exact on every device.
    weights = ((_DIGITS * exponents + 1023) << 52).view(torch.float64)
    return _Operand(values, torch.where(values == 0, 0.0, weights))


def _tiles(out: Tensor) -> Iterator[tuple[slice, slice]]:
    rows, columns = out.shape
    tile = _TILE.get(out.device.type, _TILE_ELSEWHERE)
    wide = max(1, min(columns, tile, _WIDEST))
    high = max(1, tile // wide)
    for row in range(0, rows, high):
        for column in range(0, columns, wide):
            yield slice(row, row + high), slice(column, column + wide)


def _part(operand: _Operand, of_k: slice, of_rows: slice) -> _Operand:
    return _Operand(operand.values[of_k, of_rows], operand.weights[of_k, of_rows])


def _register(a: _Operand, b: _Operand, work: tuple[Tensor, Tensor]) -> Tensor:
    """What the register holds after all of K', from zero -> float32 [m, n].

    Args:
        a, b: of K' x m and K' x n.
        work: float32 and int32 [32, m, n], written over.
    """
    terms, aligned = work
    register = terms.new_zeros(terms.shape[1:])
    for start in range(0, a.values.shape[0], STEP):
        step = slice(start, start + STEP)
        # 1. The largest exponent: the sum of 32 weights 2^(8 e) lies in [2^(8 E), 2^(8 E + 5)].  [m, 32] @ [32, n]
        largest = ((a.weights[step].t() @ b.weights[step]).view(torch.int64) >> 52) - 1023 >> 3
        held = (register.view(torch.int32) >> 23 & 0xFF) - 127
        exponent = torch.maximum(largest.to(torch.int32), held).clamp_(min=_LEAST)
        # 2. Products, exact: two significands of 4 bits at most.  [32, m, n]
        torch.mul(a.values[step, :, None], b.values[step, None, :], out=terms)
        # 3. All terms in units of 2^(E - 13), toward zero as a conversion to integers does it. Each is below 2^15.
        units = _power(FRACTION_BITS - exponent)
        aligned.copy_(terms.mul_(units))
        total = aligned.sum(0, dtype=torch.int32) + (register * units).to(torch.int32)
        # 4. The sum is below 2^21, so exact in float32 too; the register keeps 13 fraction bits of its own exponent.
        register = _truncated(total * _power(exponent - FRACTION_BITS))
    return register


def _power(exponent: Tensor) -> Tensor:
    """2^exponent of int32, as float32, by its bits."""
    return ((exponent + 127) << 23).view(torch.float32)


def _truncated(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & ~_DROPPED).view(torch.float32)


def _with_specials(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    # float32 holds any finite sum of codes: what is not finite here comes of NaN and infinities alone.
    with torch.autocast(a.device.type, enabled=False):
        ieee = decode(a) @ decode(b).t()
    return torch.where(ieee.isfinite(), out, ieee)
