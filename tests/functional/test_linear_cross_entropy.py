"""linear_cross_entropy without FP8: against float64, its memory, and how it is asked for."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import octavo
from octavo.functional.linear_cross_entropy import DEFAULT_CHUNK

BF16 = torch.bfloat16
REDUCTIONS = ("mean", "sum", "none")
UNIT = 2.0**-24
TOKENS, FEATURES, CLASSES = 100, 40, 133


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(hidden [2, 50, 40], weight [133, 40], bias [133], targets [2, 50], some of them ignored)."""
    hidden, weight = torch.randn(2, TOKENS // 2, FEATURES), torch.randn(CLASSES, FEATURES) / 4
    targets = torch.randint(0, CLASSES, (2, TOKENS // 2))
    targets[0, 3] = targets[1, :5] = -100
    return hidden.to(dtype), weight.to(dtype), torch.randn(CLASSES).to(dtype), targets


def gradients(loss: Tensor, weights: Tensor | None, inputs: list[Tensor]) -> list[Tensor]:
    """Those of the loss with a gradient that is no 1."""
    total = (loss * 0.7 if weights is None else loss * weights).sum()
    return list(torch.autograd.grad(total, inputs))


def exact(inputs: list[Tensor], targets: Tensor, weights: Tensor | None, reduction: str) -> tuple[Tensor, list[Tensor]]:
    """(loss, gradients) of torch's functions in float64."""
    leaves = [one.detach().double().requires_grad_() for one in inputs]
    hidden, weight, bias = leaves
    logits = torch.nn.functional.linear(hidden, weight, bias).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), label_smoothing=0.1, reduction=reduction)
    loss = loss.reshape(targets.shape) if reduction == "none" else loss
    return loss.detach(), gradients(loss, None if weights is None else weights.double(), leaves)


def bounds(inputs: list[Tensor], targets: Tensor, rows: Tensor) -> tuple[float, list[Tensor]]:
    """How far (loss of a row, gradients) may be from those of float64; `rows` [M] are the gradients of the losses.

    u = 2^-24, V classes, K features, M tokens. A logit is a sum of K + 1 terms: off by (K + 2) u times the sum of
    magnitudes, at most e. So the log sum exp is off by e and by what its own sum loses, (V + 40) u times its size; the
    loss by twice that; a probability p by 3 e and (V + 60) u, relative; its gradient d by that of p and 4 u. A product
    with d is off by what d is off and by the number of its terms times u, times the sum of magnitudes; it is multiplied
    by a number at the end, which is twice rounded.
    """
    hidden, weight, bias = (one.detach().double() for one in inputs)
    h, g = hidden.reshape(-1, FEATURES), rows.double().reshape(-1, 1).abs()
    logits = h @ weight.t() + bias
    e = (FEATURES + 2) * UNIT * (h.abs() @ weight.abs().t() + bias.abs()).amax()
    p, size = logits.softmax(1), logits.abs().amax()
    loss = 2 * (e + (CLASSES + 40) * UNIT * size)
    d = p + torch.nn.functional.one_hot(targets.flatten().clamp(min=0), CLASSES) + 1 / CLASSES
    d_off = (3 * e + (CLASSES + 60) * UNIT) * p + 4 * UNIT * d
    products = [
        g * ((d_off + (CLASSES + 4) * UNIT * d) @ weight.abs()),
        ((d_off + (TOKENS + 4) * UNIT * d) * g).t() @ h.abs(),
        ((d_off + (TOKENS + 4) * UNIT * d) * g).sum(0),
    ]
    return float(loss), [one.reshape(given.shape) for one, given in zip(products, inputs, strict=True)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("chunk", [DEFAULT_CHUNK, 32, 7, 1])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_loss_and_gradients_are_those_of_float64(reduction: Any, chunk: int, recompute: bool) -> None:
    *inputs, targets = operands()
    weights = torch.randn(2, TOKENS // 2) if reduction == "none" else None
    inputs = [one.requires_grad_() for one in inputs]
    hidden, weight, bias = inputs
    loss = octavo.linear_cross_entropy(
        hidden, weight, targets, bias,
        label_smoothing=0.1, reduction=reduction, chunk_tokens=chunk, recompute=recompute,
    )  # fmt: skip
    expected, expected_gradients = exact(inputs, targets, weights, reduction)
    counting = targets != -100
    rows = {"mean": 0.7 / counting.sum() * counting, "sum": 0.7 * counting, "none": weights}[reduction]
    off, gradients_off = bounds(inputs, targets, rows)
    num_rows = {"mean": 1, "sum": TOKENS, "none": 1}[reduction]
    # A sum of M losses is off by M u times its size besides.
    assert bool(((loss.double() - expected).abs() <= num_rows * off + TOKENS * UNIT * expected.abs()).all())
    for found, value, bound in zip(gradients(loss, weights, inputs), expected_gradients, gradients_off, strict=True):
        assert found.dtype == torch.float32
        assert bool(((found.double() - value).abs() <= bound).all())


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_each_chunk_is_a_linear_and_its_loss_to_the_bit(reduction: Any, dtype: torch.dtype) -> None:
    """Given gradients of 1 or 0, which no factor divides: dh as it is, dw and db as sums in float32."""
    *inputs, targets = operands(dtype)
    hidden, weight, bias = (one.requires_grad_() for one in inputs)
    loss = octavo.linear_cross_entropy(hidden, weight, targets, bias, reduction=reduction, chunk_tokens=32)
    each = torch.ones(2, TOKENS // 2) if reduction == "none" else loss.new_tensor(1.0)
    dloss = each * (targets != -100).sum() if reduction == "mean" else each
    dh, dw, db = torch.autograd.grad(loss, (hidden, weight, bias), dloss)
    losses, dhs, dw_sum, db_sum = [], [], torch.zeros(CLASSES, FEATURES), torch.zeros(CLASSES)
    for h, t in zip(hidden.detach().flatten(0, 1).split(32), targets.flatten().split(32), strict=True):
        logits = torch.nn.functional.linear(h, weight, bias).detach().requires_grad_()
        each_loss = octavo.cross_entropy(logits, t, reduction="none")
        (d,) = torch.autograd.grad(each_loss.sum(), logits)
        losses.append(each_loss.detach())
        dhs.append((d @ weight).detach())
        # What is kept of float16 is not divided by the number of tokens yet, and might be too large for it.
        dw_sum += (d.t() @ h if dtype == BF16 else d.float().t() @ h.float()).float()
        db_sum += d.float().sum(0)
    joined = torch.cat(losses)
    whole = {"mean": joined.sum() / (targets != -100).sum(), "sum": joined.sum(), "none": joined.reshape(targets.shape)}
    assert torch.equal(loss, whole[reduction])
    assert torch.equal(dh, torch.cat(dhs).reshape(hidden.shape))
    assert torch.equal(dw, dw_sum.to(dtype))
    assert torch.equal(db, db_sum.to(dtype))
    assert dh.dtype == dw.dtype == db.dtype == dtype


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation gives, in elements; how many of `size` there are at a time."""

    def __init__(self, size: int = 0) -> None:
        super().__init__()
        self.elements, self.size, self.at_a_time = 0, size, 0
        self.alive: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.numel())
                if leaf.numel() == self.size and not leaf._is_view():
                    self.alive.append(weakref.ref(leaf))
        memory = {one.untyped_storage().data_ptr() for one in (kept() for kept in self.alive) if one is not None}
        self.at_a_time = max(self.at_a_time, len(memory))
        return out


def largest_of(call: Callable[[], Tensor]) -> int:
    with Largest() as seen:
        call().sum().backward()
    return seen.elements


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("recompute", [False, True])
def test_no_tensor_is_as_large_as_the_logits(reduction: Any, recompute: bool) -> None:
    hidden, weight = torch.randn(512, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True)
    targets = torch.randint(0, 300, (512,))

    def ours() -> Tensor:
        return octavo.linear_cross_entropy(
            hidden, weight, targets, reduction=reduction, chunk_tokens=64, recompute=recompute
        )

    def theirs() -> Tensor:
        return octavo.cross_entropy(torch.nn.functional.linear(hidden, weight), targets, reduction=reduction)

    assert largest_of(theirs) == 512 * 300
    assert largest_of(ours) == 64 * 300


@pytest.mark.parametrize("recompute", [False, True])
def test_one_chunk_is_gone_when_the_next_one_is_made(recompute: bool) -> None:
    """No more chunks of logits, and no more gradients of the weight, exist at a time if there are more chunks."""
    seen = []
    for chunks in (2, 6):
        hidden, weight = torch.randn(64 * chunks, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True)
        targets = torch.randint(0, 300, (64 * chunks,))
        for size in (64 * 300, 300 * 16):
            with Largest(size) as mode:
                octavo.linear_cross_entropy(hidden, weight, targets, chunk_tokens=64, recompute=recompute).backward()
            seen.append(mode.at_a_time)
    assert seen[:2] == seen[2:]
    # Of logits the reference of the kernel has float32 temporaries; what was left behind would be one more.
    assert seen[0] <= 3


def test_what_is_kept_for_the_backward() -> None:
    """The figures of the docs, in bytes, in bfloat16; parameters and inputs aside."""
    hidden, weight = torch.randn(512, 16, dtype=BF16, requires_grad=True), torch.randn(300, 16, dtype=BF16)
    weight.requires_grad_()
    targets = torch.randint(0, 300, (512,))
    given = {one.untyped_storage().data_ptr() for one in (hidden, weight, targets)}

    def kept_bytes(**options: Any) -> int:
        kept: dict[int, int] = {}

        def note(one: Tensor) -> Tensor:
            kept[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
            return one

        with torch.autograd.graph.saved_tensors_hooks(note, lambda one: one):
            octavo.linear_cross_entropy(hidden, weight, targets, chunk_tokens=64, **options)
        return sum(size for where, size in kept.items() if where not in given)

    assert kept_bytes() == 2 * 512 * 16 + 2 * 300 * 16 + 4
    assert kept_bytes(recompute=True) == 4 * 512 + 4
    assert kept_bytes(reduction="none") == 4 * 512


def test_only_what_is_needed_is_computed() -> None:
    hidden, weight, bias, targets = operands()
    leaves = [one.clone().requires_grad_() for one in (hidden, weight, bias)]
    whole = gradients(octavo.linear_cross_entropy(leaves[0], leaves[1], targets, leaves[2]), None, leaves)
    for recompute in (False, True):
        for number in range(3):
            inputs = [one.clone().requires_grad_(place == number) for place, one in enumerate((hidden, weight, bias))]
            loss = octavo.linear_cross_entropy(inputs[0], inputs[1], targets, inputs[2], recompute=recompute)
            (found,) = gradients(loss, None, [inputs[number]])
            assert torch.equal(found, whole[number])
    with torch.no_grad():
        assert torch.equal(octavo.linear_cross_entropy(hidden, weight, targets, bias), loss)


def test_a_loss_scaler_changes_nothing_but_the_scale() -> None:
    """The gradient of the loss multiplies at the end: in float16, whose 65504 a scaled gradient would soon reach."""
    *inputs, targets = operands(torch.float16)
    hidden, weight, bias = (one.requires_grad_() for one in inputs)
    loss = octavo.linear_cross_entropy(hidden, weight, targets, bias)
    plain = torch.autograd.grad(loss, (hidden, weight), torch.tensor(8.0), retain_graph=True)
    scaled = torch.autograd.grad(loss, (hidden, weight), torch.tensor(4096.0))
    for a, b in zip(scaled, plain, strict=True):
        normal = b.abs() >= 2.0**-14
        assert normal.float().mean() > 0.5
        assert torch.equal(a[normal], b[normal] * 512)


def test_a_mean_divides_in_float32() -> None:
    """1 / 94 in bfloat16 would be 0.2 % off, in every gradient."""
    *inputs, targets = operands(BF16)
    inputs = [one.requires_grad_() for one in inputs]
    count = int((targets != -100).sum())
    assert count == 94
    outcomes = []
    for reduction in ("sum", "mean"):
        loss = octavo.linear_cross_entropy(inputs[0], inputs[1], targets, inputs[2], reduction=reduction)
        outcomes.append(torch.autograd.grad(loss, inputs[:2]))
    for whole, mean in zip(*outcomes, strict=True):
        assert torch.equal(mean, (whole.float() * (torch.tensor(1.0) / count)).to(BF16))


def test_a_graph_that_is_kept_gives_the_same_gradients_again() -> None:
    *inputs, targets = operands()
    inputs = [one.requires_grad_() for one in inputs]
    for recompute in (False, True):
        loss = octavo.linear_cross_entropy(inputs[0], inputs[1], targets, inputs[2], recompute=recompute)
        first = torch.autograd.grad(loss, inputs, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(loss, inputs), strict=True))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_tokens_and_no_tokens_that_count_have_gradients_of_zero(reduction: Any) -> None:
    _, weight, bias, _ = operands()
    weight, bias = weight.requires_grad_(), bias.requires_grad_()
    for tokens in (0, 5):
        hidden, targets = torch.randn(tokens, FEATURES, requires_grad=True), torch.full((tokens,), -100)
        loss = octavo.linear_cross_entropy(hidden, weight, targets, bias, reduction=reduction, chunk_tokens=2)
        assert loss.shape == ((tokens,) if reduction == "none" else ())
        assert bool(loss.isnan().all()) if reduction == "mean" else not loss.any()
        for one in torch.autograd.grad(loss.sum(), (hidden, weight, bias)):
            assert not one.any()


def test_torch_autocast_says_what_the_products_run_in() -> None:
    hidden, weight, bias, targets = operands()
    hidden.requires_grad_()
    weight.requires_grad_()
    with torch.autocast("cpu", BF16):
        loss = octavo.linear_cross_entropy(hidden, weight, targets, bias, reduction="sum")
    dh, dw = torch.autograd.grad(loss, (hidden, weight))
    h, w = hidden.detach().to(BF16).requires_grad_(), weight.detach().to(BF16).requires_grad_()
    expected = octavo.linear_cross_entropy(h, w, targets, bias, reduction="sum")
    eh, ew = torch.autograd.grad(expected, (h, w))
    assert torch.equal(loss, expected)
    assert dh.dtype == dw.dtype == torch.float32
    assert torch.equal(dh, eh.float())
    # Those of a float32 weight are summed and kept in float32; rounded, they are the others.
    assert torch.equal(dw.to(BF16), ew)


@pytest.mark.parametrize(("reduction", "recompute"), [("sum", False), ("sum", True), ("none", False)])
def test_torch_autocast_rounds_no_gradient_of_a_float32_weight(reduction: Any, recompute: bool) -> None:
    """To the bit those of a hidden that has the dtype of the products already, in every chunk; backward inside too."""
    hidden, weight, _, targets = operands()
    hidden, weight = hidden.to(BF16), weight.requires_grad_()
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", BF16, enabled=enabled):
            loss = octavo.linear_cross_entropy(
                hidden, weight, targets, reduction=reduction, recompute=recompute, chunk_tokens=32
            )
            found += torch.autograd.grad(loss.sum(), weight)
    assert torch.equal(*found)
    assert not torch.equal(found[1], found[1].to(BF16).float())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_spoils_its_own_row_alone(bad: float) -> None:
    hidden, weight, bias, targets = operands()
    hidden.requires_grad_()
    rows = torch.randn(targets.shape)
    loss = octavo.linear_cross_entropy(hidden, weight, targets, bias, reduction="none", chunk_tokens=32)
    rows[0, 0] = 2 * rows.abs().max()  # the largest, whatever becomes of the other
    at, spoiled = (1, 7), rows.clone()
    spoiled[at] = bad
    (expected,) = torch.autograd.grad(loss, hidden, rows, retain_graph=True)
    (found,) = torch.autograd.grad(loss, hidden, spoiled)
    assert not found[at].isfinite().any()
    found[at] = expected[at]
    assert torch.equal(found, expected)


def test_a_second_derivative_is_refused() -> None:
    *inputs, targets = operands()
    inputs = [one.requires_grad_() for one in inputs]
    for recompute in (False, True):
        loss = octavo.linear_cross_entropy(inputs[0], inputs[1], targets, inputs[2], recompute=recompute)
        with pytest.raises(RuntimeError, match="create_graph=True asks for the gradient of a gradient"):
            torch.autograd.grad(loss, inputs, create_graph=True)


def test_bad_arguments_are_named() -> None:
    hidden, weight, bias, targets = operands()
    call = octavo.linear_cross_entropy
    with pytest.raises(ValueError, match=r"hidden has shape \(2, 50, 40\) and weight \(133, 39\)"):
        call(hidden, weight[:, :39], targets)
    with pytest.raises(ValueError, match=r"bias has shape \(7,\): expected one number a class, \(133,\)"):
        call(hidden, weight, targets, bias[:7])
    with pytest.raises(ValueError, match=r"targets have shape \(2, 49\) and hidden \(2, 50, 40\)"):
        call(hidden, weight, targets[:, 1:])
    with pytest.raises(ValueError, match=r"hidden is on cpu and weight on meta, bias on cpu: .*to_empty"):
        call(hidden, weight.to("meta"), targets, bias)
    with pytest.raises(ValueError, match=r"hidden is on cpu and weight on cpu, bias on meta: .*to_empty"):
        call(hidden, weight, targets, bias.to("meta"))
    with pytest.raises(ValueError, match=r"hidden and weight are on meta.*to_empty"):
        call(hidden.to("meta"), weight.to("meta"), targets.to("meta"))
    with pytest.raises(ValueError, match="chunk_tokens is 0: expected an integer of 1 or more, such as 2048"):
        call(hidden, weight, targets, chunk_tokens=0)
    with pytest.raises(ValueError, match=r"hidden is torch\.float64"):
        call(hidden.double(), weight.double(), targets)
    with pytest.raises(ValueError, match="reduction is 'avg'"):
        call(hidden, weight, targets, reduction="avg")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="targets hold 133: with 133 classes they are 0 to 132"):
        call(hidden, weight, targets.clamp(min=0) * 0 + 133, chunk_tokens=16)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_code_gives_the_same_bits_in_one_graph(reduction: Any) -> None:
    for chunk in (32, DEFAULT_CHUNK):

        def step(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int = chunk) -> Tensor:
            return octavo.linear_cross_entropy(hidden, weight, targets, reduction=reduction, chunk_tokens=chunk)

        function = torch.compile(step, fullgraph=True, backend="aot_eager")
        for tokens in (100, 70, 33):
            hidden, weight = torch.randn(tokens, FEATURES).to(BF16), torch.randn(CLASSES, FEATURES).to(BF16)
            targets, outcomes = torch.randint(0, CLASSES, (tokens,)), []
            for call in (step, function):
                leaves = [one.clone().requires_grad_() for one in (hidden, weight)]
                loss = call(*leaves, targets)
                outcomes.append([loss, *gradients(loss, None, leaves)])
            assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


@pytest.mark.slow
def test_compiled_code_of_one_chunk_serves_any_number_of_tokens() -> None:
    def step(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return octavo.linear_cross_entropy(hidden, weight, targets)

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = torch.compile(step, fullgraph=True, backend=counter)
    weight = torch.randn(CLASSES, FEATURES, requires_grad=True)
    for tokens in (100, 70, 33, 64, 90):
        function(torch.randn(tokens, FEATURES), weight, torch.randint(0, CLASSES, (tokens,))).backward()
    assert counter.frame_count == 2
