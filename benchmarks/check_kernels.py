"""Every Triton kernel against its PyTorch reference, bit for bit, and its speed against copy, on a CUDA device.

    python benchmarks/check_kernels.py --out build/check_kernels.jsonl

Each check is recorded as one JSON line (hardware, versions, commit, check, shape, mismatches or TB/s); one that raises
is recorded with its error, and the others go on. Exit status 1 if any check failed, 2 if there is no CUDA device.

NaN counts as bits too: Octavo writes one NaN code. Of products, native and emulated differ by the tensor core's
accumulator; the bound is derived at `product_bound`.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
# ruff: noqa: E402, I001, T201

import torch
from torch import Tensor

from octavo.formats import E4M3, E5M2, Format, cast, decode
from octavo.kernels.amax import amax, amax_reference
from octavo.kernels.cast_transpose import cast_transpose, cast_transpose_reference
from octavo.kernels.scale_from_amax import scale_from_amax, scale_from_amax_reference
from octavo.kernels.scaled_mm import scaled_mm, scaled_mm_reference
from octavo.scaling import COLUMN, ROW, TENSOR
from benchmarks.kernel_speed import sweep, time_host, time_kernels
from tests.formats.edge_values import edge_matrix, random_bits, special_float32

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMATS = (E4M3, E5M2)
SHAPES = ((1, 1), (1, 333), (257, 1), (7, 13), (16, 16), (128, 128), (200, 130), (8192, 48), (24, 9000), (1024, 1000))
TEN_MILLION = (3163, 3163)
Result = dict[str, Any]


class Checks:
    """Runs checks one by one, prints a line each, keeps a record each."""

    def __init__(self, environment: Result, seconds: float) -> None:
        self.environment, self.deadline, self.records = environment, time.monotonic() + seconds, []
        self.failed = 0

    def run(self, name: str, check: Callable[[], Result], **about: Any) -> None:
        """One check; it returns its figures, of which `mismatches` or `ok` says whether it passed."""
        started = time.monotonic()
        if started > self.deadline:
            result: Result = {"ok": None, "skipped": "out of time"}
        else:
            try:
                result = check()
                result.setdefault("ok", result.get("mismatches", 0) == 0)
            except Exception as error:
                result = {"ok": False, "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        result["seconds"] = round(time.monotonic() - started, 3)
        self.records.append(self.environment | {"check": name} | about | result)
        self.failed += result["ok"] is False
        figures = {key: value for key, value in (about | result).items() if key not in ("ok", "traceback")}
        mark = {True: "ok  ", False: "FAIL", None: "skip"}[result["ok"]]
        print(f"{mark} {name:<28} {'  '.join(f'{key}={value}' for key, value in figures.items())}", flush=True)

    def write(self, path: Path) -> None:
        """All records, one JSON object a line."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text("".join(json.dumps(record) + "\n" for record in self.records))
        partial.replace(path)


def environment(commit: str | None = None) -> Result:
    """What the figures belong to; `commit` where git cannot tell it."""
    import triton

    return {
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "commit": commit or _commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _commit() -> str:
    try:
        command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def differing(a: Tensor | None, b: Tensor | None) -> int:
    """How many bytes or floats differ in their bits; another shape or a missing tensor counts as everything."""
    if a is None or b is None:
        return 0 if a is b else 1
    if a.shape != b.shape or a.dtype != b.dtype:
        return max(a.numel(), b.numel(), 1)
    width = {1: torch.uint8, 4: torch.int32}[a.dtype.itemsize]
    return int((a.contiguous().view(width) != b.to(a.device).contiguous().view(width)).sum())


def compare(outputs: Any, expected: Any) -> Result:
    """Mismatches over all outputs of a kernel."""
    return {"mismatches": sum(differing(a, b) for a, b in zip(outputs, expected, strict=True))}


def layouts(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same values in memory orders that callers have."""
    rows, columns = x.shape
    yield "contiguous", x
    yield "transposed", x.t().contiguous().t()
    wide = x.new_zeros(rows, 2 * columns)
    wide[:, ::2] = x
    yield "strided", wide[:, ::2]
    flat = x.new_zeros(x.numel() + 1)
    flat[1:] = x.flatten()
    yield "offset", flat[1:].view(rows, columns)


def multipliers(x: Tensor, kind: str) -> tuple[Tensor | None, Tensor | None]:
    """(multiplier, multiplier_t) of a kind, neither of them a power of two."""
    scalar = torch.tensor(1.7, device=x.device)
    by_row = torch.rand(x.shape[0], 1, device=x.device) * 3 + 0.1
    by_column = torch.rand(1, x.shape[1], device=x.device) * 3 + 0.1
    return {
        "shared": (scalar, scalar),
        "codes only": (scalar, None),
        "transposed only": (None, scalar),
        "amax only": (None, None),
        "row and column": (by_row, by_column),
        "row and scalar": (by_row, scalar),
    }[kind]


def distributions(dtype: torch.dtype, device: str) -> Iterator[tuple[str, Tensor]]:
    """Ten million values of each kind."""
    yield "normal", torch.randn(TEN_MILLION, device=device).to(dtype)
    yield (
        "wide",
        (torch.randn(TEN_MILLION, device=device) * torch.randn(TEN_MILLION, device=device).mul(4).exp()).to(dtype),
    )
    yield "uniform", (torch.rand(TEN_MILLION, device=device) * 1000 - 500).to(dtype)
    yield "random bits", random_bits(TEN_MILLION, dtype, device)


def check_casts(checks: Checks, device: str) -> None:
    """Edge values against the CPU's reference; the others against the same reference on the device."""
    for dtype in DTYPES:
        for format in FORMATS:
            # Whole blocks of 128 x 128, which are compiled apart from those at an edge.
            values = edge_matrix(format, dtype).flatten()
            x = values.repeat(-(-(2**14) // len(values)))[: max(2**14, len(values) // 2**14 * 2**14)].view(-1, 128)
            for inf_to_nan in (False, True):

                def edges(x: Tensor = x, format: Format = format, inf_to_nan: bool = inf_to_nan) -> Result:
                    one, other = torch.ones(()), torch.tensor(0.37)
                    result = {"mismatches": 0, "reference_mismatches": 0}
                    for pair in ((one, other), (one, one)):
                        expected = cast_transpose_reference(x, format, *pair, inf_to_nan)
                        m, m_t = one.to(device), other.to(device)
                        on_device = (m, m if pair[1] is one else m_t)
                        found = cast_transpose(x.to(device), format, *on_device, inf_to_nan=inf_to_nan)
                        reference = cast_transpose_reference(x.to(device), format, *on_device, inf_to_nan)
                        result["mismatches"] += compare(found, expected)["mismatches"]
                        result["reference_mismatches"] += compare(reference, expected)["mismatches"]
                    return result | {"ok": not any(result.values())}

                about = {"format": format.name, "dtype": str(dtype), "inf_to_nan": inf_to_nan}
                checks.run("cast edges", edges, shape=list(x.shape), **about)
    for dtype in DTYPES:
        for kind, x in distributions(dtype, device):
            for format in FORMATS:

                def many(x: Tensor = x, format: Format = format) -> Result:
                    pair = multipliers(x, "row and column")
                    return compare(cast_transpose(x, format, *pair), cast_transpose_reference(x, format, *pair, False))

                checks.run(
                    "cast 10 million", many, shape=list(x.shape), dtype=str(dtype), format=format.name, kind=kind
                )


def check_shapes(checks: Checks, device: str) -> None:
    """Every shape in every memory order, bf16; each kind of multiplier; amaxes of every granularity."""
    kinds = ("shared", "row and column", "codes only", "transposed only", "row and scalar", "amax only")
    for shape in (*SHAPES, (0, 32), (32, 0)):

        def casts(shape: tuple[int, int] = shape) -> Result:
            mismatches = 0
            for _, x in layouts(torch.randn(shape, device=device).to(torch.bfloat16)):
                for kind in kinds if shape == (200, 130) else kinds[:2]:
                    pair = multipliers(x, kind)
                    expected = cast_transpose_reference(x, E4M3, *pair, False)
                    mismatches += compare(cast_transpose(x, E4M3, *pair), expected)["mismatches"]
            return {"mismatches": mismatches}

        checks.run("cast shapes", casts, shape=list(shape))
    for dtype in DTYPES:

        def whole_blocks(dtype: torch.dtype = dtype) -> Result:
            mismatches = 0
            for shape in ((128, 128), (256, 384), (520, 1000)):
                x = torch.randn(shape, device=device).to(dtype)
                for kind in kinds:
                    for format in FORMATS:
                        pair = multipliers(x, kind)
                        expected = cast_transpose_reference(x, format, *pair, False)
                        mismatches += compare(cast_transpose(x, format, *pair), expected)["mismatches"]
            return {"mismatches": mismatches}

        checks.run("cast dtypes", whole_blocks, dtype=str(dtype))
    for dtype in DTYPES:
        for granularity in (TENSOR, ROW, COLUMN):

            def amaxes(dtype: torch.dtype = dtype, granularity: Any = granularity) -> Result:
                mismatches = 0
                for shape in (*SHAPES, (0, 32), (32, 0)):
                    for _, x in layouts(random_bits(shape, dtype, device)):
                        mismatches += differing(amax(x, granularity), amax_reference(x, granularity))
                return {"mismatches": mismatches}

            checks.run("amax shapes", amaxes, dtype=str(dtype), granularity=granularity.name)
        x = random_bits(TEN_MILLION, dtype, device)
        for granularity in (TENSOR, ROW, COLUMN):
            checks.run(
                "amax 10 million",
                lambda x=x, g=granularity: {"mismatches": differing(amax(x, g), amax_reference(x, g))},
                shape=list(x.shape), dtype=str(dtype), granularity=granularity.name,
            )  # fmt: skip


def check_scales(checks: Checks, device: str) -> None:
    """scale_from_amax of edges and of ten million random finite floats, against the CPU's reference."""
    special = special_float32().abs()
    tiny = torch.tensor([1e-37, 1e-40, 3e38, 1e-3])
    values = torch.cat([special, tiny, random_bits((10_000_000,), torch.float32).abs()])
    values = values[values.isfinite()]
    for format in FORMATS:
        for epsilon, power_of_two in ((0.0, False), (0.0, True), (1e-3, False)):

            def scales(format: Format = format, epsilon: float = epsilon, power_of_two: bool = power_of_two) -> Result:
                expected = scale_from_amax_reference(values, format, epsilon, power_of_two)
                return compare(scale_from_amax(values.to(device), format, epsilon, power_of_two), expected)

            about = {"format": format.name, "epsilon": epsilon, "power_of_two": power_of_two}
            checks.run("scale_from_amax", scales, shape=list(values.shape), **about)


def check_compiled(checks: Checks, device: str) -> None:
    """One graph, the same bits."""

    def compiled() -> Result:
        x = torch.randn(200, 130, device=device, dtype=torch.bfloat16)

        def quantize(x: Tensor) -> Any:
            multiplier, scale = scale_from_amax(amax(x), E4M3)
            return *cast_transpose(x, E4M3, multiplier, multiplier), multiplier, scale

        return compare(torch.compile(quantize, fullgraph=True, backend="aot_eager")(x), quantize(x))

    checks.run("compiled", compiled, shape=[200, 130])


def check_large(checks: Checks, device: str) -> None:
    """More than 2^31 elements, compared slice by slice."""

    def large() -> Result:
        rows, columns = 65600, 32776
        x = torch.empty(rows, columns, dtype=torch.bfloat16, device=device).normal_()
        x[-1, -1] = 1e4
        scalar = torch.tensor(1.7, device=device)
        codes, codes_t, largest = cast_transpose(x, E4M3, scalar, scalar)
        assert codes is not None
        assert codes_t is not None
        mismatches = differing(largest, x.new_tensor(x[-1, -1].item(), dtype=torch.float32))
        mismatches += differing(amax(x), largest) + differing(amax(x, ROW)[-1, 0], largest)
        mismatches += differing(amax(x, COLUMN)[0, -1], largest)
        for first in range(0, rows, 8192):
            last = min(first + 8192, rows)
            expected, expected_t, _ = cast_transpose_reference(x[first:last], E4M3, scalar, scalar, False)
            mismatches += differing(codes[first:last], expected[: last - first])
            mismatches += differing(codes_t[:, first:last], expected_t[:, : last - first])
        mismatches += int(codes[:, columns:].float().count_nonzero() + codes_t[columns:].float().count_nonzero())
        return {"mismatches": mismatches, "elements": x.numel()}

    free, _ = torch.cuda.mem_get_info()
    if free > 40 * 2**30:
        checks.run("more than 2^31 elements", large, shape=[65600, 32776], dtype="torch.bfloat16")
    torch.cuda.empty_cache()


def product_bound(a: Tensor, b: Tensor, precise: bool) -> tuple[Tensor, float]:
    """How far Hopper's accumulator may be from the exact product -> (bound [M, N], relative Frobenius bound).

    The tensor core adds 32 products and the accumulator at a time: 33 terms, each cut off at 2^-13 of the power of two
    of the largest, which is at most the larger of |accumulator| and the largest product. Summed over the steps of K,
    that bounds each element, whatever the data. "precise" moves the accumulator to float32 every 128 of K, so the
    accumulator starts from zero every fourth step.

    For independent zero-mean data the errors of the steps are independent too: a cut-off term is wrong by a uniform
    u in [0, 2^-13 A), of second moment (2^-13 A)^2 / 3, so T steps give sqrt(33 T / 3) 2^-13 A in the root mean square,
    A at most the final accumulator's, and the cut-offs' mean averages out with the signs of the terms.
    """
    steps = a.shape[1] // 32
    a64, b64 = decode(a, torch.float64), decode(b, torch.float64)
    bound = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64, device=a.device)
    accumulator = torch.zeros_like(bound)
    for step in range(steps):
        block = slice(32 * step, 32 * step + 32)
        if precise and step % 4 == 0:
            accumulator = torch.zeros_like(bound)
        largest = a64[:, block].abs().amax(1, keepdim=True) * b64[:, block].abs().amax(1)
        bound += 33 * 2.0**-13 * torch.maximum(accumulator.abs() + bound, largest)
        accumulator = accumulator + a64[:, block] @ b64[:, block].t()
    return bound, math.sqrt(11 * steps) * 2.0**-13


def check_products(checks: Checks, device: str) -> None:
    """Native products against exact ones, tensor and row scales, every output dtype, with and without a bias."""
    rows, inner, columns = 256, 512, 384
    for format_a, format_b in ((E4M3, E4M3), (E5M2, E4M3)):
        a = cast(torch.randn(rows, inner, device=device) * 8, format_a)
        b = cast(torch.randn(columns, inner, device=device) * 8, format_b)
        for by_row in (False, True):
            scale_a = torch.rand(rows, 1, device=device) + 0.5 if by_row else torch.tensor(0.013, device=device)
            scale_b = torch.rand(columns, 1, device=device) + 0.5 if by_row else torch.tensor(0.7, device=device)
            for out_dtype in (torch.bfloat16, torch.float16, torch.float32):
                for with_bias in (False, True):
                    for accumulate in ("fast", "precise"):
                        bias = torch.randn(columns, device=device).to(torch.bfloat16) if with_bias else None
                        arguments = (a, b, scale_a, scale_b, bias, out_dtype, accumulate)
                        about = {"formats": f"{format_a}x{format_b}", "by_row": by_row, "bias": with_bias}
                        about |= {"out_dtype": str(out_dtype), "accumulate": accumulate}
                        shape = [rows, inner, columns]
                        checks.run("product", lambda args=arguments: one_product(*args), shape=shape, **about)


def one_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, dtype: torch.dtype, accumulate: Any
) -> Result:
    """Native and emulated against the exact product, in units of the bound (1 and less is right)."""
    scales = scale_a.double() * (scale_b.double().t() if scale_b.dim() else scale_b.double())
    exact = (decode(a, torch.float64) @ decode(b, torch.float64).t()) * scales
    addend = 0.0 if bias is None else bias.double()
    bound, frobenius = product_bound(a, b, accumulate == "precise")
    # Then the scaling, the bias and the output are rounded: half an ulp of the output, a few of float32 before; an
    # output below the dtype's normal numbers has at most its smallest normal times eps.
    info = torch.finfo(dtype)
    magnitude = exact.abs() + (0.0 if bias is None else bias.double().abs())
    bound = bound * scales + magnitude * (info.eps / 2 + 4 * 2.0**-24) + info.tiny * info.eps
    frobenius = frobenius + info.eps / 2 + 4 * 2.0**-24
    result: Result = {}
    for name, product in (("native", scaled_mm), ("emulated", scaled_mm_reference)):
        error = (product(a, b, scale_a, scale_b, bias, dtype, accumulate).double() - (exact + addend)).abs()
        result[f"{name}_worst"] = round(float((error / bound).max()), 5)
        result[f"{name}_relative"] = float(f"{float(error.norm() / (exact + addend).norm()):.3g}")
    relative = max(result["native_relative"], result["emulated_relative"])
    worst = max(result["native_worst"], result["emulated_worst"])
    return result | {"allowed_relative": float(f"{frobenius:.3g}"), "ok": worst <= 1 and relative <= frobenius}


PARTS: dict[str, Callable[[Checks, str], None]] = {
    "casts": check_casts,
    "shapes": check_shapes,
    "scales": check_scales,
    "compiled": check_compiled,
    "products": check_products,
    "speed": time_kernels,
    "host": time_host,
    "large": check_large,
    "sweep": sweep,
}


def main() -> int:
    """Run everything; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON lines go")
    parser.add_argument("--seconds", type=float, default=95.0, help="start no check after this long (default 95)")
    # Most of the time goes into compiling: several processes, each with its parts, share the work.
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS)[:-1], help="which parts (default: all but sweep)"
    )
    parser.add_argument("--commit", help="for the record, where git does not know it")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: this check compares Triton kernels on a GPU with their references", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    checks = Checks(environment(options.commit), options.seconds)
    print("  ".join(f"{key} {value}" for key, value in checks.environment.items()), flush=True)
    for name, part in PARTS.items():
        if name not in options.only:
            continue
        try:
            part(checks, "cuda")
        except Exception as error:  # making a check's inputs failed
            message = f"{type(error).__name__}: {error}"
            checks.run(name, lambda message=message: {"ok": False, "error": message})
        checks.write(options.out)
    skipped = sum(record["ok"] is None for record in checks.records)
    print(f"{len(checks.records)} checks, {checks.failed} failed, {skipped} skipped for want of time")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
