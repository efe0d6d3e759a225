"""GPU time of BlockScaling: a Linear beside BF16 and one scale a tensor, and its casts alone. For `check_blocks.py`."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.kernel_speed import graph_seconds
from torch import Tensor

import octavo
from octavo.formats import E4M3
from octavo.kernels import ScaleRule
from octavo.kernels.block_cast import BlockCast, block_cast, block_cast_pair, triton_kernel
from octavo.kernels.scaled_mm import blockwise, scaled_mm
from octavo.kernels.scaled_mm.block_product import AHEAD, WIDE, block_product
from octavo.kernels.side_stream import side_of
from octavo.recipes import BlockScaling, CurrentScaling, Recipe
from octavo.scaling import BLOCK_1X128, BLOCK_128X128

Result = dict[str, Any]
POWER_OF_TWO = ScaleRule(power_of_two=True)


def time_linear(m: int, k: int, n: int) -> Result:
    """GPU time (graph replay, taking turns) of forward and backward, bias off: bf16, one scale a tensor, blocks."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    names: dict[str, Recipe | None] = {"bf16": None, "current": CurrentScaling(), "block": BlockScaling()}
    measures, layers = {}, []  # a captured graph does not keep the layers
    for name, recipe in names.items():
        layer = octavo.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16, recipe=recipe)
        layers.append(layer)
        measures[name] = graph_seconds(lambda layer=layer: torch.autograd.grad(layer(x), [x, layer.weight], dy), 3)
    measures |= parts(x.detach(), layers[-1].weight.detach(), dy)
    samples: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(8):
        for name, measure in measures.items():
            samples[name].append(measure())
    result = {f"{name}_ms": round(statistics.median(seconds[1:]) * 1e3, 4) for name, seconds in samples.items()}
    elements = x.numel() + dy.numel() + k * n
    return result | {
        "ok": True,
        "speedup": round(result["bf16_ms"] / result["block_ms"], 3),
        "casts_tb_per_s": round(4 * elements / (result["casts_ms"] * 1e-3) / 1e12, 3),
    }


def parts(x: Tensor, weight: Tensor, dy: Tensor) -> dict[str, Callable[[], float]]:
    """The casts alone, those of the forward one after the other and by one launch, and the three products alone."""
    forward = BlockCast(x, E4M3, BLOCK_1X128, POWER_OF_TWO), BlockCast(weight, E4M3, BLOCK_128X128, POWER_OF_TWO)

    def casts() -> list[Any]:
        pairs = ((x, BLOCK_1X128), (weight, BLOCK_128X128), (dy, BLOCK_1X128))
        return [block_cast(one, E4M3, blocks, POWER_OF_TWO, inf_to_nan=one is dy) for one, blocks in pairs]

    made = casts()

    def products() -> None:
        cx, cw, cdy = made
        scaled_mm(cx[0], cw[0], cx[1], cw[1])
        scaled_mm(cdy[0], cw[2], cdy[1], cw[3])
        scaled_mm(cdy[2], cx[2], cdy[3], cx[3])

    return {
        "casts": graph_seconds(casts, 3),
        "forward_casts": graph_seconds(lambda: [block_cast(*one) for one in forward], 3),
        "forward_pair": graph_seconds(lambda: block_cast_pair(*forward), 3),
        "products": graph_seconds(products, 3),
    }


def time_gradients(m: int, k: int, n: int) -> Result:
    """us of the weight's gradient, alone and beside the input's: cuBLASLt's, and both forms of `block_product`."""
    cast = functools.partial(block_cast, format=E4M3, rule=POWER_OF_TWO)
    x = cast(torch.randn(m, k, device="cuda").bfloat16(), granularity=BLOCK_1X128)
    dy = cast(torch.randn(m, n, device="cuda").bfloat16(), granularity=BLOCK_1X128)
    w = cast(torch.randn(n, k, device="cuda").bfloat16(), granularity=BLOCK_128X128)
    codes, scale = dy.row_wise
    columns = dy.codes_t, x.codes_t, dy.scale_t, x.scale_t

    def dgrad() -> Tensor:
        return scaled_mm(codes, w.codes_t, scale, w.scale_t)

    def beside(wgrad: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        side = side_of(codes, 2 * m * k * n)
        return side.both(wgrad, dgrad) if side is not None else (wgrad(), dgrad())

    measures, right, equal = {}, block_product(*columns, torch.bfloat16), True
    with patch.object(blockwise, "_own_form", lambda *_: None):
        for name, form in {"library": None, "wide": WIDE, "ahead": AHEAD}.items():
            wgrad = functools.partial(scaled_mm, *columns)
            if form is not None:
                wgrad = functools.partial(block_product, *columns, torch.bfloat16, form)
            equal &= torch.equal(wgrad(), right)
            measures[f"wgrad, {name}"] = graph_seconds(wgrad)
            measures[f"dgrad beside wgrad, {name}"] = graph_seconds(functools.partial(beside, wgrad))
    samples: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(10):
        for name, measure in measures.items():
            samples[name].append(measure())
    figures = {name: round(statistics.median(seconds[1:]) * 1e6, 1) for name, seconds in samples.items()}
    return figures | {"ok": equal}


def time_casts(warps: int) -> Result:
    """TB/s of one cast of 16384 x 8192, in words, with so many warps a program, and copy's beside it."""
    x = torch.randn(16384, 8192, device="cuda").bfloat16()
    target, before = torch.empty_like(x), triton_kernel.PACKED_WARPS
    triton_kernel.PACKED_WARPS = dict.fromkeys(before, warps)
    try:
        measures = {
            "copy": graph_seconds(lambda: target.copy_(x)),
            "1x128": graph_seconds(lambda: block_cast(x, E4M3, BLOCK_1X128, POWER_OF_TWO)),
            "gradient": graph_seconds(
                lambda: block_cast(x, E4M3, BLOCK_1X128, POWER_OF_TWO, inf_to_nan=True, column_sum=True)
            ),
            "codes only": graph_seconds(lambda: block_cast(x, E4M3, BLOCK_1X128, POWER_OF_TWO, True, False)),
            "128x128": graph_seconds(lambda: block_cast(x, E4M3, BLOCK_128X128, POWER_OF_TWO)),
        }
    finally:
        triton_kernel.PACKED_WARPS = before
    samples: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(8):
        for name, measure in measures.items():
            samples[name].append(measure())
    figures = {}
    for name, seconds in samples.items():
        moved = (3 if name == "codes only" else 4) * x.numel()
        figures[name] = round(moved / statistics.median(seconds[1:]) / 1e12, 3)
    return figures | {"ok": True}
