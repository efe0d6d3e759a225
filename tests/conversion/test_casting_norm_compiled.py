"""Fused normalisations in compiled code: the kernels a GPU runs (their references here), made again or kept."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from tests.conversion.known_models import llama, vit
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.conversion import casting_norm
from octavo.recipes import CurrentScaling, DelayedScaling, Recipe

KEPT, AGAIN = DelayedScaling(), DelayedScaling(saved_input="high_precision")


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casting_norm, "_has_kernels", lambda x: True)
    torch._dynamo.reset()


class Watched:
    """A backend that notes the operators of the backward, and the bytes that the forward keeps for it."""

    def __init__(self) -> None:
        self.kept_bytes = 0
        self.backward: list[str] = []

    def __call__(self, *args: Any) -> Any:
        return aot_autograd(
            fw_compiler=self._forward, bw_compiler=self._backward, partition_fn=min_cut_rematerialization_partition
        )(*args)

    def _forward(self, graph: Any, inputs: Any) -> Any:
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        self.kept_bytes = sum(node.meta["val"].nbytes for node in output.args[0] if hasattr(node, "meta"))
        return make_boxed_func(graph.forward)

    def _backward(self, graph: Any, inputs: Any) -> Any:
        targets = (str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        self.backward = [target.split(".")[1] for target in targets if target.startswith("octavo.")]
        return make_boxed_func(graph.forward)


def block_of(recipe: Recipe, build: Any = vit) -> nn.Module:
    """A block of a converted model whose scales are known."""
    torch.manual_seed(0)
    model = build(1).train()
    octavo.convert(model, recipe)
    block: nn.Module = model.vit.layers[0] if hasattr(model, "vit") else model.model.layers[0]
    return block


def gradients(run: Any, block: nn.Module, x: Tensor) -> list[Tensor]:
    """The output's dtype and every gradient of one step."""
    block.zero_grad()
    x.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        y = run(x)
    y = y[0] if isinstance(y, tuple) else y
    y.float().square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad.clone(), *(p.grad.clone() for p in block.parameters() if p.grad is not None)]


def known_scales(block: nn.Module, x: Tensor, run: Any = None) -> None:
    for _ in range(3):
        gradients(run or block, block, x)
        octavo.update_scales(block)


def beside(block: Any, x: Tensor) -> dict[str, Any]:
    """What a block takes beside x."""
    if not hasattr(block, "self_attn"):
        return {}
    angles = torch.arange(x.shape[1])[None, :, None] / 8 * torch.ones(block.self_attn.head_dim)
    return {"position_embeddings": (angles.cos().to(x.dtype), angles.sin().to(x.dtype))}


def width(block: nn.Module) -> int:
    return next(m for m in block.modules() if isinstance(m, casting_norm.CastingNorm)).weight.shape[0]


def test_what_is_made_again_is_not_kept_and_gives_the_same_bits() -> None:
    found, watched = [], []
    for recipe in (KEPT, AGAIN):
        torch._dynamo.reset()
        block, backend = block_of(recipe), Watched()
        x = torch.randn(2, 24, width(block)).requires_grad_()
        known_scales(block, x)
        run = torch.compile(block, backend=backend, fullgraph=True)
        found.append(gradients(run, block, x))
        watched.append(backend)
    kept, again = watched
    assert again.backward.count("norm_output") == 2
    assert kept.backward.count("norm_output") == 0
    assert kept.backward.count("norm_backward") == again.backward.count("norm_backward") == 2
    assert again.kept_bytes < kept.kept_bytes
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_inside_a_checkpoint_of_the_user() -> None:
    block = block_of(AGAIN)
    x = torch.randn(2, 24, width(block)).requires_grad_()
    known_scales(block, x)
    plain = gradients(torch.compile(block, backend="aot_eager", fullgraph=True), block, x)
    inside = torch.compile(lambda x: checkpoint(block, x, use_reentrant=False), backend="aot_eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(gradients(inside, block, x), plain, strict=True))


def test_made_again_by_the_policy_that_older_torch_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, block = Watched(), block_of(AGAIN)
    x = torch.randn(2, 24, width(block)).requires_grad_()
    known_scales(block, x)
    plain = gradients(torch.compile(block, backend="aot_eager", fullgraph=True), block, x)
    monkeypatch.setitem(casting_norm._POLICY, "context_fn", casting_norm._MUST)
    torch._dynamo.reset()
    found = gradients(torch.compile(block, backend=backend, fullgraph=True), block, x)
    assert backend.backward.count("norm_output") == 2
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_where_the_compiler_normalises_its_result_is_made_again_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casting_norm, "_has_kernels", lambda x: False)
    found, kept = [], []
    for made_again in (casting_norm._made_again_but_sums, lambda forward, x: forward(x)):
        torch._dynamo.reset()
        monkeypatch.setattr(casting_norm, "_made_again_but_sums", made_again)
        # In bf16 throughout: of float32 the compiler makes the cast to bf16 again by itself.
        block, backend = block_of(AGAIN, llama).bfloat16(), Watched()
        x = torch.randn(2, 24, width(block), dtype=torch.bfloat16).requires_grad_()
        run = functools.partial(block, **beside(block, x))
        known_scales(block, x, run)
        found.append(gradients(torch.compile(run, backend=backend, fullgraph=True), block, x))
        kept.append(backend.kept_bytes)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    # The outputs of both norms.
    assert kept[1] - kept[0] == 2 * x.nbytes


def test_where_the_compiler_normalises_inside_a_checkpoint_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casting_norm, "_has_kernels", lambda x: False)
    block = block_of(AGAIN, llama).bfloat16()
    x = torch.randn(2, 24, width(block), dtype=torch.bfloat16).requires_grad_()
    run = functools.partial(block, **beside(block, x))
    known_scales(block, x, run)
    plain = gradients(torch.compile(run, backend="aot_eager", fullgraph=True), block, x)
    inside = torch.compile(lambda x: checkpoint(run, x, use_reentrant=False), backend="aot_eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(gradients(inside, block, x), plain, strict=True))


def test_frozen_weights_keep_nothing_to_make_again() -> None:
    block, backend = block_of(AGAIN), Watched()
    x = torch.randn(2, 24, width(block)).requires_grad_()
    known_scales(block, x)
    block.requires_grad_(False)
    gradients(torch.compile(block, backend=backend, fullgraph=True), block, x)
    assert backend.backward.count("norm_output") == 0
    assert backend.backward.count("norm_backward") == 2


def test_without_fp8_the_class_before_runs() -> None:
    block, backend = block_of(KEPT, llama), Watched()
    norms = [module for module in block.modules() if isinstance(module, casting_norm.CastingNorm)]
    assert len(norms) == 2
    x = torch.randn(2, 24, width(block)).requires_grad_()

    def run(x: Tensor) -> Tensor:
        return norms[0](x)

    with octavo.autocast(enabled=False):
        gradients(torch.compile(run, backend=backend, fullgraph=True), block, x)
    assert not backend.backward


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")
@pytest.mark.parametrize("strict", [False, True])
def test_exported_with_gradients_it_is_no_checkpoint(strict: bool) -> None:
    block = block_of(CurrentScaling(saved_input="high_precision"))
    x = torch.randn(2, 24, width(block))
    exported = torch.export.export(block, (x,), strict=strict).module()
    assert torch.equal(exported(x), block(x))
