"""Which kernel makes an operand, and that all ways give the same one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import octavo
from octavo.functional import fused_casts
from octavo.functional.fused_casts import cast_activated, cast_activation_gradient, cast_normalised, repeating
from octavo.functional.products import Needs
from octavo.kernels.activation_cast import activation_output
from octavo.kernels.norm_cast import Norm, norm_output
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling, StaticScaling
from octavo.runtime import Call, LayerState, plan_linear
from octavo.tensor import DelayedQuantizer, Operand, OperandState, Quantizer

BF16 = torch.bfloat16
KERNELS = (
    "norm_cast",
    "norm_output",
    "activation_cast",
    "activation_output",
    "activation_backward_cast",
    "activation_backward_output",
    "cast_transpose",
)
# A step of a LayerNormMLP. n, a and dz by one kernel each; or by one that gives the amax too, and a cast; or by that
# and a quantizer that measures by itself.
FUSED = {"norm_cast": 1, "activation_cast": 1, "activation_backward_cast": 1}
MEASURED = {"norm_output": 1, "activation_output": 1, "activation_backward_output": 1}
PATHS = [
    (DelayedScaling(), FUSED),
    # Its gradients are scaled as current scaling does.
    (
        StaticScaling(input_scale=0.01, weight_scale=0.001),
        {"norm_cast": 1, "activation_cast": 1, "activation_backward_output": 1, "cast_transpose": 1},
    ),
    (CurrentScaling(), {**MEASURED, "cast_transpose": 3}),
    (RowwiseScaling(), MEASURED),
    (BlockScaling(), MEASURED),
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    counted: dict[str, int] = {}

    def counting(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            counted[name] = counted.get(name, 0) + 1
            return kernel(*args, **options)

        return called

    for name in KERNELS:
        monkeypatch.setattr(fused_casts, name, counting(name, getattr(fused_casts, name)))
    return counted


def step(layer: octavo.LayerNormMLP, recipe: Recipe) -> None:
    with octavo.autocast(recipe=recipe):
        y = layer(torch.randn(8, 32))
    y.sum().backward()


@pytest.mark.parametrize(("recipe", "expected"), PATHS, ids=lambda p: type(p).__name__)
def test_one_kernel_where_the_scale_is_known(recipe: Recipe, expected: dict[str, int], calls: dict[str, int]) -> None:
    step(octavo.LayerNormMLP(32, 48), recipe)
    assert calls == expected


def test_scales_that_the_first_batch_gives_are_known_once_an_update_has_seen_them(calls: dict[str, int]) -> None:
    """Those of the forward in the second step; that of the first gradient, which no update has seen, in the third."""
    layer, recipe = octavo.LayerNormMLP(32, 48), DelayedScaling(initialise_from_first_batch=True)
    step(layer, recipe)
    assert calls == MEASURED
    calls.clear()
    step(layer, recipe)
    assert calls == {"norm_cast": 1, "activation_cast": 1, "activation_backward_output": 1}
    calls.clear()
    step(layer, recipe)
    assert calls == FUSED


def quantizer_of(measured: bool, gather: bool = True) -> DelayedQuantizer:
    state = OperandState()
    state.scale = torch.tensor(0.01)
    return DelayedQuantizer(DelayedScaling().linear.input, state, gather=gather, from_data=measured)


QUANTIZERS: dict[str, Callable[[], Quantizer]] = {
    "delayed": lambda: quantizer_of(False),
    "delayed, measured": lambda: quantizer_of(True),
    "delayed, gathers nothing": lambda: quantizer_of(False, False),
}


def outcome(operand: Operand, quantizer: Any) -> list[Tensor]:
    codes = [t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in operand if t is not None]
    return [*codes, quantizer.state.gathered]


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_an_operand_is_that_of_the_result_and_its_quantizer(name: str, dtype: torch.dtype, columnwise: bool) -> None:
    x, norm = torch.randn(9, 21), Norm("layer", through=dtype)
    one, other = QUANTIZERS[name](), QUANTIZERS[name]()
    made = cast_normalised(x, norm, None, None, one, columnwise, False)
    expected = other(norm_output(x, norm, None, None).output, True, columnwise)
    for a, b in zip(outcome(made.operand, one), outcome(expected, other), strict=True):
        assert torch.equal(a, b)
    one, other = QUANTIZERS[name](), QUANTIZERS[name]()
    activated = cast_activated(x, "silu", one, dtype, True, columnwise, False)
    expected = other(activation_output(x, "silu", dtype).output, True, columnwise)
    for a, b in zip(outcome(activated.operand, one), outcome(expected, other), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_repetition_takes_the_same_scale_and_gathers_nothing(name: str) -> None:
    quantizer, x = QUANTIZERS[name](), torch.randn(9, 21)
    first = quantizer(x, True, True)
    quantizer.state.gathered.zero_()
    quantizer.state.scale = torch.tensor(7.0)  # as an update would leave it
    again = repeating(quantizer, first.scale)(x, True, True)
    assert torch.equal(first.codes.view(torch.uint8), again.codes.view(torch.uint8))
    assert torch.equal(first.scale, again.scale)
    assert quantizer.state.gathered.item() == 0.0


@pytest.mark.parametrize("from_data", [False, True])
def test_a_gradient_that_the_activation_makes_infinite_is_nan_for_a_loss_scaler(from_data: bool) -> None:
    """Finite before, beyond fp16 after: what a separate backward would have handed on is inf."""
    recipe = DelayedScaling()
    plan = plan_linear(Call(recipe, False, from_data=(False, False, from_data)), LayerState(), "")
    z = torch.cat([torch.ones(2, 3), torch.full((2, 3), 10.0)], dim=1).half()
    da = torch.tensor([[60000.0, 1.0, 2.0], [3.0, 4.0, 5.0]]).half()
    made = cast_activation_gradient(da, z, "reglu", plan, torch.float16, Needs(True, True, True))
    codes = made.codes.codes.float()[:2, :6]
    assert bool(codes[0, 0].isnan())
    assert int(codes.isnan().sum()) == 1
    assert bool(made.codes.codes_t.float()[0, 0].isnan())
    assert bool(made.codes.column_sum.isinf()[0])
