"""Fused structures natively on a GPU: the kernels that run, the bits of eager code, the compiler, and what it saves."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from tests.conversion.known_models import MODELS, decoder, logits, loss_of, timm_vit, with_octavos_parts
from tests.measures import relative_error, sqnr_db
from torch import Tensor, nn

import octavo
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling

pytestmark = pytest.mark.gpu
transformers = pytest.importorskip("transformers")
BF16 = torch.bfloat16
RECIPES: dict[str, Recipe] = {
    "current": CurrentScaling(),
    "delayed": DelayedScaling(amax_history_len=4),
    "row": RowwiseScaling(),
    "block": BlockScaling(),
}


def pair(name: str, recipe: Recipe, layers: int = 1) -> tuple[nn.Module, nn.Module]:
    """A fused model, and one whose parts are Octavo's own, one by one."""
    model = (timm_vit if name == "timm" else MODELS[name])(layers).to("cuda")
    separate = with_octavos_parts(copy.deepcopy(model))
    assert octavo.convert(model, recipe, filter="all").fused
    octavo.convert(separate, recipe, filter="all", fuse=False)
    return model, separate


def step(model: nn.Module, seed: int, autocast: bool = True) -> list[Tensor]:
    model.zero_grad()
    with torch.autocast("cuda", BF16, enabled=autocast):
        loss = loss_of(model, seed)
    loss.backward()
    octavo.update_scales(model)
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", [*MODELS, "timm"])
def test_every_model_trains_natively_as_its_parts_one_by_one(name: str, recipe: str) -> None:
    """Statistics of a row are sums in another order where a normalisation writes codes; a few codes differ by that."""
    if name == "timm":
        pytest.importorskip("timm")
    model, separate = pair(name, RECIPES[recipe])
    for seed in range(3):
        with octavo.count_gemms() as mine:
            found = step(model, seed)
        with octavo.count_gemms() as theirs:
            expected = step(separate, seed)
        assert mine.fp8 == theirs.fp8 > 0
        assert mine.by_layer() == theirs.by_layer()
        assert relative_error(expected[0], found[0]) < 0.02
        whole = [torch.cat([g.float().flatten() for g in grads[1:]]) for grads in (expected, found)]
        # FP8's own noise against bf16 is 20 to 26 dB; a few codes that differ are some dB less than all of them.
        assert sqnr_db(*whole) > 20


def mlps(kind: str = "Llama", width: int = 512, recipe: str = "delayed") -> tuple[Any, Any]:
    """The MLP of a wide layer, fused and with Octavo's activation one by one, in bf16."""
    config = transformers.LlamaConfig(hidden_size=width, intermediate_size=2 * width, num_hidden_layers=1)
    from transformers.models.llama.modeling_llama import LlamaMLP

    model = LlamaMLP(config).to("cuda")
    separate = with_octavos_parts(copy.deepcopy(model))
    for one, fuse in ((model, True), (separate, False)):
        octavo.convert(one, RECIPES[recipe], filter="all", fuse=fuse)
    return model, separate


def outputs(mlp: Any, x: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    mlp.zero_grad()
    y = mlp(x)
    y.backward(dy.to(y.dtype))
    octavo.update_scales(mlp)
    return [y.detach(), x.grad, *(p.grad.clone() for p in mlp.parameters())]


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_a_gated_mlp_in_float32_has_nearly_the_bits_of_its_parts(recipe: str) -> None:
    """The same function of the same float32 numbers; between kernels a product may be fused with a sum."""
    model, separate = mlps(recipe=recipe)
    for seed in range(4):
        torch.manual_seed(seed)
        x, dy = torch.randn(3, 300, 512, device="cuda"), torch.randn(3, 300, 512, device="cuda")
        for a, b in zip(outputs(model, x, dy), outputs(separate, x, dy), strict=True):
            assert sqnr_db(b, a) > 45


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_the_native_kernels_run(recipe: str) -> None:
    model, _ = mlps(recipe=recipe)
    x, dy = (torch.randn(512, 512, device="cuda", dtype=BF16) for _ in range(2))
    model.to(BF16)
    for _ in range(3):
        outputs(model, x, dy)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiled:
        outputs(model, x, dy)
        torch.cuda.synchronize()
    names = {event.key for event in profiled.key_averages()}
    wanted = {"delayed": "gated_{}cast_kernel", "current": "gated_{}output_kernel"}[recipe]
    for kernel in (wanted.format(""), wanted.format("backward_")):
        assert any(kernel in name for name in names), sorted(names)
    assert not any("silu" in name.lower() for name in names), sorted(names)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
@pytest.mark.parametrize("recipe", ["current", "delayed", "row"])
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "ViT"])
def test_compiled_by_inductor_in_one_graph(name: str, recipe: str) -> None:
    """As close to eager code as roundings in another order allow: the compiler fuses what is around the products."""
    model, _ = pair(name, RECIPES[recipe])
    eager = copy.deepcopy(model)
    torch._dynamo.reset()
    block = {"Llama": lambda m: m.model.layers, "GPT-2": lambda m: m.transformer.h, "ViT": lambda m: m.vit.layers
             if hasattr(m.vit, "layers") else m.vit.encoder.layer}[name](model)  # fmt: skip
    block[0].compile(fullgraph=True)
    for seed in range(3):
        found, expected = step(model, seed), step(eager, seed)
        assert relative_error(expected[0], found[0]) < 0.02
        whole = [torch.cat([g.float().flatten() for g in grads[1:]]) for grads in (expected, found)]
        assert sqnr_db(*whole) > 18


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_a_compiled_gated_mlp_gives_the_bits_of_eager_code(recipe: str) -> None:
    model, _ = mlps(recipe=recipe)
    model.to(BF16)
    eager = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    for seed in range(4):
        torch.manual_seed(seed)
        x, dy = (torch.randn(320, 512, device="cuda", dtype=BF16) for _ in range(2))
        found, expected = [], []
        for mlp, module, results in ((compiled, model, found), (eager, eager, expected)):
            own = x.clone().requires_grad_()
            module.zero_grad()
            y = mlp(own)
            y.backward(dy)
            octavo.update_scales(module)
            results += [y.detach(), own.grad, *(p.grad.clone() for p in module.parameters())]
        for place, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(a, b), (seed, place, relative_error(b, a))


def test_a_step_is_captured_into_a_cuda_graph() -> None:
    model, _ = pair("Llama", DelayedScaling(amax_history_len=4))
    model.to(BF16)
    layer: Any = model.model.layers[0]  # type: ignore[union-attr,index]
    mlp = layer.mlp

    def run(x: Tensor) -> Tensor:
        return mlp(layer.post_attention_layernorm(x))

    x = torch.randn(2, 16, 32, device="cuda", dtype=BF16, requires_grad=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(x).square().sum().backward()
            octavo.update_scales(model)
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad()
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(x)
        y.square().sum().backward()
    graph.replay()
    expected_y, seen = y.clone(), x.grad.clone()  # type: ignore[union-attr]
    x.grad = None
    again = run(x)
    again.square().sum().backward()
    assert torch.equal(again, expected_y)
    assert torch.equal(x.grad, seen)  # type: ignore[arg-type]


def test_less_memory_is_taken_than_one_by_one() -> None:
    """A layer of Llama's proportions, a forward with what it keeps: f(gate) and a in bf16 are not there."""
    peaks = {}
    for fuse in (False, True):
        torch.manual_seed(0)
        model: Any = (
            decoder("Llama", 1)
            .model.layers[0]
            .mlp.__class__(transformers.LlamaConfig(hidden_size=1024, intermediate_size=4096))
            .to("cuda", BF16)
        )
        octavo.convert(model, CurrentScaling(), filter="all", fuse=fuse)
        x = torch.randn(4096, 1024, device="cuda", dtype=BF16, requires_grad=True)
        model(x).sum().backward()
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = model(x)
        torch.cuda.synchronize()
        peaks[fuse] = torch.cuda.memory_allocated() - before
        del y, model, x
        torch.cuda.empty_cache()
    # f(gate), 2 bytes an element: of 4096 tokens and 4096 features 32 MiB, give or take a scale.
    assert peaks[False] - peaks[True] >= 0.99 * 4096 * 4096 * 2, peaks


def test_logits_without_gradients() -> None:
    for recipe in RECIPES.values():
        model, separate = pair("Llama", recipe)
        with torch.no_grad():
            assert relative_error(logits(separate), logits(model)) < 0.02
        with torch.inference_mode():
            assert logits(model).isfinite().all()
