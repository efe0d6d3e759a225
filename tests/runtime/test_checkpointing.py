"""Activation checkpointing changes no bit, and what cannot be right raises."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import octavo
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling

DELAYED = DelayedScaling(amax_history_len=3)
Checkpoint = Callable[..., Any]


def plain(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def octavo_reentrant(function: Callable[..., Any], *args: Any) -> Any:
    return octavo.checkpoint(function, *args, use_reentrant=True)


def torchs(function: Callable[..., Any], *args: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


def torchs_reentrant(function: Callable[..., Any], *args: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=True)


CHECKPOINTS = {"octavo": octavo.checkpoint, "octavo, reentrant": octavo_reentrant, "torch": torchs}
RECIPES: dict[str, Recipe] = {
    "delayed": DELAYED,
    "delayed, measured first": DelayedScaling(initialise_from_first_batch=True),
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "block": BlockScaling(),
    "high precision backward": DelayedScaling(backward="high_precision"),
}


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(octavo.Linear(16, 32), nn.GELU(), octavo.Linear(32, 16))


def seen(model: nn.Module, *tensors: Tensor) -> list[Tensor]:
    """Everything that must not change a bit: results, gradients, every scale and history."""
    parts = [t.detach().clone() for t in tensors]
    parts += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for module in model.modules():
        if isinstance(module, octavo.Linear):
            for operand in module.delayed_state.operands:
                parts += [operand.scale.clone(), operand.gathered.clone(), operand.history.clone()]
    return parts


def assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b)
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        assert torch.equal(x, y), f"part {i} differs"


def three_steps(run: Callable[[nn.Module, Tensor], Tensor], seed: int = 0) -> list[Tensor]:
    model, parts = network(seed), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(step)
        x = (torch.randn(8, 16) * 4.0**step).requires_grad_()
        y = run(model, x)
        (y.square().sum() * 10.0**step).backward()
        parts += seen(model, y, x.grad)
        optimizer.step()
        optimizer.zero_grad()
    return parts


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("how", CHECKPOINTS)
def test_case_15_bit_invisible_over_three_steps(how: str, recipe: str) -> None:
    """Case 15: reentrant and not: out, dx, dW, every scale."""

    def run(checkpoint: Checkpoint) -> Callable[[nn.Module, Tensor], Tensor]:
        def step(model: nn.Module, x: Tensor) -> Tensor:
            with octavo.autocast(recipe=RECIPES[recipe]):
                return checkpoint(model, x)

        return step

    assert_same(three_steps(run(plain)), three_steps(run(CHECKPOINTS[how])))


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_case_16_a_context_inside_the_function_and_one_layer_of_three(how: str) -> None:
    """Case 16: the context is opened inside the checkpointed function; only the middle layer is in FP8."""

    def run(checkpoint: Checkpoint) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), octavo.Linear(32, 32), nn.Linear(32, 16))

        def function(x: Tensor) -> Tensor:
            x = model[0](x)
            with octavo.autocast(recipe=DELAYED):
                x = model[1](x)
            return model[2](x)

        parts = []
        for step in range(3):
            torch.manual_seed(step)
            x = torch.randn(8, 16, requires_grad=True)
            y = checkpoint(function, x)
            y.square().sum().backward()
            parts += seen(model, y, x.grad)
            model.zero_grad()
        assert model[1].delayed_state.grad_output.scale.item() != 1.0
        return parts

    assert_same(run(plain), run(CHECKPOINTS[how]))


@pytest.mark.parametrize("how", ["octavo", "octavo, reentrant"])
def test_several_pending_forwards_with_different_scales(how: str) -> None:
    """Each recompute repeats the scales of its own forward, in whatever order the backwards come."""

    def run(checkpoint: Checkpoint) -> list[Tensor]:
        model, pending = network(), []
        for step in range(4):
            torch.manual_seed(step)
            x = (torch.randn(8, 16) * 3.0**step).requires_grad_()
            with octavo.autocast(recipe=DELAYED):
                pending.append((x, checkpoint(model, x)))
        parts = []
        for i in (2, 0, 3, 1):
            x, y = pending[i]
            y.square().sum().backward()
            parts += seen(model, y, x.grad)
        return parts

    assert_same(run(plain), run(CHECKPOINTS[how]))


@pytest.mark.parametrize("inner", ["octavo", "octavo, reentrant", "torch"])
@pytest.mark.parametrize("outer", ["octavo", "octavo, reentrant", "torch"])
def test_checkpoints_within_checkpoints(outer: str, inner: str) -> None:
    """With pending forwards of other scales in between, where the outer tape is ours: it hands the calls on."""

    def run(around: Checkpoint, within: Checkpoint) -> list[Tensor]:
        model, pending = network(), []

        def function(x: Tensor) -> Tensor:
            return within(model[2], model[1](within(model[0], x)))

        for step in range(1 if "torch" in (outer, inner) else 3):
            torch.manual_seed(step)
            x = (torch.randn(8, 16) * 3.0**step).requires_grad_()
            with octavo.autocast(recipe=DELAYED):
                pending.append((x, around(function, x)))
        parts = []
        for x, y in pending:
            y.square().sum().backward()
            parts += seen(model, y, x.grad)
        return parts

    assert_same(run(plain, plain), run(CHECKPOINTS[outer], CHECKPOINTS[inner]))


@pytest.mark.parametrize("how", ["octavo", "torch"])
def test_a_retained_graph_recomputes_the_same_twice(how: str) -> None:
    model, x = network(), torch.randn(8, 16, requires_grad=True)
    with octavo.autocast(recipe=DELAYED):
        y = CHECKPOINTS[how](model, x)
    y.sum().backward(retain_graph=True)
    first = x.grad.clone()
    y.sum().backward()
    assert torch.equal(x.grad, 2 * first)


def test_layers_without_gradients_inside_the_function() -> None:
    model = network()

    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            frozen = model[0](x)
        return model(x) + frozen.sum()

    results = []
    for checkpoint in (plain, octavo.checkpoint, torchs):
        x = torch.ones(8, 16, requires_grad=True)
        with octavo.autocast(recipe=CurrentScaling()):
            y = checkpoint(function, x)
        y.sum().backward()
        results.append(seen(model, y, x.grad))
        model.zero_grad()
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


def test_a_recompute_that_does_something_else_raises() -> None:
    model, calls = network(), []

    def function(x: Tensor) -> Tensor:
        calls.append(x)
        return model(x) if len(calls) == 1 else model(model(x))

    x = torch.randn(8, 16, requires_grad=True)
    with octavo.autocast(recipe=DELAYED):
        y = octavo_reentrant(function, x)
    with pytest.raises(RuntimeError, match="runs more FP8 layers than its first forward did"):
        y.sum().backward()


@pytest.mark.parametrize("trained_before", [True, False])
def test_torchs_reentrant_checkpoint_raises_with_the_remedy_under_delayed_scaling(trained_before: bool) -> None:
    model = network()
    if trained_before:
        with octavo.autocast(recipe=DELAYED):
            y = model(torch.randn(8, 16))
        y.sum().backward()
    with octavo.autocast(recipe=DELAYED):
        y = torchs_reentrant(model, torch.randn(8, 16, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"Use octavo\.checkpoint, or use_reentrant=False"):
        y.sum().backward()


@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_torchs_reentrant_checkpoint_is_right_where_there_is_no_state(recipe: str) -> None:
    def run(checkpoint: Checkpoint) -> Callable[[nn.Module, Tensor], Tensor]:
        def step(model: nn.Module, x: Tensor) -> Tensor:
            with octavo.autocast(recipe=RECIPES[recipe]):
                return checkpoint(model, x)

        return step

    assert_same(three_steps(run(plain)), three_steps(run(torchs_reentrant)))


def test_a_forward_without_gradients_inside_a_backward_is_no_recompute() -> None:
    """A hook that evaluates another model: nothing was run before, and nothing is to be repeated."""
    model, other = network(), octavo.Linear(16, 16, recipe=CurrentScaling())
    x = torch.randn(8, 16, requires_grad=True)
    seen_in_hook = []

    def hook(gradient: Tensor) -> None:
        with torch.no_grad():
            seen_in_hook.append(other(x))

    with octavo.autocast(recipe=DELAYED):
        y = model(x)
    y.register_hook(hook)
    y.sum().backward()
    assert torch.equal(seen_in_hook[0], other(x))


def test_an_eager_checkpoint_around_a_compiled_function_with_the_context_raises() -> None:
    model = network()

    def function(x: Tensor) -> Tensor:
        with octavo.autocast(recipe=DELAYED):
            return model(x)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    y = octavo.checkpoint(compiled, torch.randn(8, 16, requires_grad=True))
    with pytest.raises(RuntimeError, match="Put the checkpoint inside the compiled function"):
        y.sum().backward()


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_checkpoint_inside_a_compiled_function(recipe: str) -> None:
    def run(compiled: bool) -> list[Tensor]:
        def step(model: nn.Module, x: Tensor) -> Tensor:
            def function(x: Tensor) -> Tensor:
                return octavo.checkpoint(model, x)

            runner = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
            with octavo.autocast(recipe=RECIPES[recipe]):
                return runner(x)

        return three_steps(step)

    assert_same(run(False), run(True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("recipe", "how"),
    # Dynamo lets nothing be noted inside of torch's checkpoint: with delayed scaling a context around is for octavo's.
    [(recipe, "octavo") for recipe in ("delayed", "current", "rowwise")] + [("current", "torch"), ("rowwise", "torch")],
)
def test_a_checkpoint_inside_a_function_compiled_for_a_gpu(recipe: str, how: str) -> None:
    """By Inductor, where casts gather in the kernel: the recompute must not, nor find its inputs written to.

    The first layer's input is the same; the second's comes from equal codes by way of a GELU, which Inductor may
    compute within some units of float32's last place.
    """
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model, parts = network().cuda(), []
        runner = torch.compile(CHECKPOINTS[how], fullgraph=True) if compiled else CHECKPOINTS[how]
        for step in range(3):
            torch.manual_seed(step)
            x = (torch.randn(16, 16) * 4.0**step).cuda().requires_grad_()
            with octavo.autocast(recipe=RECIPES[recipe]):
                y = runner(model, x)
            assert all(operand.gathered.item() == 0 for layer in (model[0], model[2])
                       for operand in layer.delayed_state.operands[:2])  # fmt: skip
            y.square().sum().backward()
            assert all(operand.gathered.item() == 0 for layer in (model[0], model[2])
                       for operand in layer.delayed_state.operands[:2]), "a recompute gathers nothing"  # fmt: skip
            parts += [layer.delayed_state.input.history.clone() for layer in (model[0], model[2])]
            assert (model[2].delayed_state.grad_output.gathered.item() > 0) == (recipe == "delayed")
            model.zero_grad()
        results.append(parts)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-20, atol=0.0)


@pytest.mark.parametrize("how", ["none", *CHECKPOINTS])
def test_a_backward_in_another_thread(how: str) -> None:
    """As on a GPU, where autograd has threads of its own: neither the context nor the tape is found in them."""
    results = []
    for elsewhere in (False, True):
        torch.manual_seed(0)
        model, x = network(), torch.randn(8, 16).requires_grad_()
        for _ in range(2):
            with octavo.autocast(recipe=DELAYED):
                y = CHECKPOINTS.get(how, plain)(model, x)
            thread = threading.Thread(target=y.sum().backward)
            if elsewhere:
                thread.start()
                thread.join()
            else:
                thread.run()
        results.append(seen(model, y, x.grad))
    assert_same(*results)


def watched(model: nn.Module) -> list[tuple[str, float]]:
    """From now on, (operand, scale) of every cast of the first layer."""
    seen: list[tuple[str, float]] = []

    def observer(operand, quantizer):
        def note(x: Tensor, rowwise: bool, columnwise: bool, column_sum: bool = False):
            out = quantizer(x, rowwise, columnwise, column_sum)
            seen.append((operand, float(out.scale if out.scale is not None else out.scale_t)))
            return out

        return note

    model[0].observer = observer
    return seen


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_a_recompute_casts_with_the_scales_of_its_first_forward_and_gathers_nothing(how: str) -> None:
    """The context ends, and with it the step, before the backward runs the forward again."""
    model = network()
    for step in range(3):
        x = (torch.randn(8, 16) * 7.0**step).requires_grad_()
        casts = watched(model)
        with octavo.autocast(recipe=DELAYED):
            y = CHECKPOINTS[how](model, x)
        state = model[0].delayed_state
        first = sorted(pair for pair in casts if pair[0] != "grad_output")
        assert [operand for operand, _ in first] == ["input", "weight"]
        assert first[0][1] != state.input.scale.item(), "the update has changed it"
        casts.clear()
        y.square().sum().backward()
        assert sorted(pair for pair in casts if pair[0] != "grad_output") == first
        assert state.input.gathered.item() == state.weight.gathered.item() == 0.0
        assert state.grad_output.gathered.item() > 0.0


@pytest.mark.parametrize("recipe", ["delayed", "delayed, measured first"])
@pytest.mark.parametrize("how", CHECKPOINTS)
def test_several_pending_forwards_of_one_step(how: str, recipe: str) -> None:
    """Micro-batches of one context, whose backwards come after it, in another order.

    With torch's own checkpoint too: all of them have one scale, or each measures its own anew, to the same bits.
    """

    def run(checkpoint: Checkpoint) -> list[Tensor]:
        model, parts = network(), []
        for step in range(3):
            torch.manual_seed(step)
            batches = [(torch.randn(8, 16) * 3.0 ** (i + step)).requires_grad_() for i in range(3)]
            with octavo.autocast(recipe=RECIPES[recipe]):
                outputs = [checkpoint(model, x) for x in batches]
            for i in (1, 0, 2):
                outputs[i].square().sum().backward()
                parts += seen(model, outputs[i], batches[i].grad)
        return parts

    assert_same(run(plain), run(CHECKPOINTS[how]))


@pytest.mark.parametrize("recipe", ["delayed", "delayed, measured first", "current"])
@pytest.mark.parametrize("how", CHECKPOINTS)
def test_a_layer_used_twice_inside_the_function(how: str, recipe: str) -> None:
    def run(checkpoint: Checkpoint) -> list[Tensor]:
        torch.manual_seed(0)
        layer, parts = nn.Sequential(octavo.Linear(16, 16)), []

        def function(x: Tensor) -> Tensor:
            return layer(layer(x).relu() * 100)

        for step in range(3):
            torch.manual_seed(step)
            x = torch.randn(8, 16, requires_grad=True)
            with octavo.autocast(recipe=RECIPES[recipe]):
                y = checkpoint(function, x)
            y.square().sum().backward()
            parts += seen(layer, y, x.grad)
        return parts

    assert_same(run(plain), run(CHECKPOINTS[how]))
