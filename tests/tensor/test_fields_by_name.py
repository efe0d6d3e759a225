"""FieldsByName: what is no field is refused, with the field that may be meant; all else is as of any dataclass."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import re
from typing import Any

import pytest

from octavo.formats import E4M3
from octavo.recipes import Accumulate, CurrentScaling, DelayedScaling, QuantizeSpec, Recipe, RowwiseScaling
from octavo.tensor import FieldsByName


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfSomebody(CurrentScaling):
    """With a field of its own."""

    colour: str = "red"


class ByItsNumber(CurrentScaling):
    """With a constructor of its own."""

    def __init__(self, number: int, **fields: Any) -> None:
        super().__init__(amax_epsilon=float(number), **fields)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            DelayedScaling,
            {"amax_history_length": 3},
            "DelayedScaling has no field 'amax_history_length': did you mean amax_history_len? Its fields are: format,"
            " margin, amax_history_len, amax_compute_algo, reduce_amax, initialise_from_first_batch, accumulate,"
            " backward, saved_input, saved_weight, grad_output_rounding, overrides",
        ),
        (
            CurrentScaling,
            {"margin": 1},
            "CurrentScaling has no field 'margin': that is a field of DelayedScaling, CustomRecipe. Its fields are:"
            " format, power_of_two_scales, amax_epsilon, accumulate, backward, saved_input, saved_weight,"
            " grad_output_rounding, overrides",
        ),
        (Accumulate, {"fwd": "fast"}, "Accumulate has no field 'fwd'. Its fields are: fprop, dgrad, wgrad"),
        (Accumulate, {"w_grad": "fast"}, "'w_grad': did you mean wgrad? Its fields are: fprop, dgrad, wgrad"),
        (QuantizeSpec, {"format": E4M3, "eps": 0.0}, "QuantizeSpec has no field 'eps': did you mean epsilon?"),
        (OfSomebody, {"color": "red"}, "OfSomebody has no field 'color': did you mean colour? Its fields are: colour"),
        (OfSomebody, {"margin": 1}, "OfSomebody has no field 'margin': that is a field of DelayedScaling"),
    ],
)
def test_a_name_that_is_no_fields_is_refused_with_what_may_be_meant(
    kind: type[FieldsByName], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        kind(**fields)


@pytest.mark.parametrize("kind", [DelayedScaling, QuantizeSpec, Accumulate])
def test_a_value_without_a_name_is_refused(kind: type[FieldsByName]) -> None:
    first = kind.field_names()[0]
    message = (
        rf"{kind.__name__} takes no values without a name, found E4M3, 3: .* by name, such as .*\({first}=\.\.\.\)"
    )
    with pytest.raises(TypeError, match=message):
        kind(E4M3, 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecOfSomebody(QuantizeSpec):
    """With a field of its own that has no default, and none of the remedies for it."""

    colour: str


def test_what_is_missing_is_said() -> None:
    for fields in ({}, {"granularity": "row"}):
        with pytest.raises(TypeError, match=r"^QuantizeSpec needs format='E4M3' or 'E5M2'$"):
            QuantizeSpec(**fields)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'colour'"):
        SpecOfSomebody(format=E4M3)
    assert SpecOfSomebody(format=E4M3, colour="red").colour == "red"


def test_what_is_abstract_is_said_by_python() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Recipe()


def test_a_constructor_of_somebodys_own_is_left_alone() -> None:
    assert ByItsNumber(3, backward="high_precision").amax_epsilon == 3.0
    assert ByItsNumber(number=3).amax_epsilon == 3.0


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (QuantizeSpec(format=E4M3, epsilon=1.0), "QuantizeSpec(format=E4M3, epsilon=1.0)"),
        (Accumulate(fprop="precise"), "Accumulate(fprop='precise', dgrad='precise', wgrad='precise')"),
    ],
)
def test_it_stays_a_frozen_dataclass(data: Any, shown: str) -> None:
    assert repr(data) == shown
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(data, protocol)) == data
    for other in (copy.copy(data), copy.deepcopy(data), dataclasses.replace(data)):
        assert (other, hash(other)) == (data, hash(data))
    with pytest.raises(dataclasses.FrozenInstanceError):
        data.colour = "red"
    assert list(inspect.signature(type(data)).parameters) == [field.name for field in dataclasses.fields(data)]


@pytest.mark.parametrize("kind", [CurrentScaling, RowwiseScaling])
def test_a_recipe_shows_the_fields_of_its_dataclass(kind: type[Recipe]) -> None:
    shown = repr(kind(overrides={"head": None}))
    assert shown.startswith(f"{kind.__name__}(accumulate=Accumulate(fprop='fast', ")
    assert "overrides=(('head', None),)" in shown
