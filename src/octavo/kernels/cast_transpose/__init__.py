"""cast_transpose: one read of a matrix, its codes in both layouts, and whatever else that read can give.

    codes   [M', K'] = cast(x / scale)           scale   [] or [M', 1]
    codes_t [K', M'] = cast(x / scale_t)^T       scale_t [] or [K', 1]
    gathered []      = max(gathered, largest finite |x|)          (what delayed scaling gathers)
    column_sum [K]   = sum of x over its rows, in float32         (of a gradient, that of the bias)

M' and K' are M and K rounded up to a multiple of 16; what is added is zero, and its scale 1. A Hopper FP8 product takes
only K-major operands, so the forward product wants `codes` and the weight gradient, whose K is the number of tokens,
wants `codes_t`. Bytes moved an element of bf16: 2 read and 2 written, against 2 + 1 + 1 + 1 of a cast and then a
transpose.

The scales come out as well. While a CUDA graph is captured and in compiled code they are tensors of their own: whatever
is written later into the state that they came from, the product and the backward see the scale of the codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.formats import Format, format_named
from octavo.kernels.cast_transpose.reference import cast_transpose_reference
from octavo.kernels.cast_transpose.rule import ScaleRule
from octavo.kernels.launcher import Prepared
from octavo.kernels.layout import padded
from octavo.kernels.library import register
from octavo.kernels.triton_support import cast_reasons, runs_compiled, runs_on

_Outputs = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
_PREPARED = Prepared()


class CastOutput(NamedTuple):
    """A matrix [M, K] as codes in one or both layouts, each K-major and padded to multiples of 16, with its scale.

    codes [M', K'] with scale [] or [M', 1]; codes_t [K', M'] with scale_t [] or [K', 1]; column_sum [K], the float32
    sums over the rows. None for what was not asked for.
    """

    codes: Tensor | None
    scale: Tensor | None
    codes_t: Tensor | None
    scale_t: Tensor | None
    column_sum: Tensor | None = None

    @property
    def row_wise(self) -> tuple[Tensor, Tensor]:
        """codes and scale, for a matrix that was cast to them."""
        assert self.codes is not None, "the row-wise layout was not asked for"
        assert self.scale is not None, "codes come with their scale"
        return self.codes, self.scale

    @property
    def column_wise(self) -> tuple[Tensor, Tensor]:
        """codes_t and scale_t, for a matrix that was cast to them."""
        assert self.codes_t is not None, "the transposed layout was not asked for"
        assert self.scale_t is not None, "codes come with their scale"
        return self.codes_t, self.scale_t

    @property
    def transposed(self) -> CastOutput:
        """The codes of the transposed matrix: the layouts change places."""
        return CastOutput(self.codes_t, self.scale_t, self.codes, self.scale)


def cast_transpose(
    x: Tensor,
    format: Format,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    *,
    rule: ScaleRule | None = None,
    gathered: Tensor | None = None,
    inf_to_nan: bool = False,
    column_sum: bool = False,
) -> CastOutput:
    """Codes of a matrix x [M, K] (any floating dtype, any strides).

    Args:
        x: the matrix.
        format: of both layouts.
        rowwise: float32; what `codes` are scaled by: without a rule the scale, [] or [M, 1]; with one the amax, [M, 1],
            or of the whole matrix [] or [P], the largest of P partial ones. None leaves `codes` out.
        columnwise: the same for `codes_t`, with [1, K] in place of [M, 1]. The same tensor as `rowwise` gives the same
            codes in both layouts.
        rule: how scales come from amaxes; None if scales are given.
        gathered: float32 [], to which the amax of x is added by max, in place.
        inf_to_nan: ±inf becomes NaN instead of ±M: for gradients, so that a loss scaler still sees the overflow.
        column_sum: give the sums as well.

    Raises:
        ValueError: x is no floating-point matrix, or what it is scaled by has another shape.
    """
    if torch.compiler.is_compiling():
        return _compiled(x, format, rowwise, columnwise, rule, gathered, inf_to_nan, column_sum)
    return CastOutput(*_launch(x, format, rowwise, columnwise, rule, gathered, inf_to_nan, column_sum))


def unsupported_reasons(x: Tensor, format: Format) -> list[str]:
    """Why the Triton twin does not run for this call; then the PyTorch reference does."""
    return cast_reasons(x, format)


def _check(x: Tensor, rowwise: Tensor | None, columnwise: Tensor | None) -> None:
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(
            f"cast_transpose takes a floating-point matrix [M, K], found {x.dtype} of shape {tuple(x.shape)}"
        )
    for name, given, shape in (("rowwise", rowwise, (x.shape[0], 1)), ("columnwise", columnwise, (1, x.shape[1]))):
        if given is not None and given.dim() == 2 and given.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(given.shape)}; for x of shape {tuple(x.shape)} it takes {list(shape)}, or []"
            )


def _launch(
    x: Tensor,
    format: Format,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    rule: ScaleRule | None,
    gathered: Tensor | None,
    inf_to_nan: bool,
    column_sum: bool,
) -> _Outputs:
    if not x.is_cuda:
        _check(x, rowwise, columnwise)
        return cast_transpose_reference(x, format, rowwise, columnwise, rule, gathered, inf_to_nan, column_sum)
    shared = columnwise is rowwise
    # All that decides on what runs, but for the values of the tensors, and where scales and amaxes lie: of those, a
    # single number is what it is.
    key = (
        x.dtype,
        x.shape,
        x.stride(),
        x.get_device(),
        x.data_ptr() % 16 == 0,
        format.name,
        rule,
        gathered is None,
        inf_to_nan,
        column_sum,
        torch.cuda.is_current_stream_capturing(),
        shared,
        None if rowwise is None else rowwise.dim() and (rowwise.shape, rowwise.is_contiguous()),
        None if shared or columnwise is None else columnwise.dim() and (columnwise.shape, columnwise.is_contiguous()),
    )
    cast = _PREPARED.get(key)
    if cast is None:
        cast = _PREPARED.keep(
            key, _prepared(x, format, rowwise, columnwise, rule, gathered is not None, inf_to_nan, column_sum)
        )
    outputs: _Outputs = cast(x, rowwise, columnwise, gathered)
    return outputs


def _prepared(
    x: Tensor,
    format: Format,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    rule: ScaleRule | None,
    gathers: bool,
    inf_to_nan: bool,
    column_sum: bool,
) -> Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None], _Outputs]:
    """What runs this call and all that are like it, called with x, rowwise, columnwise and gathered."""
    _check(x, rowwise, columnwise)
    if x.numel() and x.shape[1] != 1 and runs_on(x.device.index, format.name):
        from octavo.kernels.cast_transpose import launch

        return launch.prepared(x, format, rowwise, columnwise, rule, gathers, inf_to_nan, column_sum)

    def by_reference(x: Tensor, rowwise: Tensor | None, columnwise: Tensor | None, gathered: Tensor | None) -> _Outputs:
        return cast_transpose_reference(x, format, rowwise, columnwise, rule, gathered, inf_to_nan, column_sum)

    return by_reference


def _compiled(
    x: Tensor,
    format: Format,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    rule: ScaleRule | None,
    gathered: Tensor | None,
    inf_to_nan: bool,
    column_sum: bool,
) -> CastOutput:
    epsilon, power_of_two = (None, False) if rule is None else rule[:2]
    # Tracing makes the same tensor two arguments, so that it is said that they are the same.
    shared = rowwise is columnwise
    # Inductor makes a constant of a 1, also of the number of rows: see `one_column_reasons`.
    native = x.is_cuda and 1 not in x.shape and runs_compiled(x.device.index, format.name)
    arguments = (x, format.name, rowwise, columnwise, epsilon, power_of_two)
    if native:
        outputs = _inductor_operator()(*arguments, gathered, inf_to_nan, column_sum, shared)
    else:
        *outputs, largest = _operator(*arguments, gathered is not None, inf_to_nan, column_sum, shared)
        if gathered is not None:
            gathered.copy_(torch.maximum(gathered, largest))
    wanted = (rowwise, rowwise, columnwise, columnwise, column_sum or None)
    codes, scale, codes_t, scale_t, sums = (
        out if want is not None else None for out, want in zip(outputs, wanted, strict=True)
    )
    return CastOutput(codes, scale, codes_t, scale if shared else scale_t, sums)


def _inductor_operator() -> Any:
    from octavo.kernels.compiled import cast_transpose_inductor

    return cast_transpose_inductor


def _operator_implementation(
    x: Tensor,
    format: str,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    epsilon: str | None,
    power_of_two: bool,
    gather: bool,
    inf_to_nan: bool,
    column_sum: bool,
    shared: bool,
) -> tuple[Tensor, ...]:
    rule = None if epsilon is None else ScaleRule(epsilon, power_of_two)
    columnwise = rowwise if shared else columnwise
    gathered = x.new_zeros((), dtype=torch.float32) if gather else None
    outputs = _launch(x, format_named(format), rowwise, columnwise, rule, gathered, inf_to_nan, column_sum)
    # An operator returns tensors only, none of them twice: what was left out is an empty one.
    codes, scale, codes_t, scale_t, sums = outputs
    return tuple(
        x.new_empty(0) if out is None else out
        for out in (codes, scale, codes_t, None if shared else scale_t, sums, gathered)
    )


def _fake(
    x: Tensor,
    format: str,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    epsilon: str | None,
    power_of_two: bool,
    gather: bool,
    inf_to_nan: bool,
    column_sum: bool,
    shared: bool,
) -> tuple[Tensor, ...]:
    rows, columns = padded(x.shape[0]), padded(x.shape[1])
    dtype = format_named(format).dtype
    absent = x.new_empty(0)

    def scale(given: Tensor, extent: int) -> Tensor:
        return x.new_empty((extent, 1) if given.dim() == 2 else (), dtype=torch.float32)

    return (
        absent if rowwise is None else x.new_empty((rows, columns), dtype=dtype),
        x.new_empty(0) if rowwise is None else scale(rowwise, rows),
        x.new_empty(0) if columnwise is None else x.new_empty((columns, rows), dtype=dtype),
        x.new_empty(0) if columnwise is None or shared else scale(columnwise, columns),
        x.new_empty((x.shape[1],), dtype=torch.float32) if column_sum else x.new_empty(0),
        x.new_empty((), dtype=torch.float32) if gather else x.new_empty(0),
    )


_operator = register(
    "cast_transpose(Tensor x, str format, Tensor? rowwise, Tensor? columnwise, str? epsilon, bool power_of_two,"
    " bool gather, bool inf_to_nan, bool column_sum, bool shared)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _operator_implementation,
    _fake,
)

__all__ = ["CastOutput", "ScaleRule", "cast_transpose", "cast_transpose_reference", "unsupported_reasons"]
