"""Fused layers on a GPU, where kernels cast what they compute; the definitions hold on any device elsewhere."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.measures import relative_error
from tests.modules.compositions import (
    BF16,
    BIG,
    RECIPES,
    Composition,
    assert_same_steps,
    every_layer,
    jittered,
    state_of,
    steps,
    under,
)

import octavo


@pytest.mark.gpu
@every_layer
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("recipe", ["current", "rowwise", "block", "none"])
def test_on_a_gpu_the_bits_of_the_separate_layers(recipe: str, normalization: str, kind: str) -> None:
    """Where n is not cast by the kernel that normalises: statistics are then those of the separate layer."""
    layer = jittered(BIG[kind](normalization=normalization)).cuda()
    inputs = [x.cuda() for x in steps(2, 100, 512, dtype=BF16)]
    assert_same_steps(layer, Composition(layer).cuda(), RECIPES[recipe], inputs)


@pytest.mark.gpu
@every_layer
@pytest.mark.parametrize("recipe", ["delayed, measured first", "static"])
def test_on_a_gpu_known_scales_are_as_close(recipe: str, kind: str) -> None:
    """The kernel that casts sums a row in another order: a few of n's codes may be the neighbouring one."""
    layer = jittered(BIG[kind]()).cuda()
    composed = Composition(layer).cuda()
    for x in steps(2, 100, 512, dtype=BF16):
        outcomes = []
        for model in (layer, composed):
            leaf = x.cuda().requires_grad_()
            with under(RECIPES[recipe]):
                out = model(leaf)
            y = out[0] if isinstance(out, tuple) else out
            y.float().square().sum().backward()
            outcomes.append([y, leaf.grad, *(p.grad for p in model.parameters())])
            model.zero_grad()
        # One code in 10^4 an eighth of itself away is 1.3e-3 of the norm; bf16 rounds to 2^-9.
        assert all(relative_error(b, a) < 0.005 for a, b in zip(*outcomes, strict=True))


@pytest.mark.gpu
@every_layer
@pytest.mark.parametrize("recipe", ["delayed", "current", "static"])
def test_on_a_gpu_inside_a_cuda_graph(recipe: str, kind: str) -> None:
    layer = jittered(BIG[kind](recipe=RECIPES[recipe])).cuda()
    eager = copy.deepcopy(layer)
    graphed = octavo.make_graphed_callables(copy.deepcopy(layer), (torch.randn(64, 512, device="cuda").to(BF16),))
    for x in steps(64, 512, dtype=BF16):
        outcomes = []
        for model in (eager, graphed):
            y = model(x.cuda())
            y.float().square().sum().backward()
            results = [y.clone(), *(p.grad.clone() for p in model.parameters())]
            octavo.update_scales(model)  # before it, the histories of a layer that is not graphed have no length yet
            outcomes.append([*results, *state_of(model)])
            model.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
