"""Codes of groups of rows whose sizes only the device knows, under the scales of each group's own quantizer.

What a group gets is what its quantizer would have made of its rows alone: the same codes, the same scale, the same amax
gathered. Scales may be one a group (measured, given, or from its history) or one a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.kernels import ScaleRule, amax_by_row_and_column
from octavo.kernels.grouped_cast import Groups, column_amax, group_amax, grouped_cast, multipliers
from octavo.scaling import ROW, TENSOR
from octavo.tensor import QuantizeSpec
from octavo.tensor.operand_state import is_captured

_MEASURED = ScaleRule()


class GroupedOperand(NamedTuple):
    """codes [M, K'] with scale [M, 1], codes_t [K', C] with scale_t [E, K', 1]; None for what was not asked for.

    `by_group` [2, E] holds the groups' multipliers and their scales; None of scales by row.
    """

    codes: Tensor | None
    scale: Tensor | None
    codes_t: Tensor | None
    scale_t: Tensor | None
    by_group: Tensor | None

    @property
    def row_wise(self) -> tuple[Tensor, Tensor]:
        """codes and scale, where they were asked for."""
        assert self.codes is not None, "the row-wise layout was not asked for"
        assert self.scale is not None, "codes come with their scale"
        return self.codes, self.scale

    @property
    def column_wise(self) -> tuple[Tensor, Tensor]:
        """codes_t and scale_t, where they were asked for."""
        assert self.codes_t is not None, "the transposed layout was not asked for"
        assert self.scale_t is not None, "codes come with their scale"
        return self.codes_t, self.scale_t


def granularity_reasons(spec: QuantizeSpec) -> list[str]:
    """Why operands of a spec cannot be made of groups that only the device knows."""
    reasons = [] if spec.rounding == "nearest" else ["stochastic rounding: grouped casts round to nearest"]
    if spec.granularity in (TENSOR, ROW):
        return reasons
    return [
        f"scales by {spec.granularity.name}: there are grouped products with one scale a group or a row only",
        *reasons,
    ]


def quantize_groups(
    x: Tensor, groups: Groups, quantizers: Sequence[Any], rowwise: bool, columnwise: bool
) -> GroupedOperand:
    """Codes of x [M, K] in the layouts asked for.

    Args:
        x: the matrix.
        groups: of its rows.
        quantizers: of each group, all of one spec without `granularity_reasons`.
        rowwise, columnwise: the layouts.
    """
    spec: QuantizeSpec = quantizers[0].spec
    if spec.granularity is ROW:
        return _by_row(x, groups, spec, rowwise, columnwise)
    if spec.scaling == "delayed":
        m, scales = _delayed(x, groups, quantizers)
    elif spec.scaling == "static":
        given = torch.full((len(quantizers),), spec.static_scale or 1.0, dtype=torch.float32, device=x.device)
        m, scales = multipliers(given, spec.format, None)
    else:
        m, scales = multipliers(_amax(x, groups), spec.format, spec.rule)
    return _cast(x, groups, spec, m, scales, rowwise, columnwise)


def quantize_groups_again(
    x: Tensor, groups: Groups, quantizers: Sequence[Any], by_group: Tensor | None
) -> GroupedOperand:
    """The column-wise codes of an x that was cast row-wise before, `by_group` being that cast's."""
    spec: QuantizeSpec = quantizers[0].spec
    if by_group is None:
        return _by_row(x, groups, spec, False, True)
    return _cast(x, groups, spec, by_group[0], by_group[1], False, True)


def _amax(x: Tensor, groups: Groups) -> Tensor:
    by_row, _ = amax_by_row_and_column(x, True, False)
    assert by_row is not None, "it was asked for"
    return group_amax(by_row, groups)


def _cast(
    x: Tensor, groups: Groups, spec: QuantizeSpec, m: Tensor, scales: Tensor, rowwise: bool, columnwise: bool
) -> GroupedOperand:
    """One scale a group."""
    by_row = m[groups.group][:, None] if rowwise else None
    by_column = m[:, None] if columnwise else None
    codes, codes_t = grouped_cast(x, groups, spec.format, by_row, by_column, inf_to_nan=spec.inf_to_nan)
    scale = scales[groups.group][:, None] if rowwise else None
    scale_t = None if codes_t is None else scales[:, None, None].expand(-1, codes_t.shape[0], 1).contiguous()
    return GroupedOperand(codes, scale, codes_t, scale_t, torch.stack((m, scales)))


def _by_row(x: Tensor, groups: Groups, spec: QuantizeSpec, rowwise: bool, columnwise: bool) -> GroupedOperand:
    """One scale a row of each layout: a row of a group's transposed matrix is a column of its rows."""
    by_row = scale = by_column = scale_t = None
    if rowwise:
        largest, _ = amax_by_row_and_column(x, True, False)
        assert largest is not None, "it was asked for"
        by_row, scale = multipliers(largest, spec.format, spec.rule)
    if columnwise:
        by_column, scale_t = multipliers(column_amax(x, groups), spec.format, spec.rule)
    codes, codes_t = grouped_cast(x, groups, spec.format, by_row, by_column, inf_to_nan=spec.inf_to_nan)
    if scale_t is not None and codes_t is not None:
        # Filled up as codes are.  [E, K] -> [E, K', 1]
        missing = codes_t.shape[0] - scale_t.shape[1]
        scale_t = torch.nn.functional.pad(scale_t, (0, missing), value=1.0)[:, :, None]
    return GroupedOperand(codes, scale, codes_t, scale_t, None)


def _delayed(x: Tensor, groups: Groups, quantizers: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """(multipliers, scales) [E] from each group's state, or measured while it knows none; amaxes are gathered."""
    traced, format = torch.compiler.is_compiling(), quantizers[0].spec.format
    measured = [quantizer.from_data and quantizer.fixed is None for quantizer in quantizers]
    gathers = any(quantizer.gather for quantizer in quantizers)
    largest = _amax(x, groups) if gathers or any(measured) else None
    given = []
    for quantizer in quantizers:
        state = quantizer.state
        scale = state.scale if quantizer.fixed is None else quantizer.fixed
        # The layer may have run in another format since the forward of this backward.
        given.append(state.scale_for(format.max) if state.late_bound and not traced else scale)
    m, scales = multipliers(torch.stack(given), format, None)
    if any(measured):
        assert largest is not None, "it was measured"
        own, its_scales = multipliers(largest, format, _MEASURED)
        pairs = zip(measured, own.unbind(), m.unbind(), strict=True)
        m = torch.stack([one if wanted else other for wanted, one, other in pairs])
        pairs = zip(measured, its_scales.unbind(), scales.unbind(), strict=True)
        scales = torch.stack([one if wanted else other for wanted, one, other in pairs])
    _note(x, quantizers, largest, scales, measured)
    return m, scales


def _note(
    x: Tensor, quantizers: Sequence[Any], largest: Tensor | None, scales: Tensor, measured: Sequence[bool]
) -> None:
    """Gather amaxes, and note what was used."""
    traced = torch.compiler.is_compiling()
    amaxes = [None] * len(quantizers) if largest is None else largest.unbind()
    captured = not traced and is_captured(x)
    gathering = []
    for quantizer, amax, scale, from_data in zip(quantizers, amaxes, scales.unbind(), measured, strict=True):
        if quantizer.gather and amax is not None:
            gathering.append((quantizer.state, amax))
        if quantizer.used is not None:
            quantizer.used.scale = scale
        if captured:
            quantizer._note_capture(from_data)
    if traced:
        for state, amax in gathering:
            state.gather(amax)
    elif gathering:
        torch._foreach_maximum_([state.gathered for state, _ in gathering], [amax for _, amax in gathering])
