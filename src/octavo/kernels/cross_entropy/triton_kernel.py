"""cross_entropy on a GPU: a program a row, which goes through the vocabulary in blocks.

The first pass keeps the largest logit so far and the sum of exponentials in its units (online softmax), the second,
which finds a row of up to a few hundred thousand logits in the L2 cache, writes the gradient, in place on request.
Bytes moved an element of bf16: 2 read for the loss, 2 more written for the gradient.

Exponentials and logarithms are the hardware's, within 2^-21 relative, or absolute of a logarithm near 0.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cross_entropy.rule import LossRule
from octavo.kernels.launcher import Launcher, specialization
from octavo.kernels.tile import INTERPRETED, THROUGH_DTYPES, key_of, rounded, with_contiguous_rows

# Elements of a block, 16 a thread.
_BLOCK = 8192
_A_THREAD = 16


@triton.jit
def _loaded(source, place, end, other, WHOLE: tl.constexpr):
    """A block of a row as float32; a whole one without masks, so that what is aligned is read 16 bytes at a time."""
    if WHOLE:
        return tl.load(source + place).to(tl.float32)
    else:
        return tl.load(source + place, mask=place < end, other=other).to(tl.float32)


@triton.jit
def _with_block(values, largest, exponentials):
    """The largest value so far, what exponentials are shifted by for it, and their sum, with a block more."""
    larger = tl.maximum(largest, tl.max(values, axis=0))
    shift = tl.where(larger == -float("inf"), 0.0, larger)
    return larger, shift, exponentials * tl.exp(largest - shift) + tl.sum(tl.exp(values - shift), axis=0)


@triton.jit
def _gradient_of(
    values, here, lse, smoothed, weight, RULE: tl.constexpr, THROUGH: tl.constexpr, INTERPRETED: tl.constexpr
):
    """The gradient of a block, `here` where its target stands, rounded through the dtype of the logits."""
    result = tl.exp(values - lse)
    if RULE[1] > 0:
        result = result * (1.0 + 2.0 * RULE[1] * lse)
    if RULE[0] > 0:
        result = result - smoothed
    result = tl.where(here, result - (1.0 - RULE[0]), result) * weight
    return rounded(result, THROUGH, INTERPRETED)


@triton.jit
def cross_entropy_kernel(
    logits,
    targets,
    losses,
    lses,
    factor,
    gradient,
    columns,
    stride_logits,
    stride_gradient,
    stride_factor,
    IGNORE_INDEX: tl.constexpr,
    LABEL_SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    HAS_LOSS: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    THROUGH: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row of logits [rows, columns]; HAS_LOSS: losses and lses [rows] are written, else lses are read.

    -> gradient [rows, columns], which may be logits itself.
    """
    # 1. Which row, 64 bits, since an offset can exceed 2^31; where its whole blocks end. One that does not count has 0.
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * stride_logits
    target = tl.load(targets + row).to(tl.int64)
    counts = target != IGNORE_INDEX
    inside = (target >= 0) & (target < columns)
    column = tl.arange(0, BLOCK)
    end = tl.where(counts, columns, 0)
    whole = end // BLOCK * BLOCK
    spot = tl.where(inside, target, -1).to(tl.int32)
    smoothed = LABEL_SMOOTHING / columns
    RULE: tl.constexpr = (LABEL_SMOOTHING, Z_LOSS)
    if HAS_LOSS:
        # 2. The logit of the target, before a gradient is written in its place.
        at = tl.load(source + target, mask=counts & inside, other=0.0).to(tl.float32)
        # 3. The largest logit so far, the sum of exponentials in its units, and that of the logits less it.
        largest = tl.full((), -float("inf"), tl.float32)
        exponentials = tl.full((), 0.0, tl.float32)
        shift = tl.full((), 0.0, tl.float32)
        total = tl.full((), 0.0, tl.float32)
        for first in range(0, whole, BLOCK):
            values = _loaded(source, first + column, end, 0.0, True)
            largest, shifted, exponentials = _with_block(values, largest, exponentials)
            if LABEL_SMOOTHING > 0:
                total += first * (shift - shifted) + tl.sum(values - shifted, axis=0)
            shift = shifted
        values = _loaded(source, whole + column, end, -float("inf"), False)
        largest, shifted, exponentials = _with_block(values, largest, exponentials)
        if LABEL_SMOOTHING > 0:
            total += whole * (shift - shifted) + tl.sum(tl.where(whole + column < end, values - shifted, 0.0), axis=0)
        # 4. Its log sum exp, NaN where the target is no class; its loss, of what has been shifted.
        log = tl.where(inside, tl.log(exponentials), tl.full((), float("nan"), tl.float32))
        lse = shifted + log
        loss = log - (1.0 - LABEL_SMOOTHING) * (at - shifted)
        if LABEL_SMOOTHING > 0:
            loss = loss - smoothed * total
        if Z_LOSS > 0:
            loss = loss + Z_LOSS * lse * lse
        tl.store(losses + row, tl.where(counts, loss, 0.0))
        tl.store(lses + row, tl.where(counts, lse, 0.0))
    else:
        lse = tl.load(lses + row)
    if HAS_GRADIENT:
        # 5. Probabilities less the smoothed target, where all threads have read what is about to be overwritten.
        tl.debug_barrier()
        result = gradient + row * stride_gradient
        weight = tl.full((), 1.0, tl.float32)
        if HAS_FACTOR:
            weight = tl.load(factor + row * stride_factor)
        for first in range(0, whole, BLOCK):
            place = first + column
            values = _loaded(source, place, end, 0.0, True)
            values = _gradient_of(values, place == spot, lse, smoothed, weight, RULE, THROUGH, INTERPRETED)
            tl.store(result + place, values.to(gradient.dtype.element_ty))
        for first in range(whole, columns, BLOCK):
            place = first + column
            values = _loaded(source, place, end, 0.0, False)
            values = _gradient_of(values, place == spot, lse, smoothed, weight, RULE, THROUGH, INTERPRETED)
            values = tl.where(counts, values, 0.0)
            tl.store(result + place, values.to(gradient.dtype.element_ty), mask=place < columns)


_launch_kernel = Launcher(cross_entropy_kernel)


def cross_entropy_triton(logits: Tensor, targets: Tensor, rule: LossRule, with_gradient: bool) -> tuple[Tensor, Tensor]:
    """As `octavo.kernels.cross_entropy.cross_entropy`, or `cross_entropy_with_gradient`; neither M nor V is 0."""
    source = with_contiguous_rows(logits)
    loss, lse = (torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device) for _ in range(2))
    _launch(source, targets, loss, lse, None, source if with_gradient else None, rule)
    if with_gradient and source is not logits:
        logits.copy_(source)
    return loss, lse


def cross_entropy_gradient_triton(
    logits: Tensor, targets: Tensor, lse: Tensor, factor: Tensor | None, rule: LossRule, in_place: bool
) -> Tensor:
    """As `octavo.kernels.cross_entropy.cross_entropy_gradient`; neither M nor V is 0."""
    source = with_contiguous_rows(logits)
    alone = in_place or source is not logits
    gradient = source if alone else torch.empty_like(source, memory_format=torch.contiguous_format)
    _launch(source, targets, None, lse, factor, gradient, rule)
    if in_place and source is not logits:
        logits.copy_(gradient)
        return logits
    return gradient


def _launch(
    logits: Tensor,
    targets: Tensor,
    loss: Tensor | None,
    lse: Tensor,
    factor: Tensor | None,
    gradient: Tensor | None,
    rule: LossRule,
) -> None:
    rows, columns = logits.shape
    # At least what a warp takes: values are rounded in pairs.
    block = min(_BLOCK, max(32 * _A_THREAD, triton.next_power_of_2(columns)))
    # A pointer that the flags leave unused may be any.
    given = (logits, targets.contiguous(), loss, lse, factor, gradient)
    tensors = tuple(lse if t is None else t for t in given)
    # Of a sum's gradient all factors lie in one place.
    by_row = 0 if factor is None or factor.numel() == 1 else factor.stride(0)
    numbers = (columns, logits.stride(0), 0 if gradient is None else gradient.stride(0), by_row)
    constants = (
        *rule[:1], float(rule.label_smoothing), float(rule.z_loss), loss is not None, gradient is not None,
        factor is not None, THROUGH_DTYPES[logits.dtype], INTERPRETED, block,
    )  # fmt: skip
    key = (key_of(*tensors), specialization(*numbers), constants)
    _launch_kernel(rows, key, tensors, numbers, constants, max(1, block // (32 * _A_THREAD)))
