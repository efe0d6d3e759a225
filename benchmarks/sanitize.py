"""Every Triton kernel once on small odd shapes, for a sanitizer to watch.

    compute-sanitizer --tool memcheck --error-exitcode 9 python benchmarks/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python benchmarks/sanitize.py

Prints OK at the end; exit status 1 if a kernel was not launched, 2 without a CUDA device. Most of the time goes into
compiling: `--only casts` and so on, each in a process of its own, share it. Whether results are right is
asked by `check_kernels.py`. torch's caching of memory is off: inside of one large block an access beyond a tensor's end
would be no error.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
# Read once by torch.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
# ruff: noqa: E402, T201

import torch
from torch import Tensor

import octavo
import octavo.kernels
from octavo.formats import E4M3, E5M2
from octavo.kernels import ScaleRule
from octavo.kernels.activation_backward_cast import activation_backward_cast, activation_backward_output
from octavo.kernels.activation_cast import activation_cast, activation_output
from octavo.kernels.amax import amax_by_row_and_column, partial_amax
from octavo.kernels.block_cast import block_cast
from octavo.kernels.cast_transpose import cast_transpose
from octavo.kernels.launcher import Launcher
from octavo.kernels.norm_cast import norm_cast, norm_output
from octavo.kernels.norm_cast.norm import Norm
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from octavo.scaling import BLOCK_1X128, BLOCK_128X128

# Of one column only amaxes are Triton's. The transpose of one column is a row whose stride is 1.
SHAPES = ((1, 1), (1, 37), (1, 38), (7, 13), (33, 258), (130, 300))
DTYPES = (torch.bfloat16, torch.float32)
RULE = ScaleRule(power_of_two=True)
ACTIVATIONS = ("gelu_tanh", "gelu_erf", "swiglu", "sreglu")


def matrices(rows: int, columns: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """[rows, columns] with contiguous rows, with gaps on and off the alignment, and with contiguous columns."""
    yield torch.randn(rows, columns, device="cuda", dtype=dtype)
    yield torch.randn(rows, columns + 3, device="cuda", dtype=dtype)[:, 1 : columns + 1]
    yield torch.randn(rows, columns + 4, device="cuda", dtype=dtype)[:, :columns]
    yield torch.randn(columns, rows, device="cuda", dtype=dtype).t()


def casts(x: Tensor) -> None:
    """Amaxes, and casts by tensor, by row and column, and by block."""
    scale, gathered = torch.full((), 0.01, device="cuda"), torch.zeros((), device="cuda")
    parts = partial_amax(x)
    amax_by_row_and_column(x.half())
    for row, column in ((True, True), (True, False), (False, True)):
        by_row, by_column = amax_by_row_and_column(x, row, column)
        cast_transpose(x, E4M3, by_row, by_column, rule=RULE)
        given = scale if row else None, scale if column else None
        cast_transpose(x, E4M3, *given, gathered=gathered, column_sum=True)
        for granularity in (BLOCK_1X128, BLOCK_128X128):
            block_cast(x, E4M3, granularity, RULE, row, column, column_sum=granularity is BLOCK_1X128)
    cast_transpose(x, E5M2, parts, parts, rule=RULE, gathered=gathered, inf_to_nan=True, column_sum=True)
    cast_transpose(x, E5M2, scale, scale.clone())
    block_cast(x, E5M2, BLOCK_1X128, RULE, inf_to_nan=True)


def norms(x: Tensor) -> None:
    """Both normalisations with and without parameters, cast and in high precision."""
    scale, gathered = torch.full((), 0.01, device="cuda"), torch.zeros((), device="cuda")
    weight, bias = torch.randn(2, x.shape[1], device="cuda").unbind()
    for kind, columnwise in itertools.product(("layer", "rms"), (True, False)):
        shift = bias if kind == "layer" else None
        norm = Norm(kind, zero_centered=columnwise, through=torch.bfloat16)
        norm_cast(x, norm, weight, shift, E4M3, scale, gathered=gathered, columnwise=columnwise, return_output=True)
        norm_cast(x, norm, None, None, E5M2, scale, columnwise=columnwise)
        norm_output(x, norm, weight, shift)


def activations(x: Tensor) -> None:
    """Forward and backward, plain and gated, cast and in high precision; x is the gradient of a result."""
    scale, gathered = torch.full((), 0.01, device="cuda"), torch.zeros((), device="cuda")
    for name in ACTIVATIONS:
        source = torch.cat([x, x], dim=1) if name in ("swiglu", "sreglu") else x
        activation_cast(source, name, E4M3, scale, through=torch.bfloat16, gathered=gathered)
        activation_cast(source, name, E4M3, scale, columnwise=False)
        activation_output(source, name, torch.bfloat16)
        activation_backward_cast(
            x, source, name, E5M2, scale, through=torch.bfloat16, gathered=gathered, column_sum=True
        )
        activation_backward_output(x, source, name, torch.float32)


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
    """Variants launched, by launcher."""
    for folder in pkgutil.iter_modules(octavo.kernels.__path__, "octavo.kernels."):
        if folder.ispkg and importlib.util.find_spec(f"{folder.name}.triton_kernel") is not None:
            importlib.import_module(f"{folder.name}.triton_kernel")
    counts: dict[str, int] = {}
    for name, module in sorted(sys.modules.items()):
        if name.startswith("octavo.kernels"):
            for variable, value in vars(module).items():
                if isinstance(value, Launcher):
                    counts[f"{name.removeprefix('octavo.kernels.')} {variable}"] = len(value._variants)
    return counts


PARTS = {"casts": casts, "norms": norms, "activations": activations}


def main() -> int:
    """Run everything; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[*PARTS, "layers"], help="these parts; not all kernels then")
    only = parser.parse_args().only
    if not torch.cuda.is_available():
        print("no CUDA device: there is nothing to watch", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    for (rows, columns), dtype in itertools.product(SHAPES, DTYPES):
        for x in matrices(rows, columns, dtype):
            for name, part in PARTS.items():
                if only is None or name in only:
                    part(x)
    if only is None or "layers" in only:
        layers()
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
