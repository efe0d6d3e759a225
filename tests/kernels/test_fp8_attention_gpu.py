"""fp8_attention on a GPU: the twin against its reference, flash's gradients against the steps, graphs, no waiting."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.test_fp8_attention import (
    CASES,
    assert_agrees,
    assert_special,
    operands,
    special,
    tensor_core_rounding,
)
from tests.measures import relative_error
from torch import Tensor

from octavo import DotProductAttention
from octavo.kernels.fp8_attention import (
    attention_gradient_reference,
    fp8_attention,
    fp8_attention_gradient,
    unsupported_reasons,
)

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def native() -> None:
    """Skip where the reference is all there is."""
    reasons = unsupported_reasons(torch.empty(0, device="cuda"))
    if reasons:
        pytest.skip("; ".join(reasons))


@pytest.mark.parametrize(("num_queries", "num_keys", "features", "causal"), [*CASES, (1000, 1500, 128, True)])
def test_the_twin_agrees_with_its_reference(num_queries: int, num_keys: int, features: int, causal: bool) -> None:
    """Loud keys make scores three times as large as those of N(0, 1) data, and their rounding: 0.6 % times sqrt(3)."""
    for dtype in (BF16, torch.float16):
        inputs = operands(num_queries, num_keys, features, dtype, "cuda")
        found = fp8_attention(inputs[0], inputs[1], inputs[2], features**-0.5, causal)
        assert_agrees(found, inputs, causal, tensor_core_rounding(found[2], (num_queries, num_keys)), 0.015)


@pytest.mark.parametrize(("num_queries", "num_keys", "features", "causal"), [*CASES[1:], (1000, 1500, 128, True)])
def test_gradients_of_flash_are_those_of_the_steps(
    num_queries: int, num_keys: int, features: int, causal: bool
) -> None:
    """Flash rounds probabilities and their gradients to bf16, 2^-9 each, and its results; of one query more counts."""
    q, k, v = operands(num_queries, num_keys, features, BF16, "cuda")
    out, lse, codes = fp8_attention(q, k, v, features**-0.5, causal)
    dy = torch.randn_like(out)
    found = fp8_attention_gradient(dy, codes, out, lse, num_keys, features**-0.5, causal)
    expected = attention_gradient_reference(dy, codes, out, lse, num_keys, features**-0.5, causal)
    for one, other in zip(expected, found, strict=True):
        assert other.dtype is BF16
        assert relative_error(one, other) < 2.0**-6


def test_what_is_not_finite_stays_where_it_is() -> None:
    assert_special(*fp8_attention(*special("cuda"), 0.125, True)[:2])


def step(layer: DotProductAttention, qkv: list[Tensor], dy: Tensor) -> list[Tensor]:
    out = layer(*qkv)
    return [out.detach(), *torch.autograd.grad(out, qkv, dy)]


def layer_and_operands(tokens: int) -> tuple[DotProductAttention, list[Tensor], Tensor]:
    layer = DotProductAttention(4, 64, 2, qkv_format="bshd", fp8_attention=True)
    qkv = [torch.randn(2, tokens, heads, 64, device="cuda", dtype=BF16).requires_grad_() for heads in (4, 2, 2)]
    return layer, qkv, torch.randn(2, tokens, 256, device="cuda", dtype=BF16)


def assert_same_step(found: list[Tensor], expected: list[Tensor]) -> None:
    """Bits of the result; of gradients to the order in which flash adds parts of dq."""
    assert torch.equal(found[0], expected[0])
    for one, other in zip(expected[1:], found[1:], strict=True):
        assert relative_error(one, other) < 2.0**-8


def test_nothing_waits_for_the_device() -> None:
    layer, qkv, dy = layer_and_operands(200)
    assert "by Octavo's kernel" in layer.way(*qkv)
    step(layer, qkv, dy)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    step(layer, qkv, dy)


def test_a_graph_of_it_reads_what_stands_there_when_it_is_replayed() -> None:
    layer, qkv, dy = layer_and_operands(200)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(layer, qkv, dy)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(layer, qkv, dy)
    with torch.no_grad():
        for x in qkv:
            x.copy_(torch.randn_like(x) * 2)
    graph.replay()
    assert_same_step(captured, step(layer, qkv, dy))


def test_compiled_by_inductor_in_one_graph() -> None:
    torch._dynamo.reset()
    layer, *_ = layer_and_operands(1)
    compiled = torch.compile(layer, fullgraph=True)
    for tokens in (200, 300):
        _, qkv, dy = layer_and_operands(tokens)
        assert_same_step(step(compiled, qkv, dy), step(layer, qkv, dy))
