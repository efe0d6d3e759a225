"""Attention on FP8 units through the layer: what it costs, when it is taken, what is kept; the same bits every way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.measures import relative_error, sqnr_db
from tests.modules.attention_reference import allowed_pairs, attention_steps
from torch import Tensor

from octavo import DotProductAttention
from octavo.functional.attention import NOTHING, Attention, Extras
from octavo.functional.attention_mask import mask_rules
from octavo.functional.fp8_attention import fp8_attention, fp8_reasons

BF16 = torch.bfloat16
H, G, D = 4, 2, 64
# Decibels of o, dq, dk, dv: the table of docs/layers/dot_product_attention.md.
MEASURED = {
    ("normal", True): (27.3, 26.0, 26.0, 30.4),
    ("normal", False): (25.7, 25.4, 25.3, 28.3),
    ("outliers", True): (25.6, 23.2, 24.7, 26.9),
    ("outliers", False): (23.3, 20.8, 22.8, 23.8),
}


def drawn(kind: str, *shape: int, device: str = "cpu") -> Tensor:
    """N(0, 1); or with one value in a thousand of N(0, 100) added, as FlashAttention-3 was measured with."""
    x = torch.randn(shape)
    if kind == "outliers":
        x = x + 10 * torch.randn(shape) * (torch.rand(shape) < 0.001)
    return x.to(device, BF16)


def decibels(kind: str, causal: bool, device: str = "cpu") -> list[float]:
    """SQNR against float64 on the same bf16 operands, 2 sequences of 4 heads, 128 tokens, 64 features."""
    torch.manual_seed(0)
    leaves = [drawn(kind, 2, 4, 128, 64, device=device).requires_grad_() for _ in range(3)]
    dy = torch.randn(2, 4, 128, 64).to(device, BF16)
    exact = [x.detach().double().cpu().requires_grad_() for x in leaves]
    name = "causal" if causal else "no_mask"
    allowed = allowed_pairs(name, None, (1, 128, 128))
    reference, _ = attention_steps(exact[0], exact[1], exact[2], allowed)
    reference.backward(dy.double().cpu())
    out = fp8_attention(leaves[0], leaves[1], leaves[2], Attention(mask_rules(name), 64**-0.5))
    out.backward(dy)
    measured = [sqnr_db(reference, out)]
    measured += [sqnr_db(one.grad, other.grad) for one, other in zip(exact, leaves, strict=True)]  # type: ignore[arg-type]
    return measured


@pytest.mark.parametrize(("kind", "causal"), MEASURED, ids=str)
def test_it_costs_what_the_page_says(kind: str, causal: bool) -> None:
    """Four casts, of which that of probabilities is the smallest part: each is 31.5 dB or better, less for outliers."""
    assert decibels(kind, causal) == pytest.approx(MEASURED[kind, causal], abs=0.5)


def operands(num_queries: int, num_keys: int, dtype: torch.dtype = BF16) -> list[Tensor]:
    """[B, S, heads, D]"""
    return [torch.randn(2, n, heads, D, dtype=dtype) for n, heads in ((num_queries, H), (num_keys, G), (num_keys, G))]


def run(layer: Any, qkv: list[Tensor], dy: Tensor, **call: Any) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    out = layer(*leaves, **call)
    out.backward(dy)
    return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]


def layer_of(mask_type: str = "causal", **options: Any) -> DotProductAttention:
    return DotProductAttention(H, D, G, qkv_format="bshd", attn_mask_type=mask_type, fp8_attention=True, **options)


@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "causal_bottom_right"])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(60, 60), (60, 150), (150, 60)])
def test_the_layer_attends_as_its_mask_says(mask_type: str, num_queries: int, num_keys: int) -> None:
    """Far nearer than another mask would be; and values that nobody looks at get a zero gradient."""
    qkv, dy = operands(num_queries, num_keys), torch.randn(2, num_queries, H * D, dtype=BF16)
    layer = layer_of(mask_type)
    found = run(layer, qkv, dy)
    leaves = [x.double().requires_grad_() for x in qkv]
    allowed = allowed_pairs(mask_type, None, (2, num_queries, num_keys))
    exact, _ = attention_steps(*(x.transpose(1, 2) for x in leaves), allowed)
    exact.transpose(1, 2).flatten(-2).backward(dy.double())
    expected = [exact.transpose(1, 2).flatten(-2), *(leaf.grad for leaf in leaves)]
    for one, other in zip(expected, found, strict=True):
        # 24 dB and more, by the page.
        assert relative_error(one, other) < 0.063  # type: ignore[arg-type]
    unseen = ~allowed[0, 0].any(0)
    assert not found[3][:, unseen].any()
    assert not found[2][:, unseen].any()
    emulated = mask_type == "causal" and num_queries > num_keys
    assert ("operands emulated (causal at the top left of" in layer.way(*qkv)) == emulated


def test_formats_and_recomputation_give_the_same_bits() -> None:
    qkv, dy = operands(140, 140), torch.randn(2, 140, H * D, dtype=BF16)
    layer = layer_of()
    expected = run(layer, qkv, dy)
    flipped = run(layer, [x.transpose(0, 1) for x in qkv], dy.transpose(0, 1), qkv_format="sbhd")
    again = run(layer, qkv, dy, checkpoint_core_attention=True)
    together = torch.cat(qkv, 2)
    fused = run(layer, [x.detach() for x in together.split((H, G, G), 2)], dy)
    for one, flip, *others in zip(expected, flipped, again, fused, strict=True):
        assert torch.equal(one, flip.transpose(0, 1))
        assert all(torch.equal(one, other) for other in others)
    # Sequences of a batch know nothing of one another.
    halves = [run(layer, [x[b : b + 1] for x in qkv], dy[b : b + 1]) for b in range(2)]
    for one, *parts in zip(expected, *halves, strict=True):
        assert torch.equal(one, torch.cat(parts))


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiled_in_one_graph_with_the_same_bits(dynamic: bool) -> None:
    torch._dynamo.reset()
    # Another scale than the usual one, and two lengths.
    layer = layer_of(softmax_scale=0.1)
    compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (40, 130):
        qkv, dy = operands(tokens, tokens), torch.randn(2, tokens, H * D, dtype=BF16)
        for one, other in zip(run(layer, qkv, dy), run(compiled, qkv, dy), strict=True):
            assert torch.equal(one, other)


def test_under_autocast_operands_are_of_its_dtype() -> None:
    qkv, dy = operands(50, 50, torch.float32), torch.randn(2, 50, H * D)
    layer = layer_of()
    with torch.autocast("cpu", BF16):
        out = layer(*qkv)
        assert "FP8 products" in layer.way(*qkv)
    assert out.dtype is BF16
    assert torch.equal(out, layer(*(x.bfloat16() for x in qkv)))
    assert "torch.float32: FP8 products are of bfloat16 or float16" in layer.way(*qkv)
    gradients = run(layer, [x.bfloat16() for x in qkv], dy.bfloat16())[1:]
    leaves = [x.requires_grad_() for x in qkv]
    with torch.autocast("cpu", BF16):
        layer(*leaves).backward(dy.bfloat16())
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert leaf.grad.dtype is torch.float32  # type: ignore[union-attr]
        assert torch.equal(leaf.grad, gradient.float())  # type: ignore[arg-type]


def test_codes_are_what_is_kept_for_the_backward() -> None:
    qkv = [x.requires_grad_() for x in operands(256, 256)]
    seen: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        layer_of()(*qkv)
    tokens, scales = 2 * 256, 2 * 2 * (H + 2 * G) * 4
    # Codes and scales, o in bf16, lse.
    assert sum(seen.values()) == tokens * (H + 2 * G) * D + scales + tokens * H * (2 * D + 4)


NATIVE = Attention(mask_rules("causal"), 0.125)
REFUSED: list[tuple[Attention, Extras, str]] = [
    (NATIVE._replace(dropout=0.1), NOTHING, "attention dropout"),
    (NATIVE._replace(scale=-1.0), NOTHING, "a softmax scale of -1.0: FP8 products take one above 0"),
    (NATIVE._replace(rules=mask_rules("causal", (5, 0))), NOTHING, "a sliding window"),
    (NATIVE._replace(rules=mask_rules("no_mask", (-1, 3))), NOTHING, "a sliding window"),
    (NATIVE._replace(rules=mask_rules("arbitrary")), NOTHING, "attn_mask_type='arbitrary'"),
    (NATIVE, Extras(slopes=torch.ones(H)), "a mask, a bias or ALiBi"),
    (NATIVE, Extras(bias=torch.ones(1)), "a mask, a bias or ALiBi"),
]


@pytest.mark.parametrize(("setup", "extras", "reason"), REFUSED)
def test_what_is_not_computed_so_has_a_reason(setup: Attention, extras: Extras, reason: str) -> None:
    q, k, v = (x.transpose(1, 2) for x in operands(9, 9))
    assert fp8_reasons(q, k, v, NATIVE, NOTHING) == []
    assert fp8_reasons(q, k, v, setup, extras) == [reason]


def test_the_layer_says_which_way_it_goes() -> None:
    assert "FP8 products" in repr(layer_of())
    assert "FP8 operands (emulated)" in repr(layer_of("padding"))
    assert "FP8 operands (emulated)" in repr(layer_of(window_size=(4, 0)))
    assert "FP8 operands (emulated)" in repr(DotProductAttention(H, 80, fp8_attention=True))
    assert "FP8 operands (emulated)" in repr(DotProductAttention(H, (64, 128), fp8_attention=True))
    assert "FP8 operands (emulated)" in repr(DotProductAttention(H, D, qkv_format="thd", fp8_attention=True))
    assert "FP8" not in repr(DotProductAttention(H, D))
    qkv = operands(9, 9)
    assert layer_of().way(*qkv).startswith("FP8 products, emulated (the tensor is on cpu")
    dropping = layer_of(attention_dropout=0.1)
    assert dropping.way(*qkv).endswith(", FP8 operands emulated (attention dropout)")
    assert "FP8 products" in dropping.eval().way(*qkv)
    # Behind a cache operands are cast one token's head at a time, as ever: other codes, other bits.
    plain = layer_of()(*qkv)
    assert not torch.equal(layer_of()(*qkv, after_cache=True), plain)


def test_there_is_no_gradient_of_a_gradient() -> None:
    qkv = [x.requires_grad_() for x in operands(9, 9)]
    with pytest.raises(RuntimeError, match=r"create_graph=True .* use fp8_attention=False here"):
        torch.autograd.grad(layer_of()(*qkv).sum(), qkv, create_graph=True)
