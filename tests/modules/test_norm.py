"""octavo.LayerNorm and octavo.RMSNorm: torch's layers, rounded once; a zero-centred weight."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.measures import relative_error
from torch import Tensor, nn

import octavo

BF16 = torch.bfloat16
PAIRS: dict[str, tuple[Any, Any]] = {"layer": (octavo.LayerNorm, nn.LayerNorm), "rms": (octavo.RMSNorm, nn.RMSNorm)}
both = pytest.mark.parametrize("kind", PAIRS)


def jittered(layer: Any) -> Any:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return layer


@both
def test_it_is_torchs_layer(kind: str) -> None:
    ours, theirs = (make(48, 1e-6) for make in PAIRS[kind])
    assert isinstance(ours, PAIRS[kind][1])
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert repr(ours) == repr(theirs)
    theirs.load_state_dict(jittered(ours).state_dict())
    x, dy = torch.randn(20, 48), torch.randn(20, 48)
    outcomes = []
    for layer in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(dy)
        outcomes.append([y, leaf.grad, *(p.grad for p in layer.parameters())])
    # Both in float32: sums of 48 (20) terms, each a few roundings of 2^-24 off; 64 of them at most.
    assert all(relative_error(b, a) < 64 * 2.0**-24 for a, b in zip(*outcomes, strict=True))


@both
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_half_precision_is_float32_rounded_once(dtype: torch.dtype, kind: str) -> None:
    layer = jittered(PAIRS[kind][0](50))
    x, dy = torch.randn(9, 50).to(dtype), torch.randn(9, 50).to(dtype)
    exact, rounded = x.float().requires_grad_(), x.clone().requires_grad_()
    other = copy.deepcopy(layer)
    expected = layer(exact)
    expected.backward(dy.float())
    y = other(rounded)
    y.backward(dy)
    assert torch.equal(y, expected.to(dtype))
    assert torch.equal(rounded.grad, exact.grad.to(dtype))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(layer.parameters(), other.parameters(), strict=True))
    assert y.dtype == dtype, "the dtype of the input, whatever that of the parameters"


@both
def test_a_zero_centred_weight_begins_at_zero_and_scales_by_one_more(kind: str) -> None:
    centred, usual = PAIRS[kind][0](48, zero_centered_gamma=True), PAIRS[kind][0](48)
    assert bool((centred.weight == 0).all())
    x = torch.randn(7, 48)
    assert torch.equal(centred(x), usual(x))
    with torch.no_grad():
        # Exact in float32, so that 1 + weight is.
        centred.weight.copy_(torch.randint(-8, 8, (48,)) / 16)
        usual.weight.copy_(centred.weight + 1)
    outcomes = []
    for layer in (centred, usual):
        leaf = x.clone().requires_grad_()
        layer(leaf).pow(3).sum().backward()
        outcomes.append([leaf.grad, *(p.grad for p in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    assert "zero_centered_gamma=True" in repr(centred)
    centred.reset_parameters()
    assert bool((centred.weight == 0).all())


@both
@pytest.mark.parametrize("options", [{"elementwise_affine": False}, {"bias": False}], ids=str)
def test_no_affine_and_no_bias(options: dict[str, Any], kind: str) -> None:
    if kind == "rms" and "bias" in options:
        options = {}  # it never has one
    ours, theirs = (make(33, 1e-5, **options) for make in PAIRS[kind])
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    x = torch.randn(4, 33, requires_grad=True)
    y = ours(x)
    y.sum().backward()
    assert relative_error(theirs(x), y) < 64 * 2.0**-24


@both
@pytest.mark.parametrize("shape", [(1, 48), (0, 48), (2, 0, 48), (48,), (2, 3, 48)], ids=str)
def test_any_number_of_rows(shape: tuple[int, ...], kind: str) -> None:
    layer, x = jittered(PAIRS[kind][0](48)), torch.randn(shape, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape
    with torch.no_grad():
        assert torch.equal(layer(x), y)
        rows = x.reshape(-1, 48)
        assert torch.equal(layer(rows).reshape(shape), y)


@both
@pytest.mark.parametrize("width", [1, 2, 7, 1000])
def test_any_width(width: int, kind: str) -> None:
    ours, theirs = (make(width, 1e-5) for make in PAIRS[kind])
    x = torch.randn(5, width)
    # LayerNorm of one column is 0 for both.
    assert torch.allclose(ours(x), theirs(x), rtol=64 * 2.0**-24, atol=1e-6)


@both
def test_a_shape_of_several_dimensions(kind: str) -> None:
    ours, theirs = (make((4, 6), 1e-5) for make in PAIRS[kind])
    theirs.load_state_dict(jittered(ours).state_dict())
    x = torch.randn(3, 5, 4, 6)
    outcomes = []
    for layer in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.pow(3).sum().backward()
        outcomes.append([y, leaf.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*outcomes, strict=True):
        assert a.shape == b.shape
        assert relative_error(b, a) < 256 * 2.0**-24, "15 rows of 24, cubed"


@both
def test_torch_autocast_hands_on_its_dtype(kind: str) -> None:
    layer = PAIRS[kind][0](48)
    for dtype in (torch.float32, BF16):
        x = torch.randn(5, 48).to(dtype).requires_grad_()
        with torch.autocast("cpu", BF16):
            y = layer(x)
        y.sum().backward()
        assert y.dtype == BF16
        assert x.grad.dtype == dtype
        assert torch.equal(y, layer(x).to(BF16)), "the statistics are those of the input as it came"


@both
def test_float64_stays_float64_and_has_second_derivatives(kind: str) -> None:
    layer = jittered(PAIRS[kind][0](6, dtype=torch.float64))
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *p: layer(x), (x, *layer.parameters()))
    assert torch.autograd.gradgradcheck(layer, (x,))
    single = torch.randn(3, 6, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph=True asks for the gradient of a gradient"):
        torch.autograd.grad(layer.float()(single).pow(3).sum(), single, create_graph=True)


@both
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(value: float, kind: str) -> None:
    layer, x = PAIRS[kind][0](16), torch.randn(4, 16)
    x[1, 3] = value
    leaf = x.requires_grad_()
    y = layer(leaf)
    y.sum().backward()
    for result in (y, leaf.grad):
        assert bool(result[[0, 2, 3]].isfinite().all())
        assert bool(result[1].isnan().any())


@both
def test_memory_kept_for_the_backward(kind: str) -> None:
    layer, x = PAIRS[kind][0](64, dtype=BF16), torch.randn(10, 64, dtype=BF16, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    own = [t for t in kept if t.data_ptr() not in (x.data_ptr(), layer.weight.data_ptr())]
    assert sum(t.numel() * t.element_size() for t in own) == 10 * (8 if kind == "layer" else 4)
    assert any(t.data_ptr() == x.data_ptr() for t in kept)


@both
def test_compiled_code_gives_the_same_bits(kind: str) -> None:
    torch._dynamo.reset()
    layer = jittered(PAIRS[kind][0](33))
    other = copy.deepcopy(layer)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    for rows in (5, 16, 7):
        x = torch.randn(2, rows, 33)
        outcomes = []
        for run, module in ((layer, layer), (compiled, other)):
            leaf = x.clone().requires_grad_()
            y = run(leaf)
            y.square().sum().backward()
            outcomes.append([y, leaf.grad, *(p.grad for p in module.parameters())])
            module.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


@both
def test_wrong_inputs_and_options_are_named(kind: str) -> None:
    make = PAIRS[kind][0]
    with pytest.raises(ValueError, match=r"shape \(4, 47\): its last dimensions must be normalized_shape = \[48\]"):
        make(48)(torch.randn(4, 47))
    with pytest.raises(ValueError, match=r"dtype torch\.int64 and shape \(4, 48\): a normalisation takes a floating"):
        make(48)(torch.ones(4, 48, dtype=torch.int64))
    with pytest.raises(ValueError, match="eps is None: it must be a number, 0 or positive, such as 1e-5"):
        make(48, eps=None)
