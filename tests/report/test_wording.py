from __future__ import annotations

import pytest

from octavo.report.wording import (
    Spread,
    decimals,
    duration,
    enumeration,
    percent,
    rate,
    ratio,
    significant,
    size,
    spread,
)


def plain(words: str) -> str:
    """With the characters of a keyboard, so that the expected texts can be read."""
    return words.replace("\u00a0", " ").replace("\u2212", "-").replace("\u00d7", "x")


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.404, "+0.40 %"),
        (-0.404, "-0.40 %"),
        (0.004, "0.00 %"),
        (-0.004, "0.00 %"),
        (0.0, "0.00 %"),
        (1234.5, "+1,234.50 %"),
    ],
)
def test_a_change_has_a_sign_unless_it_rounds_to_zero(value: float, written: str) -> None:
    assert plain(percent(value)) == written


def test_a_share_has_no_sign() -> None:
    assert plain(percent(92.4, 0, signed=False)) == "92 %"


@pytest.mark.parametrize(
    ("value", "written"),
    [(0.50234, "0.502"), (27.4, "27.4"), (1234.5, "1,234"), (0, "0"), (2.0**-149, "1.40e-45"), (3.4e38, "3.40e38")],
)
def test_three_significant_digits(value: float, written: str) -> None:
    assert plain(significant(value)) == written


@pytest.mark.parametrize(
    ("value", "written"),
    [(512, "512 B"), (1536, "1.50 KiB"), (1_600_000, "1.53 MiB"), (9e9, "8.38 GiB")],
)
def test_bytes_in_binary_units(value: float, written: str) -> None:
    assert plain(size(value)) == written


@pytest.mark.parametrize(
    ("value", "written"),
    [(3e-6, "3.00 µs"), (0.0123, "12.3 ms"), (12.5, "12.5 s"), (480, "8.00 min"), (7200, "2.00 h"), (0, "0 s")],
)
def test_durations_in_the_unit_that_fits(value: float, written: str) -> None:
    assert plain(duration(value)) == written


@pytest.mark.parametrize(("value", "written"), [(812345.0, "812,000"), (536.2, "536"), (2.304, "2.30"), (0, "0")])
def test_rates_have_three_digits_that_count(value: float, written: str) -> None:
    assert plain(rate(value)) == written


def test_a_factor_carries_a_times_sign() -> None:
    assert plain(ratio(1.2749)) == "1.27x"


def test_no_minus_before_zero() -> None:
    assert decimals(-0.001, 2) == "0.00"


def test_spread_is_the_sample_standard_deviation() -> None:
    found = Spread.of([1.0, None, 2.0, 3.0])
    assert found == Spread(2.0, 1.0, 3)
    assert Spread.of([4.0]) == Spread(4.0, None, 1)
    assert Spread.of([None]) is None


def test_mean_and_deviation_share_one_unit() -> None:
    assert plain(spread(Spread(0.4, 0.05, 3), percent)) == "+0.40 ± 0.05 %"
    assert plain(spread(Spread(0.4, None, 1), percent)) == "+0.40 %"
    assert plain(spread(None, percent)) == "\u2014"


def test_an_enumeration_ends_with_and() -> None:
    assert [enumeration(list("abc")[:count]) for count in range(4)] == ["", "a", "a and b", "a, b and c"]
