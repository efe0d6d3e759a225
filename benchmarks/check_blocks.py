"""BlockScaling on a CUDA device: casts, products and Linear against their references, and their time.

    python benchmarks/check_blocks.py --out build/check_blocks.jsonl

One JSON line a check (hardware, versions, commit). Exit status 1 if a check failed, 2 without a CUDA device. "variant"
rows try what cuBLASLt may or may not have; they never fail, their `outcome` says what happened.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
# ruff: noqa: E402, I001, T201

import torch
from torch import Tensor

import octavo
from benchmarks.block_speed import POWER_OF_TWO, time_casts, time_gradients, time_linear
from benchmarks.check_kernels import Checks, compare, environment
from benchmarks.check_linear import run
from benchmarks.check_products import product_bound
from benchmarks.kernel_inputs import layouts
from octavo.formats import E4M3, E5M2, Format, decode
from octavo.kernels import ScaleRule
from octavo.kernels.block_cast import (
    BlockCast,
    block_cast,
    block_cast_pair,
    block_cast_reference,
    expanded,
    is_by_row,
)
from octavo.kernels.scaled_mm import blockwise, scaled_mm
from octavo.recipes import BlockScaling
from octavo.scaling import BLOCK_1X128, BLOCK_128X128, Granularity
from tests.formats.edge_values import edge_matrix, random_bits
from tests.measures import sqnr_db

Result = dict[str, Any]
GRANULARITIES = (BLOCK_1X128, BLOCK_128X128)
SHAPES = ((1, 1), (1, 144), (257, 16), (16, 16), (128, 128), (200, 272), (1000, 1024), (4096, 640), (24, 9008))
RAGGED = ((7, 13), (130, 300), (1024, 1000), (3163, 3163))
SPEED_SHAPES = (
    (8192, 768, 3072), (8192, 1280, 1280), (8192, 1280, 5120), (4096, 4096, 4096), (16384, 4096, 14336),
    (16384, 8192, 8192),
)  # fmt: skip


def one_cast(
    x: Tensor,
    format: Format = E4M3,
    granularity: Granularity = BLOCK_1X128,
    rule: ScaleRule = POWER_OF_TWO,
    **flags: bool,
) -> Result:
    """Mismatches in codes and scales of both layouts."""
    found = block_cast(x, format, granularity, rule, **flags)
    expected = block_cast_reference(x, format, granularity, rule, **flags)
    return compare(found[:4], expected[:4])


def one_pair(x: Tensor, w: Tensor) -> Result:
    """The same of an input and a weight, cast by one launch where it takes them."""
    casts = BlockCast(x, E4M3, BLOCK_1X128, POWER_OF_TWO), BlockCast(w, E4M3, BLOCK_128X128, POWER_OF_TWO)
    found, expected = block_cast_pair(*casts), [block_cast_reference(*cast) for cast in casts]
    return compare([*found[0][:4], *found[1][:4]], [*expected[0][:4], *expected[1][:4]])


def check_casts(checks: Checks) -> None:
    """Shapes of one variant first, then dtypes, special values, flags and rules, then every memory order."""
    device = "cuda"
    for granularity in GRANULARITIES:
        for shape in SHAPES:
            x = (torch.randn(shape, device=device) * torch.randn(shape, device=device).exp2()).bfloat16()
            call = functools.partial(one_cast, x, granularity=granularity)
            checks.run("cast", call, shape=shape, granularity=str(granularity))
    for granularity in GRANULARITIES:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            edges = edge_matrix(E4M3, dtype).flatten()
            square = edges.repeat(-(-(2**19) // len(edges)))[: 2**19].view(-1, 4096).to(device)
            for what, x in (("edges", square), ("random bits", random_bits((2048, 4096), dtype, device))):
                # From an odd column on elements of 16 bits lie in no words, and another kernel casts them.
                for first in (0, 1):
                    call = functools.partial(one_cast, x[:, first:], granularity=granularity)
                    checks.run("cast", call, values=what, first=first, dtype=str(dtype), granularity=str(granularity))
    x = random_bits((1000, 1040), torch.bfloat16, device)
    gradient = {"inf_to_nan": True, "column_sum": True}
    for name, arguments in (
        ("gradient E4M3", {"format": E4M3} | gradient),
        ("gradient E5M2", {"format": E5M2} | gradient),
        ("codes only", {"columnwise": False}),
        ("transposed only", {"rowwise": False}),
        ("no power of two", {"rule": ScaleRule()}),
        ("epsilon", {"rule": ScaleRule((1e-3).hex(), True)}),
        ("weight, no power of two", {"rule": ScaleRule(), "granularity": BLOCK_128X128}),
        ("weight, codes only", {"columnwise": False, "granularity": BLOCK_128X128}),
    ):
        for first in (0, 1):
            checks.run("cast", functools.partial(one_cast, x[:, first:], **arguments), kind=name, first=first)
    checks.run("column sums", functools.partial(column_sums, device))
    for shape in RAGGED:
        x = random_bits(shape, torch.bfloat16, device)
        for granularity in GRANULARITIES:
            call = functools.partial(one_cast, x, granularity=granularity)
            checks.run("cast", call, shape=shape, granularity=str(granularity))
    for order, view in layouts(random_bits((200, 144), torch.bfloat16, device)):
        checks.run("cast", functools.partial(one_cast, view), order=order)
        checks.run("pair", functools.partial(one_pair, view, view), order=order)
    for shape, other in (((8192, 1280), (1280, 1280)), ((4100, 258), (130, 258)), ((1, 1040), (3000, 1040))):
        for dtype in (torch.bfloat16, torch.float16):
            call = functools.partial(one_pair, random_bits(shape, dtype, device), random_bits(other, dtype, device))
            checks.run("pair", call, shape=shape, other=other, dtype=str(dtype))


def column_sums(device: str) -> Result:
    """Of small integers, whose float32 sums are exact in any order."""
    x = torch.randint(-4, 5, (5000, 1040), device=device).bfloat16()
    sums = block_cast(x, E4M3, BLOCK_1X128, POWER_OF_TWO, inf_to_nan=True, column_sum=True).column_sum
    return compare((sums,), (x.double().sum(0).float(),))


def operands(
    m: int, k: int, n: int, kind: str, rule: ScaleRule = POWER_OF_TWO
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(a, b, scale_a, scale_b) of a product by casts of normal data with rows and columns of many magnitudes."""

    def data(rows: int, columns: int) -> Tensor:
        spread = torch.randint(-6, 7, (rows, 1), device="cuda").float().exp2()
        return torch.randn(rows, columns, device="cuda") * spread * torch.rand(1, columns, device="cuda").exp2()

    a = block_cast(data(m, k), E4M3, BLOCK_1X128, rule, True, False)
    if kind == "wgrad":
        # Transposed codes of matrices [tokens, features].
        a = block_cast(data(k, m), E4M3, BLOCK_1X128, rule, False, True)
        b = block_cast(data(k, n), E4M3, BLOCK_1X128, rule, False, True)
        return a[2], b[2], a[3], b[3]  # type: ignore[return-value]
    if kind == "dgrad":
        b = block_cast(data(k, n), E4M3, BLOCK_128X128, rule, False, True)
        return a[0], b[2], a[1], b[3]  # type: ignore[return-value]
    b = block_cast(data(n, k), E4M3, BLOCK_128X128, rule, True, False)
    return a[0], b[0], a[1], b[1]  # type: ignore[return-value]


def fitted(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """These operands, scale_a smaller by a power of two where float16 would not hold their product.

    No sum of some of an output's terms is larger than that of their magnitudes, which becomes 2^15 or less; the other
    half of float16's range (65504) is left to a bias and to errors. Codes and relative errors stay what they are.
    """
    largest = float(of_magnitudes(a, b, scale_a, scale_b).max())
    return a, b, scale_a * 2.0 ** min(0, math.floor(math.log2(2.0**15 / largest))), scale_b


def bound_of(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> tuple[Tensor, Tensor]:
    """(exact product, how far a promoted sum may be from it), both float64 [M, N].

    Within a block of 128 as `product_bound` derives it. Then, a block: the product of two scales, that with the partial
    sum, and its addition, each rounded once in float32: 2^-24 of the partial sum twice, and of the sum so far.
    """
    exact = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64, device=a.device)
    bound = torch.zeros_like(exact)
    for block in range(a.shape[1] // 128):
        part = slice(128 * block, 128 * block + 128)
        rows = scale_a[block].double()[:, None]
        if is_by_row(scale_b, b):
            columns = scale_b[block].double()
        else:
            columns = scale_b[:, block].double().repeat_interleave(128)[: b.shape[0]]
        inner, _ = product_bound(a[:, part], b[:, part], True)
        partial = (decode(a[:, part], torch.float64) @ decode(b[:, part], torch.float64).t()) * rows * columns
        exact += partial
        bound += inner * rows * columns + 2.0**-24 * (2 * partial.abs() + exact.abs() + bound)
    return exact, bound


def one_product(kind: str, m: int, k: int, n: int, dtype: torch.dtype, with_bias: bool, rule: ScaleRule) -> Result:
    """Native and emulated against the exact product, in units of the bound (1 and less is right)."""
    a, b, scale_a, scale_b = operands(m, k, n, kind, rule)
    if dtype == torch.float16:
        a, b, scale_a, scale_b = fitted(a, b, scale_a, scale_b)
    bias = torch.randn(b.shape[0], device="cuda").to(torch.bfloat16) if with_bias else None
    exact, bound = bound_of(a, b, scale_a, scale_b)
    addend = 0.0 if bias is None else bias.double()
    # Emulation multiplies decoded values, each rounded once if its scale is no power of two, and sums K of them.
    emulated_bound = bound + 2.0**-24 * (a.shape[1] + 3) * of_magnitudes(a, b, scale_a, scale_b)
    info = torch.finfo(dtype)
    rounding = (exact + addend).abs() * (info.eps / 2 + 2 * 2.0**-24) + info.tiny * info.eps
    result: Result = {"native": blockwise.runs_natively(a, b)}
    worst = 0.0
    products = {
        "native": (lambda: scaled_mm(a, b, scale_a, scale_b, bias, dtype, "precise"), bound),
        "emulated": (
            lambda: blockwise.block_scaled_mm_reference(a, b, scale_a, scale_b, bias, dtype),
            emulated_bound,
        ),
    }
    for name, (product, allowed) in products.items():
        error = (product().double() - (exact + addend)).abs()
        result[f"{name}_worst"] = round(float((error / (allowed * (1 + info.eps) + rounding)).max()), 5)
        result[f"{name}_relative"] = float(f"{float(error.norm() / (exact + addend).norm()):.3g}")
        worst = max(worst, result[f"{name}_worst"])
    # Independent steps of 32, four a promotion: sqrt(11 * 4) 2^-13 in the root mean square, then the output's rounding.
    result["allowed_relative"] = float(f"{math.sqrt(44) * 2.0**-13 + info.eps / 2 + 4 * 2.0**-24:.3g}")
    ok = result["native"] and worst <= 1 and result["native_relative"] <= result["allowed_relative"]
    return result | {"ok": ok}


def of_magnitudes(codes_a: Tensor, codes_b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """The product of magnitudes, float64 [M, N]."""
    a, b = decode(codes_a, torch.float64).abs(), decode(codes_b, torch.float64).abs()
    return (a * expanded(scale_a, codes_a)) @ (b * expanded(scale_b, codes_b)).t()


def check_products(checks: Checks) -> None:
    """The three products, K of any number of blocks, ragged M and N, every output dtype."""
    for kind in ("fprop", "dgrad", "wgrad"):
        for shape in ((256, 512, 384), (7, 100, 33), (200, 384, 144), (144, 1152, 272), (130, 5000, 520)):
            for dtype in (torch.bfloat16, torch.float32, torch.float16):
                for with_bias in (False, True) if kind == "fprop" else (False,):
                    if shape[1] == 5000 and (dtype != torch.bfloat16 or with_bias):
                        continue
                    call = functools.partial(one_product, kind, *shape, dtype, with_bias, ScaleRule())
                    checks.run("product", call, kind=kind, shape=shape, out_dtype=str(dtype), bias=with_bias)
    for kind in ("fprop", "wgrad"):
        checks.run("same-sign bias", functools.partial(same_sign, kind), kind=kind)


def same_sign(kind: str) -> Result:
    """Positive data over K = 16384: promoted sums lose less than 0.2 %."""
    x, y = (torch.rand(16384, 256, device="cuda") + 0.5 for _ in range(2))
    blocks = BLOCK_1X128 if kind == "wgrad" else BLOCK_128X128
    a = block_cast(x, E4M3, BLOCK_1X128, POWER_OF_TWO, False, True)
    b = block_cast(y, E4M3, blocks, POWER_OF_TWO, False, True)
    arguments = (a[2], b[2], a[3], b[3], None, torch.float32)
    ratio = scaled_mm(*arguments, "precise").double().mean() / blockwise.block_scaled_mm_reference(*arguments).mean()
    return {"bias": float(ratio - 1), "ok": abs(float(ratio - 1)) < 0.002}


def variants() -> Iterator[tuple[str, Callable[[], Tensor], Callable[[], Tensor]]]:
    """(name, what is tried, what it should be) of products that may not exist."""
    a, b, scale_a, scale_b = fitted(*operands(256, 512, 384, "fprop"))
    one, two = blockwise._1X128, blockwise._128X128
    bias = torch.randn(384, device="cuda")

    def tried(dtype: torch.dtype, fast: bool = False, inside: Tensor | None = None) -> Tensor:
        return torch._scaled_mm_v2(a, b.t(), [scale_a.t()], one, [], [scale_b.t()], two, [], inside, dtype, (), fast)

    def expected(dtype: torch.dtype, added: Tensor | None = None) -> Tensor:
        return blockwise.block_scaled_mm_reference(a, b, scale_a, scale_b, added, dtype)

    for dtype in (torch.bfloat16, torch.float16):
        inside = bias.to(dtype)
        yield (
            f"bias inside, {dtype}",
            lambda d=dtype, i=inside: tried(d, inside=i),
            lambda d=dtype, i=inside: expected(d, i),
        )
    yield (
        "bias bfloat16 inside, float32",
        lambda: tried(torch.float32, inside=bias.bfloat16()),
        lambda: expected(torch.float32, bias.bfloat16()),
    )
    yield "fast accumulation", lambda: tried(torch.bfloat16, True), lambda: expected(torch.bfloat16)
    yield (
        "the older operator",
        lambda: torch._scaled_mm(a, b.t(), scale_a.t(), scale_b.t(), out_dtype=torch.bfloat16),
        lambda: expected(torch.bfloat16),
    )
    gradients = (torch.randn(256, 512, device="cuda") * 8).to(E5M2.dtype)
    yield (
        "E5M2, the older operator",
        lambda: torch._scaled_mm(gradients, b.t(), scale_a.t(), scale_b.t(), out_dtype=torch.bfloat16),
        lambda: blockwise.block_scaled_mm_reference(gradients, b, scale_a, scale_b, None, torch.bfloat16),
    )


def check_variants(checks: Checks) -> None:
    """What cuBLASLt has beside what is used."""

    def one(call: Callable[[], Tensor], expected: Callable[[], Tensor]) -> Result:
        try:
            found, right = call().double(), expected().double()
        except Exception as error:
            return {"ok": True, "outcome": f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"}
        return {"ok": True, "outcome": f"relative error {float((found - right).norm() / right.norm()):.3g}"}

    for name, call, expected in variants():
        checks.run("variant", functools.partial(one, call, expected), variant=name)


def check_linear(shape: tuple[int, int, int], dtype: torch.dtype) -> Result:
    """SQNR against float32, native products, and how far the device is from the CPU's emulation.

    Codes are the same bits, so they differ by accumulation, 8.1e-4 in the root mean square (`one_product`), and by the
    roundings of two outputs.
    """
    m, k, n = shape
    torch.manual_seed(0)
    layer = octavo.Linear(k, n)
    torch.nn.init.normal_(layer.weight)
    x, dy = torch.randn(m, k), torch.randn(m, n)
    exact = run(layer, x, dy, None)
    layer, x, dy = layer.to(dtype), x.to(dtype), dy.to(dtype)
    emulated = run(copy.deepcopy(layer), x, dy, BlockScaling())
    with octavo.count_gemms() as counted:
        native = [t.float().cpu() for t in run(layer.cuda(), x.cuda(), dy.cuda(), BlockScaling())]
    result: Result = {"native": all(precision == "fp8" for *_, precision in counted.entries), "gemms": counted.fp8}
    ok = result["native"] and counted.fp8 == 3
    bound = math.sqrt(44) * 2.0**-13 + 2 * torch.finfo(dtype).eps / math.sqrt(3)
    for name, true, on_cpu, on_gpu in zip(("y", "dx", "dw", "db"), exact, emulated, native, strict=True):
        result[f"{name}_sqnr_db"] = round(sqnr_db(true, on_gpu), 2)
        apart = float((on_gpu - on_cpu.float()).norm() / on_cpu.float().norm())
        result[f"{name}_cpu_gpu"] = float(f"{apart:.3g}")
        ok &= result[f"{name}_sqnr_db"] >= (28.0 if name != "db" else 40.0) and apart <= bound
    return result | {"ok": ok, "bound": float(f"{bound:.3g}")}


def check_compiled() -> Result:
    """One layer compiled as one graph, forward and backward, against eager: the same bits where nothing is fused."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = octavo.Linear(256, 528, recipe=BlockScaling()).cuda().bfloat16()
    x, dy = torch.randn(200, 256, device="cuda").bfloat16(), torch.randn(200, 528, device="cuda").bfloat16()
    outs = []
    for call in (layer, torch.compile(layer, fullgraph=True)):
        xx = x.clone().requires_grad_()
        y = call(xx)
        outs.append((y, *torch.autograd.grad(y, [xx, layer.weight, layer.bias], dy)))
    return {"ok": all(torch.equal(a, b) for a, b in zip(*outs, strict=True))}


def main() -> int:
    """Run all checks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/check_blocks.jsonl"))
    parser.add_argument("--seconds", type=float, default=120, help="start no check after this long (default 120)")
    parser.add_argument("--commit", help="for the record, where git does not know it")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to check")
        return 2
    torch.manual_seed(0)
    checks = Checks(environment(options.commit), options.seconds)
    check_variants(checks)
    check_products(checks)
    for shape in ((512, 1024, 2048), (300, 200, 136)):
        for dtype in (torch.bfloat16, torch.float32):
            checks.run("linear", functools.partial(check_linear, shape, dtype), shape=shape, dtype=str(dtype))
    for shape in SPEED_SHAPES:
        checks.run("linear time", functools.partial(time_linear, *shape), shape=shape)
        checks.run("gradients time", functools.partial(time_gradients, *shape), shape=shape)
    for warps in (4, 8, 16):
        checks.run("cast speed", functools.partial(time_casts, warps), warps=warps)
    checks.run("compiled", check_compiled)
    check_casts(checks)
    checks.write(options.out)
    print(f"{len(checks.records)} checks, {checks.failed} failed; {options.out}")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
