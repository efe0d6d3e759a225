"""Products of codes on FP8 units against exact ones; a part of `check_kernels.py`.

Native and emulated products differ by the tensor core's accumulator; the bound is derived at `product_bound`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.kernel_speed import Checks, Result
from torch import Tensor

from octavo.formats import E4M3, E5M2, cast, decode
from octavo.kernels.scaled_mm import scaled_mm, scaled_mm_reference


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
