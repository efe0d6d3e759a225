"""Every Triton kernel against its PyTorch reference, bit for bit, and its speed against copy, on a CUDA device.

    python benchmarks/check_kernels.py --out build/check_kernels.jsonl

Each check is recorded as one JSON line (hardware, versions, commit, check, shape, mismatches or TB/s); one that raises
is recorded with its error, and the others go on. Exit status 1 if any check failed, 2 if there is no CUDA device.

NaN counts as bits too: Octavo writes one NaN code. Column sums are float32 sums in another order than the reference's;
the bound is derived in `check_reductions.py`. Products are in `check_products.py`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
# ruff: noqa: E402, I001, T201

import torch
from torch import Tensor

from octavo.formats import E4M3, E5M2, Format
from octavo.kernels.amax import amax_by_row_and_column, amax_reference, partial_amax
from octavo.kernels.cast_transpose import ScaleRule, cast_transpose, cast_transpose_reference, launch
from octavo.scaling import ROW, multiplier_from_amax, scale_from_multiplier
from octavo.study.environment import device_name, version_of
from benchmarks.check_products import check_products
from benchmarks.check_reductions import check_amaxes, check_sums, check_updates
from benchmarks.comparing import compare, differing
from benchmarks.kernel_inputs import AMAX_KINDS, DTYPES, NARROWLY_ALIGNED, RULES, SCALE_KINDS, SHAPES
from benchmarks.kernel_inputs import distributions, layouts, sources
from benchmarks.kernel_speed import sweep, time_host, time_kernels
from tests.formats.edge_values import edge_matrix, random_bits, special_float32

FORMATS = (E4M3, E5M2)
Result = dict[str, Any]


class Checks:
    """Runs checks one by one, prints a line each, keeps a record each; in the file `out`, if given, as they come."""

    def __init__(self, environment: Result, seconds: float, out: Path | None = None) -> None:
        self.environment, self.deadline, self.records = environment, time.monotonic() + seconds, []
        self.failed, self.out = 0, out

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
        if self.out is not None:
            self.write(self.out)
        figures = {key: value for key, value in (about | result).items() if key not in ("ok", "traceback")}
        mark = {True: "ok  ", False: "FAIL", None: "skip"}[result["ok"]]
        print(f"{mark} {name:<28} {'  '.join(f'{key}={value}' for key, value in figures.items())}", flush=True)

    def write(self, path: Path) -> None:
        """All records, one JSON object a line."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text("".join(json.dumps(record) + "\n" for record in self.records))
        partial.replace(path)


def environment(commit: str | None = None, device: str = "cuda") -> Result:
    """What the figures belong to; `commit` where git cannot tell it."""
    return {
        "hardware": device_name(torch.device(device)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": version_of("triton"),
        "commit": commit or _commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _commit() -> str:
    try:
        command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def one_cast(x: Tensor, format: Format, kind: str, rule: ScaleRule = RULES[0], **options: bool) -> int:
    """Mismatches of one cast: codes and scales of both layouts, and the amax gathered from 0 and from a larger one."""
    given = sources(x, kind)
    rule_or_none = rule if kind in AMAX_KINDS else None
    mismatches = 0
    for start in (0.0, 1e30):
        gathered = torch.full((), start, device=x.device)
        expected_gathered = gathered.clone()
        found = cast_transpose(x, format, *given, rule=rule_or_none, gathered=gathered, **options)
        expected = cast_transpose_reference(x, format, *given, rule_or_none, expected_gathered, **options)
        mismatches += compare(found[:4], expected[:4])["mismatches"] + differing(gathered, expected_gathered)
        mismatches += (found.column_sum is None) != (expected[4] is None)
    return mismatches


def check_casts(checks: Checks, device: str) -> None:
    """Edge values against the CPU's reference; the others against the same reference on the device."""
    for dtype in DTYPES:
        for format in FORMATS:
            values = edge_matrix(format, dtype).flatten()
            x = values.repeat(-(-(2**14) // len(values)))[: max(2**14, len(values) // 2**14 * 2**14)].view(-1, 128)
            for inf_to_nan in (False, True):

                def edges(x: Tensor = x, format: Format = format, inf_to_nan: bool = inf_to_nan) -> Result:
                    one, other = torch.ones(()), torch.tensor(2.7)
                    result = {"mismatches": 0, "reference_mismatches": 0}
                    for pair in ((one, other), (one, one)):
                        expected = cast_transpose_reference(x, format, *pair, inf_to_nan=inf_to_nan)
                        s, s_t = one.to(device), other.to(device)
                        on_device = (s, s if pair[1] is one else s_t)
                        found = cast_transpose(x.to(device), format, *on_device, inf_to_nan=inf_to_nan)
                        reference = cast_transpose_reference(x.to(device), format, *on_device, inf_to_nan=inf_to_nan)
                        result["mismatches"] += compare(found, expected)["mismatches"]
                        result["reference_mismatches"] += compare(reference, expected)["mismatches"]
                    return result | {"ok": not any(result.values())}

                about = {"format": format.name, "dtype": str(dtype), "inf_to_nan": inf_to_nan}
                checks.run("cast edges", edges, shape=list(x.shape), **about)
    for dtype in DTYPES:
        for kind, x in distributions(dtype, device):
            for format in FORMATS:
                checks.run(
                    "cast 10 million",
                    lambda x=x, format=format: {"mismatches": one_cast(x, format, "row and column")},
                    shape=list(x.shape), dtype=str(dtype), format=format.name, kind=kind,
                )  # fmt: skip


def check_shapes(checks: Checks, device: str) -> None:
    """Every shape in every memory order, bf16; each kind of scale; whole blocks of every dtype; no scale at all."""
    kinds = (*SCALE_KINDS, *AMAX_KINDS)
    for shape in (*SHAPES, *NARROWLY_ALIGNED, (0, 32), (32, 0)):

        def casts(shape: tuple[int, int] = shape) -> Result:
            mismatches = 0
            for _, x in layouts(torch.randn(shape, device=device).to(torch.bfloat16)):
                for kind in kinds if shape == (200, 130) else ("shared", "row and column", "amax by row and column"):
                    mismatches += one_cast(x, E4M3, kind)
            return {"mismatches": mismatches}

        checks.run("cast shapes", casts, shape=list(shape))
    for dtype in DTYPES:

        def whole_blocks(dtype: torch.dtype = dtype) -> Result:
            mismatches = 0
            for shape in ((128, 128), (256, 384), (520, 1000)):
                x = torch.randn(shape, device=device).to(dtype)
                for kind in kinds:
                    for format in FORMATS:
                        mismatches += one_cast(x, format, kind)
            return {"mismatches": mismatches}

        checks.run("cast dtypes", whole_blocks, dtype=str(dtype))

        def large_blocks(dtype: torch.dtype = dtype) -> Result:
            x = random_bits((8192, 4104), dtype, device)
            kinds = ("shared", "row and column", "256 partial amaxes", "amax by row and column")
            return {"mismatches": sum(one_cast(x, E5M2, kind, inf_to_nan=True) for kind in kinds)}

        checks.run("cast large blocks", large_blocks, shape=[8192, 4104], dtype=str(dtype))

    def odd_scales() -> Result:
        mismatches = 0
        for value in (0.0, float("inf"), float("nan"), 1e-45, 3e38):
            scalar = torch.tensor(value, device=device)
            by_row, by_column = torch.ones(300, 1, device=device), torch.ones(1, 130, device=device)
            by_row[170], by_column[0, 129] = value, value
            for x in (torch.randn(300, 130, device=device), torch.zeros(300, 130, device=device).to(torch.bfloat16)):
                for pair in ((scalar, scalar), (by_row, by_column)):
                    expected = cast_transpose_reference(x, E4M3, *pair)
                    mismatches += compare(cast_transpose(x, E4M3, *pair), expected)["mismatches"]
        return {"mismatches": mismatches}

    checks.run("cast odd scales", odd_scales, shape=[300, 130])

    def nothing_finite() -> Result:
        mismatches = 0
        for value in (float("nan"), float("inf"), -0.0):
            for dtype in DTYPES:
                x = torch.full((300, 130), value, dtype=dtype, device=device)
                mismatches += one_cast(x, E4M3, "one partial amax") + one_cast(x, E4M3, "amax by row and column")
        return {"mismatches": mismatches}

    checks.run("cast nothing finite", nothing_finite, shape=[300, 130])


def check_scales(checks: Checks, device: str) -> None:
    """Scales of edges and of ten million random finite amaxes, one a row, against the CPU's scale rule."""
    special = special_float32().abs()
    tiny = torch.tensor([1e-37, 1e-40, 3e38, 1e-3])
    values = torch.cat([special, tiny, random_bits((10_000_000,), torch.float32).abs()])
    values = values[values.isfinite()]
    values = values[: values.numel() // 16 * 16].reshape(-1, 1)
    for format in FORMATS:
        for rule in RULES:

            def scales(format: Format = format, rule: ScaleRule = rule) -> Result:
                kept = {"epsilon": rule.epsilon, "power_of_two": rule.power_of_two}
                expected = scale_from_multiplier(multiplier_from_amax(values, format, **kept))
                x = torch.ones(values.shape, device=device, dtype=torch.bfloat16)
                by_row = cast_transpose(x, format, values.to(device), None, rule=rule).scale
                by_column = cast_transpose(x.t(), format, None, values.t().to(device), rule=rule).scale_t
                whole = cast_transpose(x[:16], format, values[20].to(device), None, rule=rule).scale
                mismatches = differing(by_row, expected) + differing(by_column, expected)
                return {"mismatches": mismatches + differing(whole, expected[20, 0])}

            about = {"format": format.name, "epsilon": rule.epsilon, "power_of_two": rule.power_of_two}
            checks.run("scales", scales, shape=list(values.shape), **about)


def check_compiled(checks: Checks, device: str) -> None:
    """One graph, the same bits, the amax gathered, for several numbers of rows."""
    for backend in ("aot_eager", "inductor"):
        for by_row in (False, True):

            def compiled(backend: str = backend, by_row: bool = by_row) -> Result:
                torch._dynamo.reset()

                def quantize(x: Tensor, gathered: Tensor) -> Any:
                    partial = partial_amax(x)
                    source = amax_by_row_and_column(x) if by_row else (partial, partial)
                    cast = cast_transpose(x, E5M2, *source, rule=RULES[0], gathered=gathered, column_sum=True)
                    return *cast[:4], cast.column_sum

                function = torch.compile(quantize, fullgraph=True, backend=backend, dynamic=True)
                mismatches = 0
                for rows in (200, 64, 9000):
                    # Integers: their sums are exact in any order.
                    x = torch.randint(-8, 9, (rows, 130), device=device).to(torch.bfloat16)
                    gathered, expected_gathered = torch.zeros((), device=device), torch.zeros((), device=device)
                    mismatches += compare(function(x, gathered), quantize(x, expected_gathered))["mismatches"]
                    mismatches += differing(gathered, expected_gathered) + (float(gathered) != 8.0)
                return {"mismatches": mismatches}

            checks.run("compiled", compiled, shape=["rows", 130], backend=backend, by_row=by_row)


def check_large(checks: Checks, device: str) -> None:
    """More than 2^31 elements, compared slice by slice."""

    def large() -> Result:
        rows, columns = 65600, 32776
        x = torch.empty(rows, columns, dtype=torch.bfloat16, device=device).normal_()
        x[-1, -1] = 1e4
        largest = x[-1, -1].float()
        partial, gathered = partial_amax(x), torch.zeros((), device=device)
        codes, scale, codes_t, scale_t, sums = cast_transpose(
            x, E4M3, partial, partial, rule=RULES[0], gathered=gathered, column_sum=True
        )
        assert codes is not None
        assert codes_t is not None
        assert sums is not None
        expected_scale = scale_from_multiplier(multiplier_from_amax(largest, E4M3))
        mismatches = differing(gathered, largest) + differing(partial.amax(), largest)
        mismatches += differing(scale, expected_scale) + differing(scale_t, expected_scale)
        by_row, by_column = amax_by_row_and_column(x)
        assert by_row is not None
        assert by_column is not None
        mismatches += differing(by_row[-1, 0], largest) + differing(by_column[0, -1], largest)
        exact, bound = (torch.zeros(columns, dtype=torch.float64, device=device) for _ in range(2))
        for first in range(0, rows, 8192):
            last = min(first + 8192, rows)
            expected = cast_transpose_reference(x[first:last], E4M3, expected_scale, expected_scale)
            mismatches += differing(codes[first:last], expected[0]) + differing(codes_t[:, first:last], expected[2])
            mismatches += differing(by_row[first:last], amax_reference(x[first:last], ROW))
            exact += x[first:last].double().sum(0)
            bound += x[first:last].double().abs().sum(0)
        mismatches += int(codes[:, columns:].float().count_nonzero() + codes_t[columns:].float().count_nonzero())
        # Depth as in `check_reductions.sum_bound`.
        unit = (launch._BLOCK_LARGE[0] + -(-rows // launch._BLOCK[0])) * 2.0**-24
        worst = float(((sums.double() - exact).abs() / (bound * unit / (1 - unit))).max())
        return {
            "mismatches": mismatches,
            "sums_worst": round(worst, 4),
            "elements": x.numel(),
            "ok": mismatches == 0 and worst <= 1,
        }

    free, _ = torch.cuda.mem_get_info()
    if free > 40 * 2**30:
        checks.run("more than 2^31 elements", large, shape=[65600, 32776], dtype="torch.bfloat16")
    torch.cuda.empty_cache()


PARTS: dict[str, Callable[[Checks, str], None]] = {
    "casts": check_casts,
    "shapes": check_shapes,
    "sums": check_sums,
    "amaxes": check_amaxes,
    "updates": check_updates,
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
