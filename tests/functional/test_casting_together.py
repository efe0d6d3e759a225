"""Input and weight of a Linear under BlockScaling, cast by one launch: when, and that nothing else changes."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.functional import shared_input
from octavo.recipes import BlockScaling, CurrentScaling, CustomRecipe, DelayedScaling, MXFP8Scaling, Recipe
from octavo.scaling import BLOCK_1X128, BLOCK_128X128
from octavo.tensor import Quantizer, QuantizeSpec, block_quantizer

# The function has its name in the room.
LINEAR = importlib.import_module("octavo.functional.linear")
HALVES = [torch.bfloat16, torch.float16]
X, W = (24, 160), (48, 160)
BLOCKS = BlockScaling()


class Casts:
    """Shapes of what was cast by block: of x and w in one call, and of matrices alone."""

    def __init__(self) -> None:
        self.together: list[tuple[tuple[int, ...], ...]] = []
        self.apart: list[tuple[int, ...]] = []

    def taken(self) -> tuple[list[tuple[tuple[int, ...], ...]], list[tuple[int, ...]]]:
        """(together, apart) since it was asked last."""
        found = self.together, self.apart
        self.together, self.apart = [], []
        return found


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> Casts:
    noted = Casts()
    pair, alone = block_quantizer.block_cast_pair, block_quantizer.block_cast

    def cast_pair(x: Any, w: Any) -> Any:
        noted.together.append((tuple(x.x.shape), tuple(w.x.shape)))
        return pair(x, w)

    def cast_alone(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        noted.apart.append(tuple(x.shape))
        return alone(x, *args, **kwargs)

    monkeypatch.setattr(block_quantizer, "block_cast_pair", cast_pair)
    monkeypatch.setattr(block_quantizer, "block_cast", cast_alone)
    return noted


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is decided as if Triton's kernels ran; what casts is the reference."""
    monkeypatch.setattr(LINEAR, "uses_triton", lambda weight: True)


def layer_of(recipe: Recipe | None = None, dtype: torch.dtype = torch.bfloat16, **of: Any) -> octavo.Linear:
    return octavo.Linear(X[1], W[0], recipe=recipe or BLOCKS, dtype=dtype, **of)


def run(layer: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients."""
    inner = x.detach().requires_grad_()
    y = layer(inner)
    return y.detach(), *torch.autograd.grad(y.float().square().sum(), [inner, *layer.parameters()])


def assert_equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_on_a_cpu_each_is_cast_alone(casts: Casts) -> None:
    layer = layer_of()
    run(layer, torch.randn(X, dtype=torch.bfloat16))
    with torch.no_grad():
        layer(torch.randn(X, dtype=torch.bfloat16))
    together, apart = casts.taken()
    assert not together
    assert apart == [X, W, (X[0], W[0]), W, X]


@pytest.mark.parametrize("shape", [X, (3, 8, 160), (160,), (1, 160)], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_together_bits_are_those_of_each_alone(
    dtype: torch.dtype, shape: tuple[int, ...], casts: Casts, monkeypatch: pytest.MonkeyPatch
) -> None:
    for recipe in (BlockScaling(), BlockScaling(power_of_two_scales=False), BlockScaling(backward="high_precision")):
        layer, x = layer_of(recipe, dtype), torch.randn(shape, dtype=dtype)
        alone = run(layer, x)
        with torch.no_grad():
            evaluated = layer(x)
        casts.taken()
        with monkeypatch.context() as patched:
            patched.setattr(LINEAR, "uses_triton", lambda weight: True)
            assert_equal(run(layer, x), alone)
            matrix = (x.numel() // X[1], X[1])
            together, apart = casts.taken()
            assert together == [(matrix, W)]
            assert len(apart) == (recipe.backward == "fp8")
            with torch.no_grad():
                assert torch.equal(layer(x), evaluated)
            assert casts.taken() == ([(matrix, W)], [])
            with torch.inference_mode():
                assert torch.equal(layer(x), evaluated)
            assert casts.taken() == ([(matrix, W)], [])


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("saved", ["saved_input", "saved_weight"])
def test_what_the_backward_casts_again_the_forward_makes_in_one_layout(saved: str, casts: Casts) -> None:
    layer, x = layer_of(), torch.randn(X, dtype=torch.bfloat16)
    kept = run(layer, x)
    casts.taken()
    again = layer_of(BlockScaling().replaced(**{saved: "high_precision"}))
    again.load_state_dict(layer.state_dict())
    assert_equal(run(again, x), kept)
    together, apart = casts.taken()
    assert together == [(X, W)]
    assert apart == [(X[0], W[0]), X if saved == "saved_input" else W]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_layers_on_one_input_cast_it_once_and_their_weights_each(casts: Casts) -> None:
    layers = [layer_of(bias=False) for _ in range(3)]
    for other in layers[1:]:
        other.delayed_state.share_input(layers[0].delayed_state)
    x = torch.randn(X, dtype=torch.bfloat16)
    apart = [layer(x.clone()) for layer in layers]
    assert casts.taken() == ([(X, W)] * 3, [])
    # The first of them casts anew each time: it has had the codes.
    for enabled in (True, True, False):
        with torch.set_grad_enabled(enabled):
            assert_equal(tuple(layer(x) for layer in layers), tuple(apart))
        assert casts.taken() == ([(X, W)], [W, W])


@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_was_made_together_is_remembered_as_ever(casts: Casts) -> None:
    a, b = layer_of(), layer_of()
    x = torch.randn(X, dtype=torch.bfloat16, requires_grad=True) * 1
    a(x)
    made = shared_input._LAST.made
    assert made is not None
    assert made.x() is x
    b(x)
    assert shared_input._LAST.made is made
    x.mul_(2)
    b(x)
    assert shared_input._LAST.made is not made
    assert casts.taken() == ([(X, W), (X, W)], [W])


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_weight_whose_codes_are_kept_is_cast_once(casts: Casts) -> None:
    layer, x = layer_of(), torch.randn(X, dtype=torch.bfloat16)
    alone = layer(x)
    casts.taken()
    with octavo.cached_weights():
        for _ in range(3):
            assert torch.equal(layer(x), alone)
    assert casts.taken() == ([], [W, X, X, X])


class OwnTensor(Tensor):
    """A weight that somebody wraps."""


@pytest.mark.usefixtures("as_on_a_gpu")
def test_other_weights_and_inputs_are_cast_alone(casts: Casts) -> None:
    x = torch.randn(X, dtype=torch.bfloat16)
    mixed = layer_of(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        run(mixed, x)
    run(mixed, x.float())
    wrapped = layer_of()
    wrapped.weight = nn.Parameter(wrapped.weight.detach().as_subclass(OwnTensor))
    run(wrapped, x)
    turned = layer_of()
    turned.weight = nn.Parameter(turned.weight.detach().t().contiguous().t())
    run(turned, x)
    layer_of()(nn.Parameter(x))
    assert not casts.together
    with octavo.quantized_init(recipe=BlockScaling()):
        in_codes = layer_of()
    casts.taken()
    in_codes(x)
    assert casts.taken() == ([], [X])


def spec(**of: Any) -> QuantizeSpec:
    return QuantizeSpec(format=octavo.E4M3, granularity=BLOCK_1X128, **of)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_other_recipes_cast_as_before(casts: Casts) -> None:
    square = QuantizeSpec(format=octavo.E4M3, granularity=BLOCK_128X128)
    both = {
        "fprop_input": spec(), "fprop_weight": square, "dgrad_grad_output": spec(), "dgrad_weight": square,
        "wgrad_grad_output": spec(), "wgrad_input": spec(),
    }  # fmt: skip
    x = torch.randn(X, dtype=torch.bfloat16)
    recipes = [
        CurrentScaling(),
        DelayedScaling(),
        MXFP8Scaling(),
        CustomRecipe(**(both | {"wgrad_input": spec(epsilon=0.5)})),
        CustomRecipe(**(both | {"dgrad_weight": spec()})),
        CustomRecipe(**(both | {"fprop_input": spec(inf_to_nan=True), "wgrad_input": spec(inf_to_nan=True)})),
        CustomRecipe(**(both | dict.fromkeys(("fprop_input", "wgrad_input"), spec(rounding="stochastic")))),
    ]
    for recipe in recipes:
        run(layer_of(recipe), x)
    assert not casts.together
    run(layer_of(CustomRecipe(**both)), x)
    assert casts.together == [(X, W)]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_watched_layer_is_told_of_each_cast(casts: Casts) -> None:
    layer, x, told = layer_of(), torch.randn(X, dtype=torch.bfloat16), []
    unwatched = run(layer, x)
    casts.taken()

    def observer(name: str, quantizer: Quantizer) -> Quantizer:
        def watched(matrix: Tensor, *layouts: bool) -> Any:
            told.append((name, tuple(matrix.shape)))
            return quantizer(matrix, *layouts)

        return watched

    layer.observer = observer
    assert_equal(run(layer, x), unwatched)
    assert not casts.together
    assert told == [("input", X), ("weight", W), ("grad_output", (X[0], W[0]))]
    layer.observer = None
    run(layer, x)
    assert casts.together == [(X, W)]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_counted_and_emulated_it_is_as_ever(casts: Casts) -> None:
    layer, x = layer_of(), torch.randn(X, dtype=torch.bfloat16)
    with octavo.count_gemms() as counted:
        found = run(layer, x)
    assert counted.fp8 + counted.high_precision == 3
    assert_equal(run(layer, x), found)
    with octavo.emulation("hopper"):
        run(layer, x)
    assert casts.together == [(X, W)] * 3


@pytest.mark.usefixtures("as_on_a_gpu")
def test_compiled_code_casts_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    layer, x = layer_of(), torch.randn(X, dtype=torch.bfloat16)
    expected = run(layer, x)

    def never(*_: object) -> Any:
        raise AssertionError("the compiler sees a cast of each")

    monkeypatch.setattr(block_quantizer, "block_cast_pair", never)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert_equal(run(compiled, x), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize(("m", "k", "n"), [(8192, 1280, 1280), (200, 264, 130), (33, 130, 48), (40, 127, 48)])
def test_on_a_gpu_bits_are_those_of_each_alone(
    m: int, k: int, n: int, dtype: torch.dtype, casts: Casts, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = octavo.Linear(k, n, recipe=BlockScaling(), device="cuda", dtype=dtype)
    x = torch.randn(m, k, device="cuda", dtype=dtype)
    with monkeypatch.context() as patched:
        patched.setattr(LINEAR, "uses_triton", lambda weight: False)
        alone = run(layer, x)
        with torch.no_grad():
            evaluated = layer(x)
    assert not casts.taken()[0]
    assert_equal(run(layer, x), alone)
    with torch.no_grad():
        assert torch.equal(layer(x), evaluated)
    assert casts.together == ([] if dtype == torch.float32 else [((m, k), (n, k))] * 2)
