"""Stochastic rounding: only neighbours, unbiased, reproducible."""

from __future__ import annotations

import math

import pytest
import torch
from tests.formats.edge_values import finite_grid, special_float32

from octavo.formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, Format, cast, decode, round_stochastically

SIGNED = (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)


def stochastic(x: torch.Tensor, format: Format, **options: object) -> torch.Tensor:
    return decode(cast(x, format, rounding="stochastic", **options), torch.float64)  # type: ignore[arg-type]


@pytest.mark.parametrize("format", SIGNED, ids=repr)
def test_only_the_two_neighbours_are_hit(format: Format) -> None:
    grid = finite_grid(format)
    x = (torch.rand(20_000, dtype=torch.float64) * 2 - 1) * format.max
    x[:10_000] *= 2.0 ** (-20 * torch.rand(10_000))
    x = x.float()
    above = torch.searchsorted(grid, x.double().abs()).clamp(max=len(grid) - 1)
    upper = grid[above]
    lower = torch.where(upper == x.double().abs(), upper, grid[(above - 1).clamp(min=0)])
    rounded = stochastic(x, format).abs()
    assert ((rounded == lower) | (rounded == upper)).all()
    assert (rounded == lower).any()
    assert (rounded == upper).any()


@pytest.mark.parametrize("format", SIGNED, ids=repr)
def test_the_mean_is_the_value(format: Format) -> None:
    # n draws between neighbours of distance d have a mean within 6 standard deviations, 6 d sqrt(p (1 - p) / n), of x:
    # by chance beyond it once in 5e8. Nearest rounding would miss by up to d / 2.
    n = 10_000
    for low, high in (
        (1.0, 1 + format.eps),
        (0.0, format.min_subnormal),
        (format.min_normal, format.min_normal + format.min_subnormal),
    ):
        for p in (0.1, 0.5, 0.87):
            x = torch.full((n,), low + p * (high - low))
            p_exact = (float(x[0]) - low) / (high - low)
            bound = 6 * (high - low) * math.sqrt(p_exact * (1 - p_exact) / n)
            for sign in (1, -1):
                assert abs(float(stochastic(sign * x, format).mean()) - sign * float(x[0])) < bound


@pytest.mark.parametrize("format", SIGNED, ids=repr)
def test_values_of_the_format_stay(format: Format) -> None:
    grid = finite_grid(format).float().repeat(50)
    assert torch.equal(stochastic(grid, format), grid.double())
    assert torch.equal(stochastic(-grid, format), -grid.double())


def test_the_generator_decides() -> None:
    x = torch.randn(1000)
    first = stochastic(x, E4M3, generator=torch.Generator().manual_seed(3))
    torch.rand(5)
    assert torch.equal(stochastic(x, E4M3, generator=torch.Generator().manual_seed(3)), first)
    assert not torch.equal(stochastic(x, E4M3, generator=torch.Generator().manual_seed(4)), first)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    stochastic(x, E4M3, generator=torch.Generator().manual_seed(3))
    assert torch.equal(torch.get_rng_state(), state)


def test_overflow_and_specials_are_as_in_the_nearest_cast() -> None:
    special = special_float32()
    special = special[~special.isfinite() | (special.abs() > 1e6) | (special == 0)]
    for format in SIGNED:
        for saturate in (True, False):
            codes = cast(special, format, rounding="stochastic", saturate=saturate)
            assert torch.equal(codes.view(torch.uint8), cast(special, format, saturate=saturate).view(torch.uint8))


@pytest.mark.parametrize("saturate", [True, False])
def test_between_the_largest_value_and_the_next_there_is_a_choice_too(saturate: bool) -> None:
    # One step above M would be M + 2^(emax - m): a quarter of the way there, one draw in four goes up, and overflows.
    step = 2.0 ** (E5M2.max_exponent - E5M2.mantissa_bits)
    x = torch.full((4000,), E5M2.max + step / 4)
    rounded = stochastic(x, E5M2, saturate=saturate)
    if saturate:
        assert (rounded == E5M2.max).all()
    else:
        overflowed = float(rounded.isinf().double().mean())
        assert abs(overflowed - 0.25) < 6 * math.sqrt(0.25 * 0.75 / 4000)


def test_float64_is_rounded_by_its_own_distance() -> None:
    x = torch.full((2000,), 1 + 2.0**-30, dtype=torch.float64)
    assert set(stochastic(x, E4M3).tolist()) <= {1.0, 1.125}


@pytest.mark.parametrize("format", SIGNED, ids=repr)
def test_the_numbers_decide_exactly(format: Format) -> None:
    # The values of the format, and what lies a quarter of a step above, by the least and the largest numbers there are.
    grid = finite_grid(format).float()
    steps = torch.diff(grid.double(), append=grid[-1:].double())
    between = (grid.double() + steps / 4)[:-1].float()
    for sign in (1, -1):
        for u in (0.0, 2.0**-53, 0.5, 1 - 2.0**-53):
            uniform = torch.full(grid.shape, u, dtype=torch.float64)
            assert torch.equal(round_stochastically(sign * grid, format, uniform), sign * grid)
            expected = torch.where(uniform[:-1] < 0.25, grid[1:], grid[:-1])
            assert torch.equal(round_stochastically(sign * between, format, uniform[:-1]), sign * expected)
    # Up if and only if u lies below the share of the step, however small that is.
    tiny = torch.tensor([format.min_subnormal * 2.0**-40, format.min_subnormal * (1 - 2.0**-24)])
    low = torch.tensor([2.0**-41, 1 - 2.0**-24 - 2.0**-50], dtype=torch.float64)
    assert torch.equal(round_stochastically(tiny, format, low), torch.full((2,), format.min_subnormal))
    high = torch.tensor([2.0**-40, 1 - 2.0**-24], dtype=torch.float64)
    assert torch.equal(round_stochastically(tiny, format, high), torch.zeros(2))
