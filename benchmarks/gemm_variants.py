"""The variants of the FP8 products that `check_gemm.py` measures, and the processes that compile them first.

A product's operands are codes [rows, inner] and [columns, inner]; in a Linear of x [M, K] and w [N, K]:

    fprop  y  [M, N] = x  w^T           rows x,    columns w
    dgrad  dx [M, K] = dy w             rows dy,   columns w^T: transposed codes, or w itself
    wgrad  dw [N, K] = dy^T x           rows dy^T, columns x^T: transposed codes, or dy and x themselves
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from benchmarks.check_products import product_bound
from benchmarks.gemm_gluon import gluon_gemm
from benchmarks.gemm_kernels import FAST, PROMOTED, Blocks, descriptor_gemm, gemm, gemm_reference
from torch import Tensor

from octavo.formats import E4M3, E5M2, cast

# K, N of a Linear for products of few rows.
SMALL = (4096, 4096)
# A process that has not answered by then hangs.
PATIENCE = 25.0


class Operands(NamedTuple):
    """Codes of a Linear in both layouts, E5M2 of dy and E4M3 else, and a scale."""

    x: Tensor
    x_t: Tensor
    w: Tensor
    w_t: Tensor
    dy: Tensor
    dy_t: Tensor
    scale: Tensor

    @classmethod
    def random(cls, m: int, k: int, n: int) -> Operands:
        """Of N(0, 1) data in bf16, times 8; seeded, the same in every process."""
        generator = torch.Generator("cuda").manual_seed(0)
        codes = []
        for shape, format in (((m, k), E4M3), ((n, k), E4M3), ((m, n), E5M2)):
            values = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) * 8
            codes.append(cast(values, format))
        x, w, dy = codes
        return cls(x, _turned(x), w, _turned(w), dy, _turned(dy), torch.tensor(0.02, device="cuda"))

    def of(self, product: str) -> tuple[Tensor, Tensor]:
        """Codes [rows, inner] and [columns, inner] of a product, contiguous, as `torch._scaled_mm` takes them."""
        return {"fprop": (self.x, self.w), "dgrad": (self.dy, self.w_t), "wgrad": (self.dy_t, self.x_t)}[product]


def _turned(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8).t().contiguous().view(codes.dtype)


class Variant(NamedTuple):
    """One way to take one product; `call` writes into `out`."""

    product: str
    kind: str
    promoted: bool
    blocks: tuple[Any, ...]
    call: Callable[[Operands, Tensor], Any]

    @property
    def name(self) -> str:
        """Short, and one variant's alone."""
        return f"{self.product} {self.kind} {'promoted' if self.promoted else 'fast'} {'x'.join(map(str, self.blocks))}"


def _pointers(product: str, promoted: bool, *blocks: int, kind: str = "pointers", small: bool = False) -> Variant:
    def call(o: Operands, out: Tensor) -> Any:
        a, b = {"fprop": (o.x, o.w.t()), "dgrad": (o.dy, o.w), "wgrad": (o.dy.t(), o.x)}[product]
        if kind == "swapped":
            a, b, out = b.t(), a.t(), out.t()
        return gemm(a, b, o.scale, o.scale, out, Blocks(*blocks), PROMOTED if promoted else FAST)

    return Variant("small" if small else product, kind, promoted, blocks, call)


def _descriptors(product: str, promoted: bool, *blocks: int, specialize: bool = False) -> Variant:
    def call(o: Operands, out: Tensor) -> Any:
        a, b = {"fprop": (o.x, o.w.t()), "dgrad": (o.dy, o.w)}[product]
        imprecise = PROMOTED if promoted else FAST
        return descriptor_gemm(a, b, o.scale, o.scale, out, Blocks(*blocks), imprecise, specialize)

    return Variant(product, "specialized" if specialize else "tma", promoted, blocks, call)


def _gluon(product: str, promoted: bool, *blocks: int) -> Variant:
    def call(o: Operands, out: Tensor) -> Any:
        if product == "dgrad":
            return gluon_gemm(o.w.t(), o.dy, o.scale, o.scale, out.t(), *blocks, promoted)
        a, b = (o.dy.t(), o.x_t) if product == "wgrad" else (o.x, o.w)
        return gluon_gemm(a, b, o.scale, o.scale, out, *blocks, promoted)

    return Variant(product, "gluon", promoted, blocks, call)


VARIANTS = (
    # K-major: what Triton reaches at all.
    _pointers("fprop", False, 128, 128, 128, 8, 4), _pointers("fprop", True, 128, 128, 128, 8, 4),
    _descriptors("fprop", False, 128, 256, 128, 8, 3), _descriptors("fprop", True, 128, 128, 128, 8, 4),
    _descriptors("fprop", False, 128, 256, 128, 4, 3, specialize=True),
    _gluon("fprop", False, 256, 4), _gluon("fprop", False, 128, 6), _gluon("fprop", True, 128, 6),
    # w as it is: turned round by Triton, in its place or as the first operand; through registers.
    _pointers("dgrad", True, 128, 128, 128, 8, 3), _pointers("dgrad", True, 128, 128, 128, 8, 3, kind="swapped"),
    _descriptors("dgrad", True, 128, 128, 128, 8, 3),
    _gluon("dgrad", True, 128, 4), _gluon("dgrad", True, 64, 5), _gluon("dgrad", False, 128, 4),
    # dy and x as they are; dy as it is, and x transposed.
    _pointers("wgrad", True, 128, 128, 128, 8, 3),
    _gluon("wgrad", True, 128, 4), _gluon("wgrad", True, 64, 5), _gluon("wgrad", False, 128, 4),
    # Few rows: the weight's bytes are all that counts.
    _pointers("fprop", False, 16, 16, 512, 4, 4, small=True), _pointers("fprop", False, 16, 32, 256, 4, 5, small=True),
    _pointers("fprop", False, 64, 32, 256, 4, 4, small=True), _pointers("fprop", False, 64, 64, 128, 4, 5, small=True),
    _pointers("fprop", False, 128, 64, 128, 4, 4, small=True),
)  # fmt: skip


def output(o: Operands, product: str) -> Tensor:
    """Memory for a product's result, filled with NaN."""
    rows, columns = o.of("fprop" if product == "small" else product)
    return torch.full((len(rows), len(columns)), float("nan"), dtype=torch.bfloat16, device=rows.device)


def error_in_bounds(variant: Variant, o: Operands) -> float:
    """The largest error against float64, and the relative Frobenius one, in units of their bounds: 1 and less is right.

    The bound of Hopper's accumulator is derived at `check_products.product_bound`; a promoted part is rounded once more
    when it is added in float32, and the result by the scale, its product and bf16: half an ulp each.
    """
    a, b = o.of("fprop" if variant.product == "small" else variant.product)
    out = output(o, variant.product)
    variant.call(o, out)
    exact = gemm_reference(a, b.t(), o.scale, o.scale)
    bound, frobenius = product_bound(a, b, variant.promoted)
    scale = float(o.scale) ** 2
    # Of K / 128 additions each is of parts no larger than the sum of magnitudes.
    magnitude = gemm_reference(a.float().abs(), b.float().abs().t(), o.scale, o.scale)
    rounding = exact.abs() * (2.0**-8 + 2 * 2.0**-24) + magnitude * (a.shape[1] / 128) * 2.0**-24
    # A bf16 below the smallest normal number is off by its eps at most.
    info = torch.finfo(torch.bfloat16)
    error = (out.double() - exact).abs().nan_to_num(1e9)
    worst = float((error / (bound * scale + rounding + info.tiny * info.eps)).max())
    # Half an ulp of bf16 at most; what float32 adds is far below the tenth of it that is allowed here.
    return max(worst, float(error.norm() / exact.norm()) / (frobenius + 1.1 * 2.0**-8))


def try_variant(variant: Variant) -> float | str:
    """Compiles a variant into the cache on disk, runs it, compares -> units of the bound, or what went wrong."""
    try:
        # No multiple of the tiles in any direction; those of few rows as they will be timed, since 1 is a constant.
        sizes = [(m, *SMALL) for m in (1, 16, 64, 256)] if variant.product == "small" else [(384, 768, 640)]
        return max(error_in_bounds(variant, Operands.random(*size)) for size in sizes)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:160]


class Trial:
    """A forked process that tries variants one after the other and tells of each."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers
        self.answers, there = multiprocessing.get_context("fork").Pipe(duplex=False)
        self.process = multiprocessing.get_context("fork").Process(target=_try, args=(there, numbers), daemon=True)
        self.process.start()
        there.close()
        self.asked = time.monotonic()

    def collect(self, found: dict[int, float | str]) -> list[int]:
        """Answers that have come -> numbers left over if the process is gone, or had to go."""
        try:
            while self.numbers and self.answers.poll(0.02):
                found[self.numbers.pop(0)] = self.answers.recv()
                self.asked = time.monotonic()
        except EOFError:
            return self._lose(found, "its process died")
        if self.numbers and time.monotonic() - self.asked > PATIENCE:
            self.process.kill()
            return self._lose(found, f"no answer in {PATIENCE:.0f} s")
        return []

    def _lose(self, found: dict[int, float | str], why: str) -> list[int]:
        found[self.numbers.pop(0)] = why
        left, self.numbers = self.numbers, []
        return left


def _try(there: Any, numbers: list[int]) -> None:
    torch.set_num_threads(1)  # threads of the process that was forked do not come along
    for number in numbers:
        there.send(try_variant(VARIANTS[number]))


def try_all(seconds: float, processes: int = 8) -> dict[int, float | str]:
    """Every variant, in processes forked before this one touches CUDA -> units of the bound, or what went wrong.

    A variant that crashes or hangs takes only its process along; those that wait behind it go to another one.
    """
    found: dict[int, float | str] = {}
    deadline = time.monotonic() + seconds
    trials = [Trial(list(range(first, len(VARIANTS), processes))) for first in range(processes)]
    while any(trial.numbers for trial in trials) and time.monotonic() < deadline:
        for trial in list(trials):
            if left := trial.collect(found):
                trials.append(Trial(left))
    for trial in trials:
        if trial.numbers:
            trial.process.kill()
            found |= dict.fromkeys(trial.numbers, f"not tried within {seconds:.0f} s")
        trial.process.join(5)
    return found
