"""`octavo.emulation`: what is in force where, and that every emulated product asks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import octavo
from octavo.formats import E4M3, cast
from octavo.kernels import current_emulation, scaled_mm
from octavo.kernels.scaled_mm import scaled_mm_hopper, scaled_mm_reference
from octavo.recipes import BlockScaling, CurrentScaling, Recipe, RowwiseScaling


def operands(rows: int = 16, inner: int = 512, columns: int = 32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes of one sign, whose sums differ in nearly every element."""
    a, b = (cast(torch.rand(n, inner) * 100, E4M3) for n in (rows, columns))
    return a, b, torch.tensor(0.01), torch.tensor(0.02)


def test_the_innermost_decides_and_leaving_restores() -> None:
    assert current_emulation() == "fp32"
    with octavo.emulation("hopper"):
        assert current_emulation() == "hopper"
        with octavo.emulation("fp32"):
            assert current_emulation() == "fp32"
            with octavo.emulation("auto"):
                assert current_emulation() == "fp32"
            assert current_emulation() == "fp32"
        assert current_emulation() == "hopper"
    assert current_emulation() == "fp32"


def test_one_object_can_be_entered_again_also_within_itself() -> None:
    context = octavo.emulation("hopper")
    for _ in range(2):
        with context, octavo.emulation("fp32"):
            with context:
                assert current_emulation() == "hopper"
            assert current_emulation() == "fp32"
        assert current_emulation() == "fp32"


def test_an_exception_leaves_it_too() -> None:
    def fails() -> None:
        with octavo.emulation("hopper"):
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fails()
    assert current_emulation() == "fp32"


@pytest.mark.parametrize("choice", ["h100", "Hopper", "", None, 32])
def test_another_name_is_refused_with_the_choices(choice: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"^emulation is {choice!r}: expected 'auto', 'fp32', 'hopper' \(H100 and H200: 'hopper'\)$"
    ):
        octavo.emulation(choice)


def test_each_thread_has_its_own() -> None:
    seen: list[str] = []
    entered, looked = threading.Event(), threading.Event()

    def other() -> None:
        seen.append(current_emulation())
        with octavo.emulation("fp32"):
            entered.set()
            looked.wait(10)

    thread = threading.Thread(target=other)
    with octavo.emulation("hopper"):
        thread.start()
        entered.wait(10)
        seen.append(current_emulation())
        looked.set()
        thread.join()
        seen.append(current_emulation())
    assert seen == ["fp32", "hopper", "hopper"]


@pytest.mark.parametrize("accumulate", ["fast", "precise"])
def test_a_product_is_computed_as_the_context_says(accumulate: Any) -> None:
    arguments = (*operands(), torch.randn(32), torch.bfloat16, accumulate)
    plain, hopper = scaled_mm_reference(*arguments), scaled_mm_hopper(*arguments)
    assert not torch.equal(plain, hopper)
    assert torch.equal(scaled_mm(*arguments), plain)
    with octavo.emulation("hopper"):
        assert torch.equal(scaled_mm(*arguments), hopper)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(scaled_mm(*arguments), hopper)
        with octavo.emulation("auto"):
            assert torch.equal(scaled_mm(*arguments), plain)
    assert torch.equal(scaled_mm(*arguments), plain)


def test_compiled_code_asks_when_it_runs() -> None:
    torch._dynamo.reset()
    arguments = operands()

    def product(*arguments: Tensor) -> Tensor:
        return scaled_mm(*arguments, accumulate="precise") * 2

    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    plain = compiled(*arguments)
    with octavo.emulation("hopper"):
        hopper = compiled(*arguments)
        assert torch.equal(hopper, product(*arguments))
    assert torch.equal(plain, product(*arguments))
    assert not torch.equal(plain, hopper)
    assert torch.equal(compiled(*arguments), plain)


def test_it_cannot_be_entered_while_compiling() -> None:
    torch._dynamo.reset()

    def product(*arguments: Tensor) -> Tensor:
        with octavo.emulation("hopper"):
            return scaled_mm(*arguments)

    with pytest.raises(Exception, match=r"octavo\.emulation goes around the call of a compiled function"):
        torch.compile(product, fullgraph=True, backend="aot_eager")(*operands())


def run(model: torch.nn.Module, x: Tensor, forward: str, backward: str) -> list[Tensor]:
    """Output and gradients."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    with octavo.emulation(forward):  # type: ignore[arg-type]
        y = model(x)
    with octavo.emulation(backward):  # type: ignore[arg-type]
        y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("recipe", [CurrentScaling(), RowwiseScaling(), BlockScaling()], ids=lambda r: type(r).__name__)
def test_all_three_products_of_a_layer_ask_when_they_run(recipe: Recipe) -> None:
    layer = octavo.Linear(256, 128, bias=False, recipe=recipe)
    x = torch.rand(144, 256)
    with torch.no_grad():
        layer.weight.abs_()
    with octavo.autocast(recipe=recipe):
        results = {pair: run(layer, x, *pair) for pair in [("fp32", "fp32"), ("hopper", "hopper"), ("hopper", "fp32")]}
    plain, hopper, mixed = results.values()
    for one, other in zip(plain, hopper, strict=True):
        assert not torch.equal(one, other)
        assert (one - other).norm() < 0.02 * one.norm()
    assert torch.equal(mixed[0], hopper[0])
    assert not torch.equal(mixed[1], hopper[1])


@pytest.mark.parametrize("sizes", ["list", "tensor"])
def test_products_of_experts_ask_as_well(sizes: str) -> None:
    experts = octavo.GroupedLinear(2, 256, 128, bias=False)
    x = torch.rand(96, 256)
    splits: Any = [64, 32] if sizes == "list" else torch.tensor([64, 32])
    results = []
    for choice in ("fp32", "hopper"):
        given = x.clone().requires_grad_()
        with octavo.emulation(choice), octavo.autocast():  # type: ignore[arg-type]
            y = experts(given, splits)
            y.sum().backward()
        results.append((y.detach(), given.grad))
    for one, other in zip(*results, strict=True):
        assert not torch.equal(one, other)
        assert (one - other).norm() < 0.02 * one.norm()


# Backwards within backwards: from this depth on torch runs them in threads of its own, as it runs those on a GPU.
DEEP = 70


class Nested(torch.autograd.Function):
    """Calls a backward in its backward, and the innermost one calls `within`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, within: Callable[[], None]) -> Tensor:
        ctx.depth, ctx.within = depth, within
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.depth == DEEP:
            ctx.within()
        else:
            nested_backward(ctx.within, ctx.depth + 1)
        return gradient, None, None


def nested_backward(within: Callable[[], None], depth: int = 0) -> None:
    with torch.enable_grad():
        Nested.apply(torch.ones(2, requires_grad=True), depth, within).sum().backward()  # type: ignore[no-untyped-call]


def test_a_backward_in_a_thread_of_torch_s_follows_who_called_it() -> None:
    seen: list[Any] = []

    def look() -> None:
        seen.append((threading.get_ident() == here, current_emulation()))

    here = threading.get_ident()
    nested_backward(look)
    with octavo.emulation("hopper"):
        nested_backward(look)
        with octavo.emulation("auto"):
            nested_backward(look)
    assert seen == [(False, "fp32"), (False, "hopper"), (False, "fp32")]


@pytest.mark.parametrize("other", ["fp32", "hopper"])
def test_a_thread_of_torch_s_does_not_choose_between_two_callers(other: Any) -> None:
    entered, left, seen = threading.Event(), threading.Event(), []

    def elsewhere() -> None:
        with octavo.emulation(other):
            entered.set()
            left.wait()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    entered.wait()
    try:
        assert current_emulation() == "fp32", "this thread is in no context"
        with octavo.emulation("hopper"):
            if other == "hopper":
                nested_backward(lambda: seen.append(current_emulation()))
            else:
                with pytest.raises(RuntimeError, match=r"two threads are inside of octavo\.emulation contexts"):
                    nested_backward(lambda: seen.append(current_emulation()))
    finally:
        left.set()
        thread.join()
    assert seen == (["hopper"] if other == "hopper" else [])


@pytest.mark.gpu
def test_a_backward_in_a_thread_of_its_own_follows_who_called_it() -> None:
    seen: list[str] = []
    x = torch.ones(3, device="cuda", requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: seen.append(current_emulation()))
    with octavo.emulation("hopper"):
        y.sum().backward()
    assert seen == ["hopper"]


@pytest.mark.gpu
def test_native_products_stay_native_and_others_are_emulated_on_the_device() -> None:
    arguments = [t.cuda() for t in operands()]
    native = scaled_mm(*arguments)
    odd = [t.cuda() for t in operands(inner=500)]
    with octavo.emulation("hopper"):
        assert torch.equal(scaled_mm(*arguments), native)
        assert torch.equal(scaled_mm(*odd).cpu(), scaled_mm_hopper(*(t.cpu() for t in odd)))


def test_one_object_in_two_threads_gives_each_its_own_choice_back() -> None:
    shared, found = octavo.emulation("fp32"), {}
    inside, entered, left = threading.Event(), threading.Event(), threading.Event()

    def other() -> None:
        inside.wait()
        with octavo.emulation("hopper"):
            with shared:
                entered.set()
                left.wait()
            found["other"] = current_emulation()

    thread = threading.Thread(target=other)
    thread.start()
    with shared:
        inside.set()
        entered.wait()
    found["this"] = current_emulation()
    left.set()
    thread.join()
    assert found == {"this": "fp32", "other": "hopper"}
