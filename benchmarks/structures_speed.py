"""What fusion brings a transformer layer of `transformers`: its time one by one, fused, and with its MLP alone fused.

Forward and backward of one layer in bf16, wall time a step: eager, compiled as one block, and by replay of a CUDA graph
of the eager layer, which leaves the host out. Then the casts of a gated MLP as one kernel, against torch's operations
and Octavo's cast. Variants are interleaved; each figure is a median. Prints JSON, a line a figure.

    python benchmarks/structures_speed.py [--tokens 8192] [--repeats 15] [--small]
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import octavo
from octavo.conversion.casting_norm import CastingNorm
from octavo.conversion.fuse import unfuse
from octavo.formats import E4M3, E5M2
from octavo.kernels.cast_transpose import cast_transpose
from octavo.kernels.gated_backward_cast import gated_backward_cast
from octavo.kernels.gated_cast import gated_cast
from octavo.recipes import CurrentScaling, DelayedScaling

BF16 = torch.bfloat16
RECIPES = {"current": CurrentScaling(), "delayed": DelayedScaling(amax_history_len=16)}
# Hidden, ffn, heads.
SIZES = {"llama": (4096, 14336, 32), "vit": (1280, 5120, 16)}
SMALL = {"llama": (128, 256, 4), "vit": (128, 256, 4)}


def show(figures: dict[str, Any]) -> None:
    """A line of JSON."""
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


def layer_of(kind: str, sizes: tuple[int, int, int]) -> nn.Module:
    """Normalisation and MLP twice over, as a decoder has them; attention is no part of what is measured."""
    hidden, ffn, heads = sizes
    if kind == "llama":
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        config = transformers.LlamaConfig(hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads)
        return LlamaDecoderLayer(config, 0)
    from transformers.models.vit.modeling_vit import ViTLayer

    return ViTLayer(transformers.ViTConfig(hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads))


def run_of(kind: str, layer: Any) -> Callable[[Tensor], Tensor]:
    """Everything of a layer but attention's own products: both normalisations, q, k and v, and the MLP."""
    norms = (
        ("input_layernorm", "post_attention_layernorm") if kind == "llama" else ("layernorm_before", "layernorm_after")
    )
    first, second = (getattr(layer, name) for name in norms)
    attention = layer.self_attn if kind == "llama" else layer.attention
    if not hasattr(attention, "q_proj"):
        raise SystemExit("this version of transformers has a ViT of other parts")

    def run(x: Tensor) -> Tensor:
        n = first(x)
        q, k, v = attention.q_proj(n), attention.k_proj(n), attention.v_proj(n)
        x = x + attention.o_proj(q) + F.pad(k + v, (0, x.shape[-1] - k.shape[-1]))
        return x + layer.mlp(second(x))

    return run


def variants(kind: str, recipe: str, sizes: tuple[int, int, int]) -> dict[str, nn.Module]:
    """Copies of one layer: bf16, one by one, fused, and fused but for its normalisations."""
    base = layer_of(kind, sizes).to("cuda", BF16)
    made = {"bf16": base}
    for name in ("one by one", "fused", "MLP fused"):
        made[name] = copy.deepcopy(base)
        octavo.convert(made[name], RECIPES[recipe], filter="all", fuse=name != "one by one")
    for module in made["MLP fused"].modules():
        if isinstance(module, CastingNorm):
            unfuse(module)
    return made


def step_of(layer: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> Callable[[], None]:
    """A forward and its backward."""

    def step() -> None:
        x.grad = None
        layer.zero_grad()
        run(x).backward(dy)

    return step


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The replay of a step."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def medians(functions: dict[str, Callable[[], None]], repeats: int, inner: int = 5) -> dict[str, float]:
    """Milliseconds of each, interleaved."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(inner):
                function()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - begin) / inner * 1e3)
    return {name: round(statistics.median(values), 4) for name, values in times.items()}


def layers(kind: str, recipe: str, sizes: tuple[int, int, int], tokens: int, repeats: int) -> None:
    """The time of each variant, in each of the three ways."""
    made = variants(kind, recipe, sizes)
    x = torch.randn(1, tokens, sizes[0], device="cuda", dtype=BF16, requires_grad=True)
    dy = torch.randn_like(x)
    runs = {name: run_of(kind, layer) for name, layer in made.items()}
    steps = {name: step_of(layer, runs[name], x, dy) for name, layer in made.items()}
    for _ in range(3):  # until scales are known
        for name, layer in made.items():
            steps[name]()
            octavo.update_scales(layer)
    about = {"layer": kind, "recipe": recipe, "tokens": tokens}
    show({**about, "how": "eager", "ms": medians(steps, repeats)})
    graphs = {name: captured(step) for name, step in steps.items()}
    show({**about, "how": "graph replay", "ms": medians(graphs, repeats)})
    torch._dynamo.reset()
    compiled = {name: step_of(layer, torch.compile(runs[name], fullgraph=True), x, dy) for name, layer in made.items()}
    for step in compiled.values():
        step()
    show({**about, "how": "compiled", "ms": medians(compiled, repeats)})


def kernels(shape: tuple[int, int], repeats: int) -> None:
    """Rates in TB/s of bytes that must be moved, and the time of torch's operations with Octavo's cast."""
    gate, up, grad = (torch.randn(shape, device="cuda").to(BF16) for _ in range(3))
    scale, gathered = torch.tensor(0.02, device="cuda"), torch.zeros((), device="cuda")
    pair, both = (scale, scale.clone()), (gathered, gathered.clone())

    def forward() -> None:
        gated_cast(gate, up, "silu", E4M3, scale, through=BF16, gathered=gathered)

    def separate() -> None:
        cast_transpose(F.silu(gate) * up, E4M3, scale, scale, gathered=gathered)

    def backward() -> None:
        gated_backward_cast(grad, gate, up, "silu", E5M2, pair, through=BF16, gathered=both)

    def separate_backward() -> None:
        dup, dgate = grad * F.silu(gate), torch.ops.aten.silu_backward(grad * up, gate)
        for values, own, amax in zip((dgate, dup), pair, both, strict=True):
            cast_transpose(values, E5M2, own, own, gathered=amax, inf_to_nan=True)

    functions = {"gated_cast": forward, "silu, mul, cast": separate, "gated_backward_cast": backward,
                 "backward of mul and silu, two casts": separate_backward}  # fmt: skip
    for function in functions.values():
        function()
    found = medians(functions, repeats)
    elements = shape[0] * shape[1]
    rates = {"gated_cast": 6, "gated_backward_cast": 10}
    tera = {name: round(moved * elements / found[name] / 1e9, 3) for name, moved in rates.items()}
    show({"kernels": list(shape), "ms": found, "TB/s": tera})


def main() -> None:
    """Kernels, then layers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--small", action="store_true", help="small layers, to see that it runs")
    chosen = parser.parse_args()
    sizes = SMALL if chosen.small else SIZES
    for shape in ((1024, 256),) if chosen.small else ((8192, 5120), (16384, 14336)):
        kernels(shape, chosen.repeats)
    for kind in sizes:
        for recipe in RECIPES:
            layers(kind, recipe, sizes[kind], chosen.tokens, chosen.repeats)


if __name__ == "__main__":
    main()
