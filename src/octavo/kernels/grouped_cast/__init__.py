"""grouped_cast: codes of a matrix whose rows belong to groups, of sizes that only the device knows.

    codes   [M, K']    cast(x[r] * by_row[r])                    by_row    [M, 1]
    codes_t [K', C]    cast(x[r, k] * by_column[group of r, k])^T  by_column [E, K] or [E, 1]

K' is K rounded up to a multiple of 16; the columns of codes_t are those of `octavo.kernels.grouped_cast.layout`, each
group begun at a multiple of 128. What is added is zero. Multipliers are given, one a group repeated for its rows or one
a row; `multipliers` makes them. The codes of a group are those that `octavo.kernels.cast_transpose` makes of its rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.formats import Format, format_named
from octavo.kernels.cast_transpose.rule import ScaleRule
from octavo.kernels.grouped_cast.layout import Groups, capacity, groups_of
from octavo.kernels.grouped_cast.reference import column_amax_reference, grouped_cast_reference
from octavo.kernels.layout import padded
from octavo.kernels.library import register
from octavo.kernels.triton_support import cast_reasons, runs_on
from octavo.scaling import multiplier_from_amax, scale_from_multiplier


def grouped_cast(
    x: Tensor,
    groups: Groups,
    format: Format,
    by_row: Tensor | None,
    by_column: Tensor | None,
    *,
    inf_to_nan: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """(codes, codes_t) of x [M, K], any floating dtype and strides; None for what no multiplier is given for.

    Args:
        x: the matrix.
        groups: of its rows.
        format: of both layouts.
        by_row: float32 [M, 1].
        by_column: float32 [E, K], or [E, 1].
        inf_to_nan: ±inf becomes NaN instead of ±M: for gradients, so that a loss scaler still sees the overflow.

    Raises:
        ValueError: x is no floating-point matrix of as many rows as there are in the groups.
    """
    if x.dim() != 2 or not x.is_floating_point() or x.shape[0] != groups.group.shape[0]:
        raise ValueError(
            f"grouped_cast takes a floating-point matrix of {groups.group.shape[0]} rows, found {x.dtype} of shape"
            f" {tuple(x.shape)}"
        )
    if torch.compiler.is_compiling():
        codes, codes_t = _cast_operator(x, *groups, format.name, by_row, by_column, inf_to_nan)
    else:
        codes, codes_t = _launch_cast(x, groups, format, by_row, by_column, inf_to_nan)
    return codes if by_row is not None else None, codes_t if by_column is not None else None


def column_amax(x: Tensor, groups: Groups) -> Tensor:
    """The largest finite magnitude of each column within each group of x [M, K] -> float32 [E, K]."""
    if torch.compiler.is_compiling():
        result: Tensor = _amax_operator(x, *groups)
        return result
    return _launch_amax(x, groups)


def group_amax(by_row: Tensor, groups: Groups) -> Tensor:
    """The largest of each group -> [E]. by_row: float32 [M, 1], amax of each row."""
    largest = by_row.new_zeros(groups.ends.shape[0])
    return largest.scatter_reduce(0, groups.group, by_row.reshape(-1), "amax")


def multipliers(given: Tensor, format: Format, rule: ScaleRule | None) -> tuple[Tensor, Tensor]:
    """(multipliers, scales) of the shape of `given`: scales, or with a rule amaxes."""
    if torch.compiler.is_compiling():
        epsilon, power_of_two = (None, False) if rule is None else rule[:2]
        m, scale = _multiplier_operator(given, format.name, epsilon, power_of_two)
        return m, scale
    return _multipliers(given, format, rule)


def unsupported_reasons(x: Tensor, format: Format) -> list[str]:
    """Why the Triton twin does not run for this call; then the PyTorch reference does."""
    return cast_reasons(x, format)


def _launch_cast(
    x: Tensor, groups: Groups, format: Format, by_row: Tensor | None, by_column: Tensor | None, inf_to_nan: bool
) -> tuple[Tensor | None, Tensor | None]:
    if x.is_cuda and x.numel() and x.shape[1] != 1 and runs_on(x.device.index, format.name):
        from octavo.kernels.grouped_cast.triton_kernel import grouped_cast_triton

        return grouped_cast_triton(x, groups, format, by_row, by_column, inf_to_nan)
    return grouped_cast_reference(x, groups, format, by_row, by_column, inf_to_nan)


def _launch_amax(x: Tensor, groups: Groups) -> Tensor:
    if x.is_cuda and x.numel() and runs_on(x.device.index):
        from octavo.kernels.grouped_cast.triton_kernel import column_amax_triton

        return column_amax_triton(x, groups)
    return column_amax_reference(x, groups)


def _multipliers(given: Tensor, format: Format, rule: ScaleRule | None) -> tuple[Tensor, Tensor]:
    if rule is None:
        return scale_from_multiplier(given), given.clone()
    m = multiplier_from_amax(given, format, epsilon=rule.epsilon, power_of_two=rule.power_of_two)
    return m, scale_from_multiplier(m)


def _cast_implementation(
    x: Tensor,
    ends: Tensor,
    ends_t: Tensor,
    group: Tensor,
    position: Tensor,
    source: Tensor,
    owner: Tensor,
    format: str,
    by_row: Tensor | None,
    by_column: Tensor | None,
    inf_to_nan: bool,
) -> tuple[Tensor, ...]:
    groups = Groups(ends, ends_t, group, position, source, owner)
    outputs = _launch_cast(x, groups, format_named(format), by_row, by_column, inf_to_nan)
    # An operator returns tensors only, none of them twice: what was left out is an empty one.
    return tuple(x.new_empty(0) if out is None else out for out in outputs)


def _cast_fake(
    x: Tensor,
    ends: Tensor,
    ends_t: Tensor,
    group: Tensor,
    position: Tensor,
    source: Tensor,
    owner: Tensor,
    format: str,
    by_row: Tensor | None,
    by_column: Tensor | None,
    inf_to_nan: bool,
) -> tuple[Tensor, ...]:
    (rows, columns), dtype = x.shape, format_named(format).dtype
    absent = x.new_empty(0)
    return (
        absent if by_row is None else x.new_empty((rows, padded(columns)), dtype=dtype),
        x.new_empty(0) if by_column is None else x.new_empty((padded(columns), source.shape[0]), dtype=dtype),
    )


def _multiplier_implementation(
    given: Tensor, format: str, epsilon: str | None, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    rule = None if epsilon is None else ScaleRule(epsilon, power_of_two)
    return _multipliers(given, format_named(format), rule)


_LAYOUT = "Tensor ends, Tensor ends_t, Tensor group, Tensor position, Tensor source, Tensor owner"
_cast_operator = register(
    f"grouped_cast(Tensor x, {_LAYOUT}, str format, Tensor? by_row, Tensor? by_column, bool inf_to_nan)"
    " -> (Tensor, Tensor)",
    _cast_implementation,
    _cast_fake,
)
_amax_operator = register(
    f"grouped_column_amax(Tensor x, {_LAYOUT}) -> Tensor",
    lambda x, *groups: _launch_amax(x, Groups(*groups)),
    lambda x, ends, *groups: x.new_empty((ends.shape[0], x.shape[1]), dtype=torch.float32),
)
# Inductor divides with an error of up to 2 ulp on a GPU.
_multiplier_operator = register(
    "grouped_multipliers(Tensor given, str format, str? epsilon, bool power_of_two) -> (Tensor, Tensor)",
    _multiplier_implementation,
    lambda given, format, epsilon, power_of_two: (torch.empty_like(given), torch.empty_like(given)),
)

__all__ = [
    "Groups",
    "capacity",
    "column_amax",
    "column_amax_reference",
    "group_amax",
    "grouped_cast",
    "grouped_cast_reference",
    "groups_of",
    "multipliers",
    "unsupported_reasons",
]
