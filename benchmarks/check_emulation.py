"""`octavo.emulation("hopper")` against the products of an FP8 tensor core, bit by bit, on a Hopper GPU.

    python benchmarks/check_emulation.py --out build/check_emulation.jsonl

Each case is a shape, the data, the formats, what is compared and how it accumulates: the bare accumulator in float32,
and outputs in bfloat16 under one scale, scales by row and scales by block. A line says which share of the elements is
equal, NaN to NaN; a case passes if all are. The emulation runs on the same GPU.

Of what differs other readings are tried, and the shares that they reach recorded as `other`. Of an accumulator: K split
into runs of whole blocks of 128 whose sums are added in float32, as cuBLASLt does for small outputs, and promotion
after another number of elements. Of outputs by row: the scales in another order. Of outputs by block: K split.

One JSON line a case (hardware, versions, commit). Exit status 1 if a case differs, 2 without a CUDA device.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
# ruff: noqa: E402, I001, T201

import torch
from torch import Tensor

from benchmarks.check_kernels import Checks, environment
from octavo.formats import E4M3, E5M2, Format, cast
from octavo.kernels import ScaleRule
from octavo.kernels.block_cast import block_cast
from octavo.kernels.block_cast.layout import expanded
from octavo.kernels.scaled_mm import hopper, scaled_mm, scaled_mm_hopper
from octavo.kernels.scaled_mm.blockwise import block_scaled_mm_hopper
from octavo.kernels.scaled_mm.hopper import PROMOTED, hopper_sum
from octavo.scaling import BLOCK_1X128, BLOCK_128X128

Result = dict[str, Any]
# M, K, N: one step; few blocks; outputs too small to fill the card; outputs that fill it; a long K; no whole tile.
SHAPES = (
    (64, 32, 64), (256, 384, 256), (128, 8192, 128), (1024, 4096, 1024), (4096, 1024, 4096), (2048, 16384, 2048),
    (1000, 1040, 2000),
)  # fmt: skip
DATA = ("normal", "one sign", "heavy tails")
PAIRS = ((E4M3, E4M3), (E5M2, E4M3))
KINDS = ("accumulator", "tensor", "row")
SPLITS = (2, 3, 4, 5, 6, 8, 12, 16)
PERIODS = (32, 64, 256, 512)


def drawn(kind: str, rows: int, inner: int, device: str) -> Tensor:
    """Values of a kind of data, float32 [rows, inner]."""
    x = torch.randn(rows, inner, device=device)
    if kind == "one sign":
        return x.abs()
    return x * torch.exp(2 * torch.randn_like(x)) if kind == "heavy tails" else x


def codes_of(x: Tensor, format: Format) -> Tensor:
    """Codes under one scale, which brings the largest magnitude to the format's."""
    return cast(x * (format.max / x.abs().max()), format)


def share(found: Tensor, expected: Tensor) -> float:
    """Of elements that are equal, or both NaN."""
    return float(((found == expected) | (found.isnan() & expected.isnan())).double().mean())


def split_sum(a: Tensor, b: Tensor, promoted: bool, parts: int) -> Tensor:
    """K in so many runs of whole blocks, their sums added one after the other."""
    blocks = -(-a.shape[1] // PROMOTED)
    length = -(-blocks // parts) * PROMOTED
    out = torch.zeros(a.shape[0], b.shape[0], device=a.device)
    for start in range(0, a.shape[1], length):
        out += hopper_sum(a[:, start : start + length], b[:, start : start + length], promoted)
    return out


def other_readings(a: Tensor, b: Tensor, promoted: bool, found: Tensor) -> dict[str, float]:
    """The shares that they reach; of the rows that fit a small part of the time."""
    a, found = a[:128], found[:128]
    shares = {f"K split by {parts}": share(found, split_sum(a, b, promoted, parts)) for parts in SPLITS}
    for period in PERIODS if promoted else ():
        with patch.object(hopper, "PROMOTED", period):
            shares[f"promoted every {period}"] = share(found, hopper_sum(a, b, True))
    shares["the other accumulation"] = share(found, hopper_sum(a, b, not promoted))
    return {name: round(value, 6) for name, value in shares.items() if value > 0}


def one_accumulator(a: Tensor, b: Tensor, accumulate: str) -> Result:
    """The sums themselves: scales of one, float32."""
    one = torch.ones((), device=a.device)
    found = torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32, use_fast_accum=accumulate == "fast")
    expected = hopper_sum(a, b, accumulate == "precise")
    equal = share(found, expected)
    worst = float(((found - expected).abs() / expected.abs().clamp(min=torch.finfo(torch.float32).tiny)).max())
    other = {} if equal == 1 else {"other": other_readings(a, b, accumulate == "precise", found)}
    return {"equal": equal, "worst_relative": worst} | other


def one_output(a: Tensor, b: Tensor, kind: str, accumulate: Any) -> Result:
    """What `scaled_mm` gives in bfloat16, scales no powers of two."""
    if kind == "row":
        scale_a, scale_b = (torch.rand(len(codes), 1, device=a.device) + 0.5 for codes in (a, b))
    else:
        scale_a, scale_b = torch.tensor(0.013, device=a.device), torch.tensor(0.7, device=a.device)
    found = scaled_mm(a, b, scale_a, scale_b, None, torch.bfloat16, accumulate)
    result: Result = {"equal": share(found, scaled_mm_hopper(a, b, scale_a, scale_b, None, torch.bfloat16, accumulate))}
    if kind == "tensor" and result["equal"] < 1:
        sums = {f"K split by {parts}": split_sum(a, b, accumulate == "precise", parts) for parts in SPLITS}
        result["other"] = {name: share(found, (out * (scale_a * scale_b)).bfloat16()) for name, out in sums.items()}
    if kind == "row" and result["equal"] < 1:
        bare = hopper_sum(a, b, accumulate == "precise")
        result["other"] = {
            "both scales at once": share(found, (bare * (scale_b.t() * scale_a)).bfloat16()),
            "scale_a, then scale_b": share(found, (bare * scale_a * scale_b.t()).bfloat16()),
        }
    return result


def one_block_output(x: Tensor, w: Tensor, by_square: bool, power_of_two: bool) -> Result:
    """A product by block, x of 1x128, w of either kind."""
    rule = ScaleRule(power_of_two=power_of_two)
    a, scale_a = block_cast(x, E4M3, BLOCK_1X128, rule, columnwise=False)[:2]
    b, scale_b = block_cast(w, E4M3, BLOCK_128X128 if by_square else BLOCK_1X128, rule, columnwise=False)[:2]
    assert a is not None and scale_a is not None and b is not None and scale_b is not None  # noqa: PT018
    found = scaled_mm(a, b, scale_a, scale_b, None, torch.bfloat16, "precise")
    result: Result = {"equal": share(found, block_scaled_mm_hopper(a, b, scale_a, scale_b, None, torch.bfloat16))}
    if result["equal"] < 1:
        of_a, of_b = (expanded(scale, codes)[:, ::PROMOTED].t() for scale, codes in ((scale_a, a), (scale_b, b)))
        result["other"] = block_readings(a, b, of_a, of_b, by_square, found)
    return result


def block_readings(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, joined: bool, found: Tensor) -> dict[str, float]:
    """Of products by block whose K is split; `of_a`, `of_b`: scales [K / 128, M] and [K / 128, N]."""
    blocks, shares = a.shape[1] // PROMOTED, {}
    for parts in SPLITS:
        length = -(-blocks // parts)
        out = torch.zeros(a.shape[0], b.shape[0], device=a.device)
        for first in range(0, blocks, length):
            run, of_k = slice(first, first + length), slice(first * PROMOTED, (first + length) * PROMOTED)
            out += hopper_sum(a[:, of_k], b[:, of_k], True, of_a[run], of_b[run], joined=joined)
        shares[f"K split by {parts}"] = share(found, out.bfloat16())
    return shares


def cases() -> Iterator[tuple[tuple[int, int, int], str]]:
    """Shapes by data."""
    return itertools.product(SHAPES, DATA)


def check_products(checks: Checks, device: str) -> None:
    """Accumulators and outputs under one scale and scales by row."""
    for (m, k, n), data in cases():
        x, w = drawn(data, m, k, device), drawn(data, n, k, device)
        for formats, kind, accumulate in itertools.product(PAIRS, KINDS, ("fast", "precise")):
            # The other pair of formats shows in the accumulators.
            if formats != PAIRS[0] and kind != "accumulator":
                continue

            def product(x: Tensor = x, w: Tensor = w, formats: Any = formats, kind: str = kind, how: str = accumulate):
                a, b = codes_of(x, formats[0]), codes_of(w, formats[1])
                result = one_accumulator(a, b, how) if kind == "accumulator" else one_output(a, b, kind, how)
                return result | {"ok": result["equal"] == 1}

            about = {"data": data, "formats": f"{formats[0]}x{formats[1]}", "accumulate": accumulate}
            checks.run(kind, product, shape=[m, k, n], **about)


def check_blocks(checks: Checks, device: str) -> None:
    """Outputs under scales by block."""
    for ((m, k, n), data), by_square in itertools.product(cases(), (False, True)):
        if k % PROMOTED or n % 16:
            continue
        x, w = drawn(data, m, k, device), drawn(data, n, k, device)
        for power_of_two in (True, False):

            def product(x: Tensor = x, w: Tensor = w, by_square: bool = by_square, power_of_two: bool = power_of_two):
                result = one_block_output(x, w, by_square, power_of_two)
                return result | {"ok": result["equal"] == 1}

            about = {"data": data, "scale_b": "128x128" if by_square else "1x128", "power_of_two": power_of_two}
            checks.run("block", product, shape=[m, k, n], **about)


def main() -> int:
    """Run everything; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON lines go")
    parser.add_argument("--seconds", type=float, default=200.0, help="start no case after this long (default 200)")
    parser.add_argument("--commit", help="for the record, where git does not know it")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: this check compares an emulation with a GPU", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    checks = Checks(environment(options.commit), options.seconds)
    print("  ".join(f"{key} {value}" for key, value in checks.environment.items()), flush=True)
    for part in (check_products, check_blocks):
        part(checks, "cuda")
        checks.write(options.out)
    shares = [record["equal"] for record in checks.records if "equal" in record]
    print(
        f"{len(checks.records)} cases, {checks.failed} differ; {sum(s == 1 for s in shares)} of {len(shares)} are equal"
    )
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
