"""grouped_cast and grouped_mm against the operations on each group's rows alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from octavo.formats import E4M3, E5M2, Format
from octavo.kernels import ScaleRule, amax_by_row_and_column, cast_transpose, padded, scaled_mm
from octavo.kernels.grouped_cast import Groups, capacity, column_amax, group_amax, grouped_cast, groups_of, multipliers
from octavo.kernels.grouped_mm.on_device import grouped_mm, grouped_mm_over_rows, grouped_sum

SIZES = ([5, 0, 33], [0, 16, 1], [0, 0, 20], [17, 0, 0], [1, 0, 0], [0, 0, 0])
RULE = ScaleRule()


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers over several powers of two, and a few that are not finite."""
    x = torch.randn(rows, columns) * torch.exp2(torch.randint(-6, 6, (rows, columns)).float())
    flat = x.view(-1)
    for place, value in enumerate((math.inf, -math.inf, math.nan, 0.0, -0.0)):
        if flat.numel() > 7 * place:
            flat[7 * place] = value
    return x.to(dtype)


def bounds(sizes: list[int]) -> list[tuple[int, int]]:
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def columns_of(sizes: list[int]) -> list[tuple[int, int]]:
    """First column in codes_t of each group, and how many a cast of it alone would have."""
    firsts, start = [], 0
    for size in sizes:
        firsts.append((start, padded(size)))
        start += max(-(-size // 128) * 128, 128)
    return firsts


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_layout(sizes: list[int]) -> None:
    groups = groups_of(torch.tensor(sizes), sum(sizes))
    whole = capacity(sum(sizes), 3)
    assert groups.source.shape == (whole,)
    assert groups.ends.tolist() == [stop for _, stop in bounds(sizes)]
    expected, owners = [-1] * whole, [-1] * (whole // 16)
    for group, ((start, stop), (first, _)) in enumerate(zip(bounds(sizes), columns_of(sizes), strict=True)):
        expected[first : first + stop - start] = range(start, stop)
        assert groups.group[start:stop].tolist() == [group] * (stop - start)
        assert groups.position[start:stop].tolist() == list(range(first, first + stop - start))
        for tile in range(first // 16, int(groups.ends_t[group]) // 16):
            owners[tile] = group
    assert groups.source.tolist() == expected
    assert groups.owner.tolist() == owners
    assert int(groups.ends_t[-1]) <= whole


def by_group(x: Tensor, groups: Groups, format: Format, rows: bool) -> tuple[Tensor, ...]:
    """Multipliers and scales of rows, and of columns; one a group or one a row."""
    by_row, _ = amax_by_row_and_column(x, True, False)
    assert by_row is not None
    if rows:
        m, s = multipliers(by_row, format, RULE)
        return m, s, *multipliers(column_amax(x, groups), format, RULE)
    m, s = multipliers(group_amax(by_row, groups), format, RULE)
    return m[groups.group][:, None], s[groups.group][:, None], m[:, None], s[:, None]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("inf_to_nan", [True, False])
def test_the_codes_are_those_of_each_groups_own_cast(
    sizes: list[int], rows: bool, format: Format, inf_to_nan: bool
) -> None:
    x = matrix(sum(sizes), 37)
    groups = groups_of(torch.tensor(sizes), sum(sizes))
    m, s, m_t, s_t = by_group(x, groups, format, rows)
    codes, codes_t = grouped_cast(x, groups, format, m, m_t, inf_to_nan=inf_to_nan)
    assert codes.shape == (sum(sizes), 48)
    assert codes_t.shape == (48, capacity(sum(sizes), 3))
    used = torch.zeros(codes_t.shape[1], dtype=torch.bool)
    for group, ((start, stop), (first, wide)) in enumerate(zip(bounds(sizes), columns_of(sizes), strict=True)):
        part = x[start:stop]
        by_row, by_column = amax_by_row_and_column(part, rows, rows)
        given = (by_row, by_column) if rows else (part_amax(part),) * 2
        own = cast_transpose(part, format, *given, rule=RULE, inf_to_nan=inf_to_nan)
        assert torch.equal(bits(codes[start:stop]), bits(own.codes[: stop - start]))
        assert torch.equal(bits(codes_t[:, first : first + wide]), bits(own.codes_t))
        used[first : first + stop - start] = True
        if rows:
            assert torch.equal(s[start:stop], own.scale[: stop - start])
            assert torch.equal(s_t[group], own.scale_t[:37, 0])
        else:
            assert bool((s[start:stop] == own.scale).all())
    assert bool((bits(codes_t)[:, ~used] == 0).all())


def part_amax(x: Tensor) -> Tensor:
    by_row, _ = amax_by_row_and_column(x, True, False)
    return by_row.amax() if x.shape[0] else x.new_zeros(())


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_are_those_of_each_groups_own(sizes: list[int]) -> None:
    rows, groups = sum(sizes), groups_of(torch.tensor(sizes), sum(sizes))
    x, w, dy = torch.randn(rows, 32), torch.randn(3, 48, 32), torch.randn(rows, 48)
    m, s, m_t, s_t = by_group(x, groups, E4M3, True)
    codes, codes_t = grouped_cast(x, groups, E4M3, m, m_t)
    n, _, n_t, t_t = by_group(dy, groups, E5M2, True)
    _, dy_codes_t = grouped_cast(dy, groups, E5M2, n, n_t)
    made = [cast_transpose(one, E4M3, *amax_by_row_and_column(one, True, True), rule=RULE) for one in w]
    bias = torch.randn(3, 48)
    stacked = torch.stack([one.codes.view(torch.uint8) for one in made]).view(E4M3.dtype)
    scales = torch.stack([one.scale for one in made])
    y = grouped_mm(codes, stacked, s, scales, bias, groups.ends, torch.bfloat16, "fast")
    dw = grouped_mm_over_rows(
        dy_codes_t, codes_t, t_t[:, :, None], s_t[:, :, None], groups.ends, groups.ends_t, torch.float32, "precise"
    )
    sums = grouped_sum(dy, groups.ends)
    for group, (start, stop) in enumerate(bounds(sizes)):
        own = cast_transpose(x[start:stop], E4M3, *amax_by_row_and_column(x[start:stop], True, True), rule=RULE)
        own_dy = cast_transpose(dy[start:stop], E5M2, *amax_by_row_and_column(dy[start:stop], True, True), rule=RULE)
        product = scaled_mm(own.codes, made[group].codes, own.scale, made[group].scale, bias[group], torch.bfloat16)
        assert torch.equal(y[start:stop], product[: stop - start])
        expected = scaled_mm(own_dy.codes_t, own.codes_t, own_dy.scale_t, own.scale_t, None, torch.float32)
        assert torch.equal(dw[group], expected)
        assert torch.equal(sums[group], dy[start:stop].sum(0))


def test_scales_that_are_given_are_kept() -> None:
    scale = torch.tensor([0.3, 2.0])
    m, s = multipliers(scale, E4M3, None)
    assert torch.equal(s, scale)
    assert torch.equal(m, 1 / scale)


def test_what_does_not_fit_is_refused() -> None:
    groups = groups_of(torch.tensor([4, 5]), 9)
    with pytest.raises(ValueError, match="a floating-point matrix of 9 rows"):
        grouped_cast(torch.randn(8, 3), groups, E4M3, torch.ones(8, 1), None)
    with pytest.raises(ValueError, match="sum to the number of tokens, 9"):
        groups_of(torch.tensor([4, 6]), 9)
    with pytest.raises(ValueError, match="must be 0 or more"):
        groups_of(torch.tensor([-1, 10]), 9)
