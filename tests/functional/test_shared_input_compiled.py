"""Query, key and value under the compiler cast their input once, with the kernels of a GPU too.

Without a GPU the graphs are the same, see `tests.kernels.traced_launches`; there the reference of each kernel runs it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="kernels are Triton's")

from tests.kernels.traced_launches import Compiled, take_kernels_everywhere

import octavo
from octavo.kernels import repeated_launches
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling

RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=4),
    "delayed, input kept": DelayedScaling(amax_history_len=4, saved_input="high_precision"),
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "block": BlockScaling(),
}
# One of the input, one of each weight, one of each gradient; and where the input is kept, one more for each layer.
CASTS = {"delayed, input kept": 7 + 3}
TOKENS, WIDTH = 48, 128
CAST_KERNELS = ("cast_transpose_kernel", "block_cast_kernel", "packed_block_cast_kernel")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.q_proj(x) * self.k_proj(x) + self.v_proj(x)


class Apart(Attention):
    """Nothing that Inductor would fuse and round once, where eager code rounds twice."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)


class Checkpointed(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Updated(Attention):
    """The update at the end of a forward, which for gradients is that of the step before."""

    def forward(self, x: Tensor) -> Tensor:
        with octavo.autocast(recipe=self.q_proj.recipe):
            return super().forward(x)


class Run:
    """Steps of a layer, with an update after each."""

    def __init__(self, recipe: Recipe, device: str, compiler: Any = None, layer: type[Attention] = Attention) -> None:
        torch.manual_seed(0)
        self.model = layer().to(device)
        octavo.convert(self.model, recipe=recipe, filter="all")
        self.device = device
        self.run = self.model if compiler is None else torch.compile(self.model, backend=compiler, fullgraph=True)

    def step(self, number: int) -> list[Tensor]:
        """Output, gradients and all of the delayed state."""
        torch.manual_seed(number)
        x = (torch.randn(2, TOKENS // 2, WIDTH) * 1.5**number).to(self.device).requires_grad_()
        with torch.autocast(self.device, torch.bfloat16):
            y = self.run(x)
        # Of integers, so that sums of them do not depend on their order.
        y.backward(torch.randint(-4, 5, y.shape).to(y))
        if not isinstance(self.model, Updated):
            octavo.update_scales(self.model)
        seen = [y.detach().clone(), x.grad, *(p.grad.clone() for p in self.model.parameters())]
        for layer in (self.model.q_proj, self.model.k_proj, self.model.v_proj):
            for operand in layer.delayed_state.operands:
                seen += [operand.scale.clone(), operand.history.clone(), operand.gathered.clone()]
        self.model.zero_grad()
        return seen


def cast_launches(backend: Compiled) -> int:
    return sum(backend.launches[kernel] for kernel in CAST_KERNELS)


@pytest.fixture
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    take_kernels_everywhere(monkeypatch)


@pytest.mark.parametrize("name", RECIPES)
def test_compiled_siblings_cast_their_input_once_and_keep_it_once(name: str, kernels_everywhere: None) -> None:
    backend = Compiled()
    eager, compiled = Run(RECIPES[name], "cpu"), Run(RECIPES[name], "cpu", backend)
    for number in range(4):
        before, graphs = backend.launches.copy(), backend.graphs
        for part, (a, b) in enumerate(zip(eager.step(number), compiled.step(number), strict=True)):
            assert torch.equal(a, b), f"step {number}, part {part}"
        if backend.graphs > graphs:
            made = backend.launches - before
            assert sum(made[kernel] for kernel in CAST_KERNELS) == CASTS.get(name, 7)
    assert backend.graphs <= 2, "delayed scaling measures first, and then knows its scales"
    assert backend.clones == 0
    # Codes of the input once, unless it is kept as it is, and of three weights; the block recipe fills up to 128.
    tokens = 0 if name == "delayed, input kept" else 128 if name == "block" else TOKENS
    assert backend.kept_codes == backend.graphs * WIDTH * (tokens + 3 * WIDTH)


@pytest.mark.parametrize("name", ["current", "block"])
def test_siblings_of_any_number_of_tokens_cast_once_too(name: str, kernels_everywhere: None) -> None:
    backend = Compiled()
    eager, compiled = Run(RECIPES[name], "cpu").model, Run(RECIPES[name], "cpu").model
    run = torch.compile(compiled, backend=backend, fullgraph=True, dynamic=True)
    for tokens in (24, 40):
        x = torch.randn(tokens, WIDTH)
        for model in (eager, run):
            model(x).backward(torch.ones(tokens, WIDTH))
        for a, b in zip(eager.parameters(), compiled.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    assert backend.graphs == 1
    assert cast_launches(backend) == 7


def test_without_the_pass_they_do_not(kernels_everywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other test counts is what the pass leaves away."""
    monkeypatch.setattr(repeated_launches._Pass, "apply", lambda *_: 0)
    backend = Compiled()
    Run(CurrentScaling(), "cpu", backend).step(0)
    assert cast_launches(backend) == 9
    assert backend.kept_codes == WIDTH * 3 * (TOKENS + WIDTH)


@pytest.mark.parametrize("name", RECIPES)
def test_an_evaluation_casts_the_input_once(name: str, kernels_everywhere: None) -> None:
    backend = Compiled()
    compiled, eager = Run(RECIPES[name], "cpu", backend), Run(RECIPES[name], "cpu")
    x = torch.randn(2, 8, WIDTH)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled.run(x), eager.run(x))
    assert cast_launches(backend) == 4


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_a_recompute_casts_the_input_once_more(name: str, kernels_everywhere: None) -> None:
    backend = Compiled()
    eager, compiled = Run(RECIPES[name], "cpu"), Run(RECIPES[name], "cpu", backend, Checkpointed)
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        for number in range(3):
            for a, b in zip(eager.step(number), compiled.step(number), strict=True):
                assert torch.equal(a, b)
    # (Where its nodes carry no mark of the checkpoint, torch 2.11 keeps what a kernel wrote.)
    times = 1 if backend.kept_codes else 2
    # Input and weights in the forward and again in the backward, and three gradients.
    assert cast_launches(backend) == backend.graphs * (4 * times + 3)
    assert backend.kept_codes in (0, backend.graphs * WIDTH * (TOKENS + 3 * WIDTH))


def test_an_update_in_the_graph_sees_what_was_gathered_once(kernels_everywhere: None) -> None:
    backend = Compiled()
    eager, compiled = (Run(RECIPES["delayed"], "cpu", compiler, Updated) for compiler in (None, backend))
    for number in range(5):
        for part, (a, b) in enumerate(zip(eager.step(number), compiled.step(number), strict=True)):
            assert torch.equal(a, b), f"step {number}, part {part}"
    assert cast_launches(backend) == backend.graphs * 7


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["delayed", "block"])
def test_on_a_gpu_a_step_launches_seven_casts(name: str) -> None:
    torch._dynamo.reset()
    eager, compiled = Run(RECIPES[name], "cuda", layer=Apart), Run(RECIPES[name], "cuda", "inductor", Apart)
    for number in range(4):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            found = compiled.step(number)
            torch.cuda.synchronize()
        for a, b in zip(eager.step(number), found, strict=True):
            assert torch.equal(a, b)
    names = [event.name for event in profile.events()]
    assert sum("cast_transpose" in name or "block_cast" in name for name in names) == 7
