"""The fused casts against their references, and their time on the GPU against the unfused pair and against copy.

    python benchmarks/check_fused.py --out build/check_fused.jsonl

LayerNorm and RMSNorm, activations and their gradients, each with its cast. Each check is recorded as one JSON line, as
by `check_kernels.py`; exit status 1 if any failed, 2 if there is no CUDA device.

Compiling takes most of the time, so parts run in processes of their own, all at once; meanwhile others compile what
will be timed into Triton's cache. Then, alone on the card, the timing: CUDA-graph replays that take turns, medians.
`of_copy` is the rate of the bytes that the fused operation must move, against copy; `against_pair` is the time of
torch's operation and then the cast (and with current scaling the amax), divided by the fused time.
"""

from __future__ import annotations

import argparse
import itertools
import json
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
from torch import Tensor

from octavo.formats import E4M3, E5M2
from octavo.kernels.activation_backward_cast import activation_backward_cast, activation_backward_output
from octavo.kernels.activation_cast import activation_cast, activation_output
from octavo.kernels.activations import ACTIVATIONS, GATED
from octavo.kernels.norm_cast import Norm, norm_cast, norm_output
from octavo.kernels.norm_cast import triton_kernel as norm_kernels
from benchmarks.check_kernels import Checks, environment
from benchmarks.fused_speed import BACKWARD, FORWARD, NORMS, SHAPES, Family, families
from benchmarks.kernel_speed import Case, graph_seconds, interleaved, with_constants
from tests.kernels.agreement import assert_same
from tests.kernels.exact_activations import input_of
from tests.kernels.fused_twins import (
    activation_is_reference,
    finite_bf16,
    gradient_is_reference,
    gradients,
    parameters,
    rows_of,
    run_norm,
    specials,
    with_some_specials,
    within_bounds,
    within_range,
)

BF16 = torch.bfloat16
Result = dict[str, Any]


def norm_shape(shape: tuple[int, int], kind: str) -> Result:
    """Both dtypes and both ways of rounding; statistics within their bound, the rest bit for bit."""

    def function(x: Tensor, n: Norm, w: Any, b: Any, f: Any, s: Tensor, g: Tensor, columnwise: bool, out: bool) -> Any:
        return norm_cast(x, n, w, b, f, s, gathered=g, columnwise=columnwise, return_output=out)

    for number, (dtype, through) in enumerate(((BF16, BF16), (torch.float32, None))):
        weight, bias = parameters(shape[1], dtype, "cuda")
        x = rows_of(shape, dtype, "cuda")
        run_norm(function, x, Norm(kind, through=through), weight, bias, number)
        found = norm_output(x, Norm(kind, through=BF16), weight, bias)
        largest = torch.where(found.output.isfinite(), found.output, 0).abs().max().float()
        assert_same((found.amaxes.amax(),), (largest,))
    return {"ok": True}


def check_norms(checks: Checks) -> None:
    """Every block: short rows and long ones, few and many, whole blocks and not."""
    for shape, kind in itertools.product(((17, 31), (5000, 1280), (4500, 4096), (300, 16384), (130, 9001)), NORMS):
        checks.run("norm_cast", lambda s=shape, k=kind: norm_shape(s, k), shape=list(shape), kind=kind)


def one_activation(activation: str) -> Result:
    """Three shapes and dtypes; of a plain function every bf16, in float32."""

    def function(x: Tensor, a: str, f: Any, s: Tensor, t: Any, g: Tensor, rowwise: bool, columnwise: bool) -> Any:
        return activation_cast(x, a, f, s, through=t, gathered=g, rowwise=rowwise, columnwise=columnwise)

    cases = (((17, 31), torch.float16, BF16), ((1000, 1282), BF16, None), ((4096, 1280), BF16, BF16))
    for number, (shape, dtype, through) in enumerate(cases):
        x = with_some_specials(input_of(shape, activation, dtype, "cuda"), activation)
        activation_is_reference(function, x, activation, through, 3 - number)
    if activation not in GATED:
        x = finite_bf16("cuda")
        within_bounds(activation_output(x, activation, torch.float32).output, x, activation)
    return {"ok": True}


def one_gradient(activation: str) -> Result:
    """The same of the gradient."""

    def function(grad: Tensor, x: Tensor, a: str, f: Any, s: Tensor, t: Any, g: Tensor, nan: bool, sums: bool) -> Any:
        return activation_backward_cast(grad, x, a, f, s, through=t, gathered=g, inf_to_nan=nan, column_sum=sums)

    cases = (((17, 31), torch.float16, BF16), ((1000, 1282), BF16, None), ((4096, 1280), BF16, BF16))
    for number, (shape, dtype, through) in enumerate(cases):
        grad = gradients(shape, dtype, "cuda")
        x = specials(input_of(shape, activation, dtype, "cuda"), grad, activation)
        gradient_is_reference(function, grad, x, activation, through, number)
    if activation not in GATED:
        x = finite_bf16("cuda")
        grad = torch.ones_like(x)
        within_range(activation_backward_output(grad, x, activation, torch.float32).output, grad, x, activation)
    return {"ok": True}


def check_activations(checks: Checks, names: tuple[str, ...]) -> None:
    """Some of the activations, forward."""
    for name in names:
        checks.run("activation_cast", lambda name=name: one_activation(name), activation=name)


def check_gradients(checks: Checks, names: tuple[str, ...]) -> None:
    """Some of the activations, backward."""
    for name in names:
        checks.run("activation_backward_cast", lambda name=name: one_gradient(name), activation=name)


def compiled() -> Result:
    """In one graph, under Inductor, the same bits for several numbers of rows."""
    weight, bias = parameters(272, device="cuda")

    def step(x: Tensor, scale: Tensor, gathered: Tensor) -> Any:
        norm = norm_cast(x, Norm("layer", through=BF16), weight, bias, E4M3, scale, gathered=gathered)
        gate = activation_cast(x, "swiglu", E4M3, scale, through=BF16, gathered=gathered)
        back = activation_backward_cast(x[:, :136], x, "swiglu", E5M2, scale, through=BF16, gathered=gathered)
        return norm.codes, norm.codes_t, norm.mean, norm.rstd, gate.codes, gate.codes_t, back.codes, back.codes_t

    function = torch.compile(step, fullgraph=True, dynamic=True)
    for rows in (200, 64, 5000):
        x, scale = torch.randn(rows, 272, device="cuda").to(BF16), torch.tensor(0.013, device="cuda")
        gathered, expected = torch.zeros((), device="cuda"), torch.zeros((), device="cuda")
        assert_same(function(x, scale, gathered), step(x, scale, expected))
        assert_same((gathered,), (expected,))
    return {"ok": True}


def warm(checks: Checks, names: tuple[str, ...]) -> None:
    """Compile what will be timed: while a graph is captured other variants run, which keep their scale."""

    def once(family: Family) -> Result:
        for call in (family.fused, family.pair):
            graph_seconds(call, repeats=1)()
        return {"ok": True}

    for shape in SHAPES:
        for family in families(shape, names):
            checks.run("warm", lambda family=family: once(family), shape=list(shape), kernel=family.name)


def copy_case(shape: tuple[int, int]) -> Case:
    """A copy of bf16."""
    x = torch.randn(shape, device="cuda").to(BF16)
    target = torch.empty_like(x)
    return lambda: target.copy_(x), 4 * x.numel()


def check_speed(checks: Checks, names: tuple[str, ...]) -> None:
    """Each fused operation, its unfused pair and copy, taking turns."""
    for shape in SHAPES:
        copy = copy_case(shape)
        for family in families(shape, names):

            def timed(family: Family = family, copy: Case = copy) -> Result:
                cases = {"copy": copy, "fused": (family.fused, family.moved), "pair": (family.pair, family.moved)}
                rates = interleaved(cases, rounds=8)
                return {
                    "us": round(family.moved / rates["fused"] / 1e6, 1),
                    "pair_us": round(family.moved / rates["pair"] / 1e6, 1),
                    "against_pair": round(rates["fused"] / rates["pair"], 3),
                    "tb_per_s": round(rates["fused"], 3),
                    "of_copy": round(rates["fused"] / rates["copy"], 3),
                }

            checks.run("speed", timed, shape=list(shape), kernel=family.name)


def sweep(checks: Checks) -> None:
    """norm_cast with other blocks than its own."""
    blocks = (
        (32, 256, 8, 0), (32, 256, 8, 2), (32, 256, 8, 1), (32, 128, 4, 0), (32, 128, 4, 3), (16, 256, 4, 0),
        (16, 512, 8, 0), (16, 512, 8, 1), (32, 512, 16, 0), (32, 512, 16, 1), (16, 1024, 16, 0), (16, 1024, 16, 1),
        (64, 128, 8, 0), (64, 256, 16, 1),
    )  # fmt: skip
    for shape in SHAPES:
        copy = copy_case(shape)
        for block in blocks:
            values = {"_CAST_BLOCKS": {1 << 62: norm_kernels.Block(*block)}, "_FEW_ROWS": 0}
            [family] = families(shape, ("layer norm delayed",))
            cases = {"copy": copy, "fused": (family.fused, family.moved)}
            checks.run("sweep", with_constants(norm_kernels, values, cases), shape=list(shape), block=list(block))


HALF = len(ACTIVATIONS) // 2
PARTS: dict[str, Callable[[Checks], None]] = {
    "norms": check_norms,
    "activations": lambda checks: check_activations(checks, ACTIVATIONS[:HALF]),
    "activations 2": lambda checks: check_activations(checks, ACTIVATIONS[HALF:]),
    "gradients": lambda checks: check_gradients(checks, ACTIVATIONS[:HALF]),
    "gradients 2": lambda checks: check_gradients(checks, ACTIVATIONS[HALF:]),
    "compiled": lambda checks: checks.run("compiled", compiled),
    "warm norms": lambda checks: warm(checks, tuple(name for name in FORWARD if "norm" in name)),
    "warm activations": lambda checks: warm(checks, tuple(name for name in FORWARD if "norm" not in name)),
    "warm gradients": lambda checks: warm(checks, BACKWARD),
    "speed": lambda checks: check_speed(checks, (*FORWARD, *BACKWARD)),
    "sweep": sweep,
}
TOGETHER = [name for name in PARTS if name not in ("speed", "sweep")]


def run_parts(names: list[str], options: argparse.Namespace) -> list[str]:
    """Each part in a process of its own, all at once; gives the lines of their records."""
    processes = []
    for name in names:
        out = options.out.with_name(f"{options.out.stem}-{name.replace(' ', '-')}.jsonl")
        command = [sys.executable, __file__, "--out", str(out), "--only", name, "--alone"]
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


def main() -> int:
    """Run everything; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON lines go")
    parser.add_argument("--seconds", type=float, default=55.0, help="start no check after this long (default 55)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS)[:-1], help="default: all but sweep")
    parser.add_argument("--alone", action="store_true", help="in this process, one part after another")
    parser.add_argument("--commit", help="for the record, where git does not know it")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: this check compares Triton kernels on a GPU with their references", file=sys.stderr)
        return 2
    started = time.monotonic()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    together = [] if options.alone else [name for name in options.only if name in TOGETHER]
    lines = run_parts(together, options) if together else []
    checks = Checks(environment(options.commit), options.seconds - (time.monotonic() - started))
    torch.manual_seed(0)
    for name in options.only:
        if name not in together:
            PARTS[name](checks)
    checks.write(options.out)
    if lines:
        options.out.write_text("".join(lines) + options.out.read_text())
    records = options.out.read_text()
    failed, total = records.count('"ok": false'), records.count("\n")
    skipped = records.count('"ok": null')
    print(f"{total} checks, {failed} failed, {skipped} skipped for want of time, in {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
