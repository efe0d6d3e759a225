"""Every Triton kernel once on small odd shapes, for a sanitizer to watch.

    compute-sanitizer --tool memcheck --error-exitcode 9 python benchmarks/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python benchmarks/sanitize.py

Prints OK at the end; exit status 1 if a kernel was not launched, 2 without a CUDA device. Whether results are right is
asked by `check_kernels.py`. torch's caching of memory is off: inside of one large block an access beyond a tensor's end
would be no error.

Most of the time goes into compiling, 0.4 s a variant: 22 of casts, 22 of blocks, 20 of norms, 17 of rows, 22 of
activations and as many of gates, 16 of grouped, 19 of losses, 9 of attention, 2 of products, 3 of updates, and those of
four recipes' layers. `--only casts` and so on, each in a process of its own, share it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
# Read once by torch.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
# ruff: noqa: E402, T201

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

import octavo
import octavo.kernels
from octavo.formats import E4M3, E5M2
from octavo.kernels import ScaleRule
from octavo.kernels.activation_backward_cast import activation_backward_cast, activation_backward_output
from octavo.kernels.activation_cast import activation_cast, activation_output
from octavo.kernels.activations import GATED
from octavo.kernels.amax import amax_by_row_and_column, partial_amax
from octavo.kernels.block_cast import BlockCast, block_cast, block_cast_pair
from octavo.kernels.cast_transpose import cast_transpose
from octavo.kernels.cross_entropy import LossRule, cross_entropy, cross_entropy_gradient, cross_entropy_with_gradient
from octavo.kernels.delayed_update import delayed_update_in_place
from octavo.kernels.fp8_attention import fp8_attention, fp8_attention_gradient
from octavo.kernels.gated_backward_cast import gated_backward_cast, gated_backward_output
from octavo.kernels.gated_cast import gated_cast, gated_output
from octavo.kernels.grouped_cast import column_amax, grouped_cast, groups_of
from octavo.kernels.grouped_mm.triton_kernel import grouped_mm_over_rows_triton, grouped_mm_triton
from octavo.kernels.launcher import Launcher
from octavo.kernels.norm_backward import norm_backward
from octavo.kernels.norm_cast import norm_cast, norm_output
from octavo.kernels.norm_cast.norm import Norm
from octavo.kernels.norm_cast.reference import statistics
from octavo.kernels.row_cast import gated_row_cast, norm_row_cast, row_cast
from octavo.kernels.scaled_mm.block_product import AHEAD, WIDE, block_product
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from octavo.scaling import BLOCK_1X128, BLOCK_128X128

RULE = ScaleRule(power_of_two=True)
BF16 = torch.bfloat16
# Plain and gated, with a transcendental function and without.
ACTIVATIONS = ("gelu_tanh", "sreglu")


def matrices(device: str) -> Iterator[tuple[Tensor, bool]]:
    """One column, whose amaxes alone are Triton's; a tiny one; an odd one with gaps off the alignment; and, with every
    option (True), one larger than a block of any kernel, no extent a multiple of 16. Each is a variant of its own.
    """
    yield torch.randn(1, 1, device=device, dtype=BF16), False
    yield torch.randn(2, 38, device=device, dtype=BF16), False
    yield torch.randn(33, 40, device=device)[:, 1:38], False
    yield torch.randn(300, 130, device=device, dtype=BF16).t(), True


def casts(x: Tensor, every: bool) -> None:
    """Amaxes, and casts by tensor, and by row and column."""
    scale, gathered = torch.full((), 0.01, device=x.device), torch.zeros((), device=x.device)
    parts = partial_amax(x)
    for row, column in LAYOUTS if every else LAYOUTS[:1]:
        by_row, by_column = amax_by_row_and_column(x, row, column)
        cast_transpose(x, E4M3, by_row, by_column, rule=RULE)
        given = scale if row else None, scale if column else None
        cast_transpose(x, E4M3, *given, gathered=gathered, column_sum=True)
    if every:
        cast_transpose(x, E5M2, parts, parts, rule=RULE, gathered=gathered, inf_to_nan=True, column_sum=True)
        cast_transpose(x, E5M2, scale, scale.clone())


def blocks(x: Tensor, every: bool) -> None:
    """Casts by block, of one matrix and of two."""
    for granularity in (BLOCK_1X128, BLOCK_128X128):
        for row, column in LAYOUTS if every else LAYOUTS[:1]:
            block_cast(x, E4M3, granularity, RULE, row, column, column_sum=granularity is BLOCK_1X128)
    if every:
        block_cast(x, E5M2, BLOCK_1X128, RULE, inf_to_nan=True)
    rows = x.contiguous()
    block_cast_pair(BlockCast(rows, E4M3, BLOCK_1X128, RULE), BlockCast(rows, E4M3, BLOCK_128X128, RULE))


def products() -> None:
    """Of two operands in blocks of 1x128: less than a tile, and several with ragged edges."""
    for m, k, n in ((16, 128, 16), (400, 1152, 272)):
        a, b = (
            block_cast(torch.randn(k, features, device="cuda", dtype=BF16), E4M3, BLOCK_1X128, RULE, False, True)
            for features in (m, n)
        )
        for form in (WIDE, AHEAD):
            block_product(a.codes_t, b.codes_t, a.scale_t, b.scale_t, BF16, form)


LAYOUTS = ((True, True), (True, False), (False, True))


def norms(x: Tensor, every: bool) -> None:
    """Both normalisations with and without parameters, cast and in high precision, and their gradients."""
    scale, gathered = torch.full((), 0.01, device=x.device), torch.zeros((), device=x.device)
    weight, bias = torch.randn(2, x.shape[1], device=x.device).unbind()
    for kind, columnwise in (("layer", True), ("rms", False)):
        shift = bias if kind == "layer" else None
        norm = Norm(kind, zero_centered=columnwise, through=BF16)
        norm_cast(x, norm, weight, shift, E4M3, scale, gathered=gathered, columnwise=columnwise, return_output=True)
        if every:
            norm_cast(x, norm, None, None, E5M2, scale, columnwise=columnwise)
        norm_output(x, norm, weight, shift)
        given = statistics(x, norm)
        norm_backward(x, x.contiguous(), norm, weight, *given)
        if every:
            norm_backward(x.float(), x, norm, None, *given, (True, False, False))


def rows(x: Tensor, every: bool) -> None:
    """A scale a row measured in one pass: as it is, normalised, of a gate and of an activation."""
    row_cast(x, E4M3, RULE)
    norm_row_cast(x, Norm("rms", through=BF16), None, None, E4M3, RULE, return_output=every)
    gated_row_cast(x, x.contiguous(), "silu", E4M3, RULE, through=BF16)
    if every:
        weight, bias = torch.randn(2, x.shape[1], device=x.device).unbind()
        norm_row_cast(x, Norm("layer", through=BF16), weight, bias, E5M2, RULE)
        gated_row_cast(x, None, "gelu_tanh", E4M3, ScaleRule(), through=BF16)


def activations(x: Tensor, every: bool) -> None:
    """Forward and backward, cast and in high precision; x is the gradient of a result."""
    scale, gathered = torch.full((), 0.01, device=x.device), torch.zeros((), device=x.device)
    for name in ACTIVATIONS:
        source = torch.cat([x, x], dim=1) if name in GATED else x
        activation_cast(source, name, E4M3, scale, through=BF16, gathered=gathered)
        activation_output(source, name, BF16)
        activation_backward_cast(x, source, name, E5M2, scale, through=BF16, gathered=gathered, column_sum=True)
        activation_backward_output(x, source, name, torch.float32)
        if every:
            activation_cast(source, name, E4M3, scale, columnwise=False)


def gated(x: Tensor, every: bool) -> None:
    """Activations of a gate and its factor in two matrices, forward and backward; x is the gradient of a result."""
    scale, gathered = torch.full((), 0.01, device=x.device), torch.zeros((), device=x.device)
    gate, up = x, x.contiguous()
    for name in ("silu", "relu"):
        gated_cast(gate, up, name, E4M3, scale, through=BF16, gathered=gathered)
        gated_output(gate, up, name, BF16)
        options = {"through": BF16, "gathered": (gathered, gathered), "column_sums": (True, every)}
        gated_backward_cast(x, gate, up, name, E5M2, (scale, scale), **options)
        gated_backward_output(x, gate, up, name, torch.float32)
        if every:
            gated_cast(gate, up, name, E4M3, scale, columnwise=False)


def attention() -> None:
    """FP8 attention of lengths that no block has, grouped heads, and its gradient."""
    for features, queries, keys, causal in ((64, 130, 130, True), (128, 1, 257, False), (128, 257, 140, True)):
        q = torch.randn(2, queries, 4, features, device="cuda", dtype=BF16).transpose(1, 2)
        k, v = torch.randn(2, 2, 2, keys, features, device="cuda", dtype=BF16).unbind()
        out, lse, codes = fp8_attention(q, k, v, features**-0.5, causal)
        fp8_attention_gradient(out, codes, out, lse, keys, features**-0.5, causal)


def grouped(x: Tensor, every: bool) -> None:
    """Rows that belong to groups, an empty one among them: amaxes, casts, and products in Triton."""
    rows, device = x.shape[0], x.device
    sizes = torch.tensor([rows // 2, 0, rows - rows // 2], device=device)
    groups = groups_of(sizes, rows)
    by_row = torch.full((rows, 1), 2.0, device=device)
    column_amax(x, groups)
    if x.shape[1] == 1:
        return
    for by_column in (torch.ones(3, x.shape[1], device=device), torch.ones(3, 1, device=device))[: 1 + every]:
        grouped_cast(x, groups, E5M2, by_row, by_column, inf_to_nan=every)
    dy, dy_t = grouped_cast(x, groups, E5M2, by_row, torch.ones(3, x.shape[1], device=device))
    _, x_t = grouped_cast(x, groups, E4M3, by_row, torch.ones(3, x.shape[1], device=device))
    assert dy is not None
    assert dy_t is not None
    assert x_t is not None
    # [groups, columns, inner]: as many columns as no tile has.
    weights = torch.zeros(3, 48, dy.shape[1], device=device).to(torch.float8_e4m3fn)
    ones = torch.ones(3, max(48, dy_t.shape[0]), 1, device=device)
    bias = torch.ones(3, 48, device=device)
    for accumulate, out_dtype in (("precise", BF16), ("fast", torch.float32))[: 1 + every]:
        grouped_mm_triton(dy, weights, by_row, ones[:, :48], bias, groups.ends, out_dtype, accumulate)
        own = ones[:, : dy_t.shape[0]]
        grouped_mm_over_rows_triton(dy_t, x_t, own, own, groups.ends_t, out_dtype, accumulate)


def losses(x: Tensor, every: bool) -> None:
    """Cross-entropy of rows, some of them ignored, one against no class; gradients beside the logits and over them."""
    rows, columns = x.shape
    targets = torch.arange(rows, device=x.device) % columns
    targets[rows // 2] = -100
    for rule in (LossRule(), LossRule(0, 0.1, 1e-3))[: 1 + every]:
        loss, lse = cross_entropy(x, targets, rule)
        cross_entropy_gradient(x, targets, lse, loss if every else None, rule)
        cross_entropy_with_gradient(x.clone(), targets.int(), rule)
    targets[0] = columns
    cross_entropy_with_gradient(x.clone(), targets)


def updates() -> None:
    """The end of a step of operands that stay where they are."""
    for length, algorithm in ((1, "max"), (37, "max"), (1024, "most_recent")):
        histories = [torch.rand(length, device="cuda") for _ in range(5)]
        scales, gathered = ([torch.rand((), device="cuda") for _ in range(5)] for _ in range(2))
        update = delayed_update_in_place(histories, scales, gathered, (448.0, 57344.0), 3, 0, algorithm)
        for _ in range(2):
            update()


def layers() -> None:
    """A Linear of odd sizes, forward and backward, with every recipe: what is around the kernels."""
    for recipe in (DelayedScaling(), CurrentScaling(), RowwiseScaling(), BlockScaling()):
        layer = octavo.Linear(37, 83, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(45, 37, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2):
            with octavo.autocast(recipe=recipe):
                y = layer(x)
            y.sum().backward()


def launched() -> dict[str, int]:
    """Variants launched, by launcher; by kernel where it has none."""
    for folder in pkgutil.iter_modules(octavo.kernels.__path__, "octavo.kernels."):
        if folder.ispkg and importlib.util.find_spec(f"{folder.name}.triton_kernel") is not None:
            importlib.import_module(f"{folder.name}.triton_kernel")
    launchers: dict[str, Launcher] = {}
    kernels: dict[str, JITFunction] = {}
    for name, module in sorted(sys.modules.items()):
        if name.startswith("octavo.kernels"):
            for variable, value in vars(module).items():
                if isinstance(value, Launcher):
                    launchers[f"{name.removeprefix('octavo.kernels.')} {variable}"] = value
                elif isinstance(value, JITFunction) and variable.endswith("_kernel") and value.__module__ == name:
                    kernels[f"{name.removeprefix('octavo.kernels.')} {variable}"] = value
    counts = {name: len(launcher._variants) for name, launcher in launchers.items()}
    # Some kernels are launched by Triton itself, which keeps their variants, by device.
    with_launcher = [launcher._kernel for launcher in launchers.values()]
    for name, kernel in kernels.items():
        if not any(kernel is known for known in with_launcher):
            counts[name] = sum(len(caches[0]) for caches in kernel.device_caches.values())
    return counts


PARTS: dict[str, Callable[[Tensor, bool], None]] = {
    "casts": casts,
    "blocks": blocks,
    "norms": norms,
    "rows": rows,
    "activations": activations,
    "gated": gated,
    "grouped": grouped,
    "losses": losses,
}


# Parts that make their own operands.
ALONE: dict[str, Callable[[], None]] = {
    "attention": attention,
    "products": products,
    "updates": updates,
    "layers": layers,
}


def main() -> int:
    """Run everything; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[*PARTS, *ALONE], help="these parts; not all kernels then")
    only = parser.parse_args().only
    if not torch.cuda.is_available():
        print("no CUDA device: there is nothing to watch", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    for x, every in matrices("cuda"):
        for name, part in PARTS.items():
            if only is None or name in only:
                part(x, every)
    for name, alone in ALONE.items():
        if only is None or name in only:
            alone()
    torch.cuda.synchronize()
    counts = launched()
    for name, variants in counts.items():
        print(f"{name}: {variants} variants")
    missing = [name for name, variants in counts.items() if not variants]
    if (missing and only is None) or not any(counts.values()):
        print(f"not launched: {', '.join(missing) or 'any kernel'}", file=sys.stderr)
        return 1
    print("OK")
    return 0


if __name__ == "__main__":
    sys.exit(main())
