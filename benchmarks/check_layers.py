"""The layers on a CUDA device: against their emulation, their parts, themselves graphed and compiled; and no waiting.

    python benchmarks/check_layers.py --out build/check_layers.jsonl

One JSON line a check, as by `check_kernels.py`; exit status 1 if any failed, 2 without a CUDA device (`--device cpu`
tries the parts that a CPU can run, FP8 emulated on both sides). Parts run in processes of their own, all at once.

    emulation       native FP8 is as close to float32 as the emulation on a CPU, less 0.5 dB: output and every gradient
    composed        a fused layer gives the bits of its parts one after the other
    graphed         a CUDA graph's replays give the bits of the layer and of its scales
    no wait         a training step asks nothing of the device
    compiled        one graph by Inductor, the layer itself to rounding
    norm_backward   to the bit where every sum is exact; elsewhere within what float32 can lose, the same in every run
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
# ruff: noqa: E402, I001, T201

import torch
from torch import Tensor, nn

import octavo
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling
from benchmarks.check_kernels import Checks, environment
from benchmarks.check_norm_backward import check_norm_backward
from tests.measures import relative_error, sqnr_db
from tests.modules.compositions import Composition, cloned, jittered, state_of, under

BF16 = torch.bfloat16
HIDDEN, FFN, HEADS, TOKENS, BATCH = 512, 768, 8, 64, 8
# Tokens of each expert; none is left out, since a scale that is measured first waits for an expert's first token.
SPLITS = [100, 7, 205, 200]
RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=4, initialise_from_first_batch=True),
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "block": BlockScaling(),
}
# Whose norm or activation is cast by the kernel that computes it: its sums are in another order than a layer's own.
CLOSE = ("delayed",)
Result = dict[str, Any]
Make = Callable[[], nn.Module]


def _mlp(activation: str, **options: Any) -> Make:
    return lambda: octavo.LayerNormMLP(HIDDEN, FFN, activation=activation, dtype=BF16, **options)


MLPS = ("gelu", "qgelu", "relu", "srelu", "silu", "swiglu", "geglu", "sreglu")
LAYERS: dict[str, Make] = {
    "LayerNormLinear": lambda: octavo.LayerNormLinear(HIDDEN, FFN, dtype=BF16),
    "LayerNormLinear RMSNorm": lambda: octavo.LayerNormLinear(HIDDEN, FFN, normalization="RMSNorm", dtype=BF16),
    **{f"LayerNormMLP {name}": _mlp(name) for name in MLPS},
    "LayerNormMLP saved fp8": _mlp("swiglu", saved_activation_input="fp8"),
    "LayerNormMLP checkpoint": _mlp("swiglu", checkpoint=True),
    "MultiheadAttention": lambda: octavo.MultiheadAttention(HIDDEN, HEADS, input_layernorm=True, dtype=BF16),
    "MultiheadAttention GQA": lambda: octavo.MultiheadAttention(
        HIDDEN, HEADS, num_gqa_groups=2, input_layernorm=True, fuse_qkv_params=True, dtype=BF16
    ),
    "TransformerLayer": lambda: octavo.TransformerLayer(HIDDEN, FFN, HEADS, dtype=BF16),
    "TransformerLayer swiglu": lambda: octavo.TransformerLayer(
        HIDDEN, FFN, HEADS, 2, activation="swiglu", normalization="RMSNorm", bias=False, dtype=BF16
    ),
    "GroupedLinear": lambda: octavo.GroupedLinear(len(SPLITS), HIDDEN, FFN, dtype=BF16),
}


def made(name: str) -> nn.Module:
    """A layer on the CPU, the same each time."""
    torch.manual_seed(0)
    return jittered(LAYERS[name]())


def data(name: str, number: int = 1, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    """(x, dy) of N(0, 1), the same each time."""
    torch.manual_seed(1)
    columns = FFN if "Linear" in name else HIDDEN
    shape = (sum(SPLITS),) if "Grouped" in name else (TOKENS, BATCH)
    pairs = [(torch.randn(*shape, HIDDEN), torch.randn(*shape, columns)) for _ in range(number)]
    return [(x.to(device, BF16), dy.to(device, BF16)) for x, dy in pairs]


def step(layer: nn.Module, x: Tensor, dy: Tensor, recipe: Recipe | None, sizes: Any = None) -> dict[str, Tensor]:
    """Output and every gradient by name, of a step under a recipe."""
    leaf = x.detach().clone().requires_grad_()
    layer.zero_grad()
    further = () if sizes is None else (sizes,)
    with under(recipe):
        y = layer(leaf, *further)
    y.backward(dy)
    found = {"y": y.detach().clone(), "dx": leaf.grad}
    found |= {name: p.grad for name, p in layer.named_parameters()}
    return {name: value for name, value in found.items() if value is not None}


def sizes_of(name: str, device: str, on_device: bool) -> Any:
    """What a GroupedLinear is told beside x, or None."""
    if "Grouped" not in name:
        return None
    return torch.tensor(SPLITS, device=device) if on_device else SPLITS


def emulation(device: str, name: str, recipe: str) -> Result:
    """SQNR against float32, native and emulated, of the third step on the same data."""
    layer = made(name)
    [(x, dy)] = data(name)
    exact = step(copy.deepcopy(layer).float(), x.float(), dy.float(), None, sizes_of(name, "cpu", False))
    outcomes = []
    for place, one in (("cpu", copy.deepcopy(layer)), (device, copy.deepcopy(layer).to(device))):
        sizes = sizes_of(name, place, place != "cpu" and recipe != "block")
        for _ in range(3):  # scales known, those of gradients too
            found = step(one, x.to(place), dy.to(place), RECIPES[recipe], sizes)
        outcomes.append(found)
    emulated, native = outcomes
    least: tuple[float, str] = (float("inf"), "")
    figures = {}
    for part, reference in exact.items():
        # What all keys of a query have in common moves no probability: the gradient is 0, and rounding is all of it.
        if part.endswith("key_bias") or reference.abs().max() == 0:
            continue
        if part.endswith("qkv.bias"):
            continue  # a third of it is that
        one, other = sqnr_db(reference, emulated[part]), sqnr_db(reference, native[part])
        least = min(least, (other - one, part))
        if part in ("y", "dx"):
            figures |= {f"{part}_db": round(other, 2), f"{part}_emulated_db": round(one, 2)}
    return {"ok": least[0] >= -0.5, "least_margin_db": round(least[0], 3), "of": least[1], **figures}


class ComposedAttention(nn.Module):
    """LayerNorm and attention without one."""

    def __init__(self, fused: octavo.MultiheadAttention, **options: Any) -> None:
        super().__init__()
        qkv: Any = fused.layernorm_qkv
        self.norm = octavo.LayerNorm(HIDDEN, dtype=BF16)
        self.norm.weight, self.norm.bias = cloned(qkv.layer_norm_weight), cloned(qkv.layer_norm_bias)
        self.attention = octavo.MultiheadAttention(HIDDEN, HEADS, dtype=BF16, **options)
        state = {key.replace("layernorm_qkv", "qkv"): value for key, value in fused.state_dict().items()}
        names = {key for key, _ in self.attention.named_parameters()}
        self.attention.load_state_dict({key: value for key, value in state.items() if key in names})

    def forward(self, x: Tensor) -> Tensor:
        """y"""
        y: Tensor = self.attention(self.norm(x))
        return y


class ComposedLayer(nn.Module):
    """A TransformerLayer of parts that have no norm in them."""

    def __init__(self, fused: octavo.TransformerLayer) -> None:
        super().__init__()
        self.attention, self.mlp = ComposedAttention(fused.self_attention), Composition(fused.layernorm_mlp)

    def forward(self, x: Tensor) -> Tensor:
        """y"""
        h = x + self.attention(x)
        y: Tensor = h + self.mlp(h)[0]
        return y


def composition_of(layer: nn.Module) -> nn.Module:
    """The parts of a fused layer, with copies of its parameters."""
    if isinstance(layer, octavo.TransformerLayer):
        return ComposedLayer(layer)
    if isinstance(layer, octavo.MultiheadAttention):
        return ComposedAttention(layer)
    assert isinstance(layer, (octavo.LayerNormLinear, octavo.LayerNormMLP))
    return Composition(layer)


def composed(device: str, name: str, recipe: str) -> Result:
    """Three steps of growing inputs: outputs and the gradient of the input, and of every parameter by its values."""
    layer = made(name)
    parts = composition_of(layer).to(device)
    layer = layer.to(device)
    worst, differing = 0.0, 0
    for number, (x, dy) in enumerate(data(name, 3, device)):
        x = x * 1.7**number
        outcomes = []
        for model in (layer, parts):
            leaf = x.clone().requires_grad_()
            model.zero_grad()
            with under(RECIPES[recipe]):
                out = model(leaf)
            y = out[0] if isinstance(out, tuple) else out
            y.backward(dy)
            outcomes.append([y.detach(), leaf.grad, *(p.grad for p in model.parameters())])
        for one, other in zip(_matched(outcomes[0]), _matched(outcomes[1]), strict=True):
            differing += int((one != other).sum())
            norm = float(other.float().norm())
            worst = max(worst, float((one.float() - other.float()).norm()) / norm if norm else 0.0)
    # One code in 10^4 an eighth of itself away is 1.3e-3 of the norm; bf16 rounds to 2^-9.
    ok = worst < 0.005 if recipe in CLOSE and device != "cpu" else differing == 0
    return {"ok": ok, "differing": differing, "worst": worst}


def _matched(tensors: list[Tensor]) -> list[Tensor]:
    """Output and gradients in an order that does not depend on how a model is put together: by shape and magnitude.

    The gradient of a key's bias is rounding alone; it is there in both, and the same where bits are.
    """
    fixed, free = tensors[:2], tensors[2:]
    return [*fixed, *sorted(free, key=lambda t: (tuple(t.shape), float(t.float().abs().sum())))]


def graphed(device: str, name: str, recipe: str) -> Result:
    """Eager and graphed, from the same scales on: output, gradients, scales, histories."""
    layer = made(name).to(device)
    for module in layer.modules():
        if "delayed_state" in module.__dict__:
            module.recipe = RECIPES[recipe]  # type: ignore[assignment]
    sizes = sizes_of(name, device, True)
    pairs = data(name, 5, device)
    other = copy.deepcopy(layer)
    for one in (layer, other):
        for x, dy in pairs[:2]:
            own_step(one, x, dy, sizes)
    sample = (pairs[0][0].clone().requires_grad_(), *(() if sizes is None else (sizes,)))
    octavo.make_graphed_callables(other, sample)
    differing = 0
    for x, dy in pairs[2:]:
        results = [own_step(one, x, dy, sizes) for one in (layer, other)]
        differing += sum(not torch.equal(a, b) for a, b in zip(*results, strict=True))
    return {"ok": differing == 0, "differing": differing}


def own_step(layer: nn.Module, x: Tensor, dy: Tensor, sizes: Any) -> list[Tensor]:
    """A step with the layer's own recipe: output, gradients, state after the update."""
    leaf = x.detach().clone().requires_grad_()
    layer.zero_grad()
    y = layer(leaf, *(() if sizes is None else (sizes,)))
    y.backward(dy)
    octavo.update_scales(layer)
    gradients = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    return [y.detach().clone(), leaf.grad.clone(), *gradients, *state_of(layer)]  # type: ignore[union-attr]


def no_wait(device: str, name: str, recipe: str) -> Result:
    """After three steps, one in which torch raises where the host would wait."""
    layer, sizes = made(name).to(device), sizes_of(name, device, True)
    [(x, dy)] = data(name, 1, device)
    for _ in range(3):
        step(layer, x, dy, RECIPES[recipe], sizes)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(layer, x, dy, RECIPES[recipe], sizes)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"ok": True}


def compiled(device: str, name: str, recipe: str) -> Result:
    """In one graph, two steps; roundings to bf16 that the compiler leaves out move some codes by a step."""
    torch._dynamo.reset()
    layer, sizes = made(name).to(device), sizes_of(name, device, True)
    own = copy.deepcopy(layer)
    function = torch.compile(own, fullgraph=True)
    worst, of = 0.0, ""
    for x, dy in data(name, 2, device):
        outcomes = []
        for model in (layer, function):
            found = step(model, x, dy, RECIPES[recipe], sizes)
            outcomes.append({key.removeprefix("_orig_mod."): value for key, value in found.items()})
        for part, one in outcomes[0].items():
            if not part.endswith(("key_bias", "qkv.bias")):
                apart = relative_error(one, outcomes[1][part])
                worst, of = max((worst, of), (apart, part))
    # As in tests/modules/test_transformer_layer_on_gpu.py for y and dx; a weight's gradient is a product of two such.
    return {"ok": worst < 2.0**-5, "worst": worst, "of": of}


def named(*starts: str) -> list[str]:
    """Layers whose names begin so."""
    return [name for name in LAYERS if name.startswith(starts)]


def over(check: Callable[[str, str, str], Result], names: list[str], recipes: Any = RECIPES) -> Callable[..., None]:
    """The check of each layer under each recipe."""

    def run(checks: Checks, device: str) -> None:
        for name in names:
            for recipe in recipes:
                if "Grouped" in name and recipe == "block" and check in (graphed, no_wait, compiled):
                    continue  # by block there is no grouped product, and a loop over groups waits for their sizes
                call = functools.partial(check, device, name, recipe)
                checks.run(check.__name__.replace("_", " "), call, layer=name, recipe=recipe)

    return run


# Those whose parts are written here; what is saved in FP8 has other gradients than the parts have.
_NOT_COMPOSED = ("Grouped", "MultiheadAttention GQA", "TransformerLayer s", "LayerNormMLP saved")
_FUSED = [name for name in LAYERS if not name.startswith(_NOT_COMPOSED)]
_MLP_FEW = ["LayerNormMLP gelu", "LayerNormMLP swiglu", "LayerNormMLP saved fp8", "LayerNormMLP checkpoint"]
_OTHERS = [*named("LayerNormLinear"), *_MLP_FEW, *named("Multi", "Transformer", "Grouped")]
PARTS: dict[str, Callable[[Checks, str], None]] = {
    "norm_backward": check_norm_backward,
    "emulation linear": over(emulation, named("LayerNormLinear", "Grouped")),
    "emulation mlp": over(emulation, named("LayerNormMLP")[:5]),
    "emulation mlp 2": over(emulation, named("LayerNormMLP")[5:]),
    "emulation attention": over(emulation, named("Multi")),
    "emulation layer": over(emulation, named("Transformer")),
    "composed": over(composed, _FUSED[:6]),
    "composed 2": over(composed, _FUSED[6:]),
    "graphed": over(graphed, _OTHERS[:6]),
    "graphed 2": over(graphed, _OTHERS[6:]),
    "no wait": over(no_wait, _OTHERS),
    "compiled linear": over(compiled, ["LayerNormLinear"], ("delayed", "current", "block")),
    "compiled mlp": over(compiled, ["LayerNormMLP swiglu"], ("delayed", "current")),
    "compiled attention": over(compiled, ["MultiheadAttention"], ("delayed", "rowwise")),
    "compiled layer": over(compiled, ["TransformerLayer"], ("delayed", "current")),
    "compiled grouped": over(compiled, ["GroupedLinear"], ("delayed", "rowwise")),
}
ON_CPU = [name for name in PARTS if name.partition(" ")[0] in ("norm_backward", "emulation", "composed")]


def run_parts(names: list[str], options: argparse.Namespace) -> list[str]:
    """Each part in a process of its own, all at once; gives the lines of their records."""
    processes = []
    for name in names:
        out = options.out.with_name(f"{options.out.stem}-{name.replace(' ', '-')}.jsonl")
        out.unlink(missing_ok=True)
        command = [sys.executable, __file__, "--out", str(out), "--only", name, "--alone", "--device", options.device]
        command += ["--seconds", str(options.seconds), *(["--commit", options.commit] if options.commit else [])]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        processes.append((name, out, process))
    lines = []
    for name, out, process in processes:
        print(process.communicate()[0], end="", flush=True)
        if out.exists():
            lines += out.read_text().splitlines(keepends=True)
            out.unlink()
        else:
            lines.append(json.dumps({"check": name, "ok": False, "error": f"exit status {process.returncode}"}) + "\n")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Run everything; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/check_layers.jsonl"), help="where the JSON lines go")
    parser.add_argument("--seconds", type=float, default=100.0, help="start no check after this long (default 100)")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: what a CPU can run, emulated")
    parser.add_argument("--alone", action="store_true", help="in this process, one part after another")
    parser.add_argument("--commit", help="for the record, where git does not know it")
    options = parser.parse_args(arguments)
    names = options.only or (list(PARTS) if options.device == "cuda" else ON_CPU)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: --device cpu tries what a CPU can run", file=sys.stderr)
        return 2
    started = time.monotonic()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.alone:
        torch.set_num_threads(max(1, (os.cpu_count() or 2) // 8))
        about = environment(options.commit) if options.device == "cuda" else {"hardware": "a CPU, emulated"}
        checks = Checks(about, options.seconds)
        for name in names:
            PARTS[name](checks, options.device)
        checks.write(options.out)
        return 1 if checks.failed else 0
    lines = run_parts(names, options)
    partial = options.out.with_name(options.out.name + ".partial")
    partial.write_text("".join(lines))
    partial.replace(options.out)
    records = [json.loads(line) for line in lines]
    failed, skipped = (sum(record["ok"] is value for record in records) for value in (False, None))
    print(f"{len(records)} checks, {failed} failed, {skipped} skipped for want of time,"
          f" in {time.monotonic() - started:.0f} s")  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
