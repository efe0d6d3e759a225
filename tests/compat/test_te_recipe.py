"""Transformer Engine's formats and recipes: values, signatures; every argument has an effect or is refused by name."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from octavo.compat.transformer_engine.common import recipe as te_recipe
from octavo.compat.transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    QParams,
)

import octavo


def test_formats_hold_the_largest_values_of_forward_and_backward() -> None:
    assert {f.name: (f.value.max_fwd, f.value.max_bwd) for f in Format} == {
        "E4M3": (448.0, 448.0),
        "E5M2": (57344.0, 57344.0),
        "HYBRID": (448.0, 57344.0),
    }


def test_delayed_scaling_takes_its_arguments_in_order() -> None:
    assert list(inspect.signature(DelayedScaling).parameters)[:8] == [
        "margin",
        "fp8_format",
        "amax_history_len",
        "amax_compute_algo",
        "scaling_factor_compute_algo",
        "reduce_amax",
        "fp8_dpa",
        "fp8_mha",
    ]
    made = DelayedScaling(1, Format.E4M3, 16, "most_recent", None, False)
    assert made.native == octavo.recipes.DelayedScaling(
        format=octavo.recipes.FormatPair(octavo.E4M3, octavo.E4M3),
        margin=1,
        amax_history_len=16,
        amax_compute_algo="most_recent",
        reduce_amax=False,
    )


def test_defaults_are_those_of_transformer_engine() -> None:
    assert DelayedScaling().native == octavo.recipes.DelayedScaling(amax_history_len=1024)
    assert Float8CurrentScaling().native == octavo.recipes.CurrentScaling()
    e4m3 = octavo.recipes.FormatPair(octavo.E4M3, octavo.E4M3)
    assert Float8BlockScaling().native == octavo.recipes.BlockScaling(format=e4m3)
    assert MXFP8BlockScaling().native == octavo.recipes.MXFP8Scaling(format=e4m3)


CHANGES = {
    DelayedScaling: {
        "margin": 2,
        "fp8_format": Format.E4M3,
        "amax_history_len": 7,
        "amax_compute_algo": "most_recent",
        "scaling_factor_compute_algo": lambda amax, old, limit, recipe: old,
        "reduce_amax": False,
        "fp8_dpa": True,
        "fp8_mha": True,
        "backward_override": "high_precision",
    },
    Float8CurrentScaling: {
        "use_power_2_scales": True,
        "fp8_format": Format.E4M3,
        "fp8_gemm_fprop": MMParams(use_split_accumulator=True),
        "fp8_gemm_dgrad": MMParams(use_split_accumulator=False),
        "fp8_gemm_wgrad": MMParams(use_split_accumulator=False),
        "fp8_dpa": True,
        "fp8_mha": True,
        "backward_override": "high_precision",
        "fp8_quant_fwd_inp": QParams(power_2_scale=True),
        "fp8_quant_fwd_weight": QParams(amax_epsilon=1e-3),
        "fp8_quant_bwd_grad": QParams(stochastic_rounding=True),
    },
    Float8BlockScaling: {
        "use_f32_scales": True,
        "fp8_format": Format.HYBRID,
        "x_block_scaling_dim": 2,
        "w_block_scaling_dim": 1,
        "grad_block_scaling_dim": 2,
        "fp8_gemm_fprop": MMParams(use_split_accumulator=False),
        "fp8_gemm_dgrad": MMParams(use_split_accumulator=False),
        "fp8_gemm_wgrad": MMParams(use_split_accumulator=False),
        "fp8_dpa": True,
        "fp8_mha": True,
        "backward_override": "high_precision",
    },
    MXFP8BlockScaling: {
        "margin": 1,
        "fp8_format": Format.HYBRID,
        "fp8_dpa": True,
        "fp8_mha": True,
        "backward_override": "high_precision",
    },
}


# One operand apart from the others is not built either, so a single QParams raises; all three alike are tested below.
NOT_BUILT = {
    DelayedScaling: {"scaling_factor_compute_algo", "fp8_dpa", "fp8_mha", "backward_override"},
    Float8CurrentScaling: {"fp8_dpa", "fp8_mha", "fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"},
    Float8BlockScaling: {
        *("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim", "fp8_dpa", "fp8_mha"),
        *("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"),
    },
    MXFP8BlockScaling: {"margin", "fp8_dpa", "fp8_mha"},
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, changes in CHANGES.items() for name in changes])
def test_every_argument_changes_the_recipe_or_raises(kind: type, name: str) -> None:
    """Setting one argument away from its default gives another Octavo recipe, or an error that names it."""
    change = {name: CHANGES[kind][name]}
    if name in NOT_BUILT[kind]:
        with pytest.raises((NotImplementedError, ValueError), match=name.removeprefix("fp8_gemm_")):
            _ = kind(**change).native
    else:
        assert kind(**change).native != kind().native


@pytest.mark.parametrize("kind", list(CHANGES))
def test_no_argument_is_left_out_of_that_test(kind: type) -> None:
    assert set(inspect.signature(kind).parameters) == set(CHANGES[kind])


def test_parameters_of_all_operands_change_the_recipe() -> None:
    params = QParams(power_2_scale=True, amax_epsilon=1e-3)
    made = Float8CurrentScaling(fp8_quant_fwd_inp=params, fp8_quant_fwd_weight=params, fp8_quant_bwd_grad=params)
    assert made.native == octavo.recipes.CurrentScaling(power_of_two_scales=True, amax_epsilon=1e-3)


def test_what_is_not_built_can_be_made_and_says_so_when_used() -> None:
    made = MXFP8BlockScaling(margin=1)
    with pytest.raises(NotImplementedError, match=r"MXFP8BlockScaling\(margin=1\)"):
        _ = made.native


def test_predicates_tell_recipes_apart() -> None:
    predicates = ("delayed", "float8_current_scaling", "float8_block_scaling", "mxfp8", "nvfp4", "custom")
    kinds = DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling
    table = [[getattr(kind(), name)() for name in predicates] for kind in kinds]
    assert table == [[i == j for j in range(len(predicates))] for i in range(len(kinds))]
    assert DelayedScaling().float8_per_tensor_scaling()
    assert not MXFP8BlockScaling().float8_per_tensor_scaling()


def test_a_changed_recipe_means_what_it_says_now() -> None:
    made = DelayedScaling(amax_history_len=4)
    made.amax_history_len = 8
    assert made.native == octavo.recipes.DelayedScaling(amax_history_len=8)
    made.fp8_dpa = True
    with pytest.raises(NotImplementedError, match="fp8_dpa"):
        _ = made.native
    made.fp8_dpa = False
    assert made == DelayedScaling(amax_history_len=8)
    assert copy.deepcopy(made).native == made.native


def test_an_algorithm_sees_the_history_as_transformer_engine_gives_it() -> None:
    """[L, n] with the current step in row 0, returning [n]."""
    seen = []

    def smallest(history: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(history.shape))
        return history[0] * 2

    algorithm = DelayedScaling(amax_history_len=3, amax_compute_algo=smallest).native.amax_compute_algo
    assert algorithm(torch.tensor([5.0, 1.0, 2.0])) == 10.0
    assert seen == [(3, 1)]


@pytest.mark.parametrize("kind", [DelayedScaling, Float8CurrentScaling])
def test_e5m2_in_the_forward_is_refused(kind: type) -> None:
    with pytest.raises(ValueError, match="fp8_format"):
        kind(fp8_format=Format.E5M2)


def test_the_module_is_one_under_both_of_its_names() -> None:
    from octavo.compat.transformer_engine import recipe

    assert te_recipe is recipe
