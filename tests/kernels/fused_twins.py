"""A fused cast against its reference, and inputs for it; for tests and for the check on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from tests.formats.edge_values import every_value
from tests.kernels.agreement import assert_same
from tests.kernels.exact_activations import (
    TRANSCENDENTAL,
    assert_codes_within,
    base_of,
    bounds,
    exact,
    gradient_range,
    result_range,
)
from tests.kernels.matrices import with_specials
from torch import Tensor

from octavo.formats import E4M3, E5M2
from octavo.kernels.activation_backward_cast import activation_backward_cast_reference
from octavo.kernels.activation_cast import activation_cast_reference
from octavo.kernels.activations import GATED
from octavo.kernels.cast_transpose import cast_transpose
from octavo.kernels.norm_cast import Norm
from octavo.kernels.norm_cast.reference import normalised, statistics

BF16 = torch.bfloat16
NORM_SCALE, ACTIVATION_SCALE, GRADIENT_SCALE = 0.013, 0.013, 0.0007


def rows_of(shape: tuple[int, int], dtype: torch.dtype = BF16, device: str = "cpu") -> Tensor:
    """Rows of different size and mean; if there are five, one of zeros, one constant, one with inf, one with NaN."""
    rows = shape[0]
    x = torch.randn(shape, device=device) * torch.exp2(torch.randint(-3, 4, (rows, 1), device=device).float())
    x += torch.randn(rows, 1, device=device)
    if rows > 4 and shape[1]:
        x[0], x[1] = 0.0, 3.0
        x[2, shape[1] // 2], x[3, -1] = float("inf"), float("nan")
    return x.to(dtype)


def parameters(columns: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, Tensor]:
    weight = torch.rand(columns, device=device) + 0.5
    return weight.to(dtype), torch.randn(columns, device=device).to(dtype)


def norm_is_reference(
    found: Any, x: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None, wanted: dict[str, Any]
) -> None:
    """Statistics within their bound; then all else bit for bit, with those statistics."""
    codes, scale, codes_t, output, mean, rstd = found
    finite = x.float().isfinite().all(1)
    exact_mean, exact_rstd = statistics(x.double().where(finite[:, None], 0.0).float(), norm)
    x64, unit = x.double()[finite], (x.shape[1] + 8) * 2.0**-24
    centre = x64.mean(1) if norm.kind == "layer" else torch.zeros(len(x64), dtype=torch.float64, device=x.device)
    variance = (x64 - centre[:, None]).square().mean(1)
    # The first columns of a row are like the others here: the variance loses no more than a factor 2.
    error = (1 / (rstd[finite].double().square()) - (variance + norm.epsilon)).abs()
    assert (error <= 4 * unit * (variance + norm.epsilon)).all()
    assert rstd.isnan().equal(exact_rstd.isnan() | ~finite) or norm.kind == "rms"
    if norm.kind == "layer":
        assert exact_mean is not None
        assert ((mean[finite].double() - centre).abs() <= unit * (x64.abs().mean(1) + 1e-30)).all()
    y = normalised(x, norm, weight, bias, mean, rstd)
    y = y if norm.through is None else y.to(norm.through)
    gathered = torch.tensor(wanted["start"], device=x.device)
    source = torch.tensor(NORM_SCALE, device=x.device)
    expected = cast_transpose(y, wanted["format"], source, source if wanted["columnwise"] else None, gathered=gathered)
    assert_same((codes, scale, codes_t), (expected.codes, expected.scale, expected.codes_t))
    assert_same((wanted["gathered"],), (gathered,))
    if wanted["return_output"]:
        assert_same((output,), (y.to(norm.through or x.dtype),))


def run_norm(function: Any, x: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None, number: int) -> None:
    wanted = {
        "format": (E4M3, E5M2)[number % 2],
        "columnwise": number % 3 != 2,
        "return_output": number % 2 == 0,
        "start": 100.0 * (number % 2),
    }
    gathered = torch.tensor(wanted["start"], device=x.device)
    scale = torch.tensor(NORM_SCALE, device=x.device)
    found = function(
        x, norm, weight, bias, wanted["format"], scale, gathered, wanted["columnwise"], wanted["return_output"]
    )
    norm_is_reference(found, x, norm, weight, bias, wanted | {"gathered": gathered})


def finite_bf16(device: str = "cpu") -> Tensor:
    """Every finite value of bf16, zeros for the others, [256, 256]."""
    values = every_value(BF16).to(device)
    return torch.where(values.isfinite(), values, 0)


def within_bounds(found: Tensor, x: Tensor, activation: str) -> None:
    """A float32 result of a plain function at finite x against float64."""
    x64 = x.double()
    allowed, _ = bounds(x64, activation)
    expected = exact(x64, activation)
    # Beyond the range of float32 both are infinite.
    close = (found.double() - expected).abs() <= allowed
    assert (close | (found.double() == expected.float().double())).all()


def with_some_specials(x: Tensor, activation: str) -> Tensor:
    """Zeros, inf and NaN; but nothing infinite times what may be 0 or just above."""
    special = with_specials(x)
    if base_of(activation) in TRANSCENDENTAL and activation in GATED:
        half = x.shape[1] // 2
        special[:, half:] = torch.where(special[:, half:].isinf(), x[:, half:], special[:, half:])
    return special


def activation_is_reference(
    function: Any, x: Tensor, activation: str, through: torch.dtype | None, number: int
) -> None:
    """Bit for bit, or, of what rests on exponentials, the same code wherever that is sure."""
    scale, start = torch.tensor(ACTIVATION_SCALE, device=x.device), 10.0 * (number % 2)
    gathered, expected_gathered = torch.full((2,), start, device=x.device)
    format, wanted = (E4M3, E5M2)[number % 2], ((True, True), (True, False), (False, True), (True, True))[number % 4]
    codes, used, codes_t = function(x, activation, format, scale, through, gathered, *wanted)
    expected = activation_cast_reference(x, activation, format, scale, through, expected_gathered, *wanted)
    assert used == scale
    if base_of(activation) not in TRANSCENDENTAL:
        assert_same((codes, used, codes_t, gathered), (*expected, expected_gathered))
        return
    values = result_range(x, activation)
    for outputs, largest in (((codes, codes_t), gathered), ((expected[0], expected[2]), expected_gathered)):
        assert (outputs[0] is not None, outputs[1] is not None) == wanted
        unsure = assert_codes_within(*outputs, largest, values, scale, through, start)
        # E4M3 straight from float32 has the middle of two codes within 2^-19 of one in 2^15, bf16 in between of one in
        # 2^11; of values near 0, whose codes E5M2 has many of, gelu_erf is sure within 11 2^-24 |x| only.
        part = 6 if base_of(activation) == "gelu_erf" else 512
        assert unsure <= values.low.numel() / part + 3


def within_range(found: Tensor, grad: Tensor, x: Tensor, activation: str) -> None:
    """A float32 gradient at finite x against autograd in float64."""
    low, high = gradient_range(grad, x, activation)
    inside = (low <= found.double()) & (found.double() <= high)
    assert (inside | (found == low.float()) | (found == high.float())).all()


def gradient_is_reference(
    function: Any, grad: Tensor, x: Tensor, activation: str, through: torch.dtype | None, number: int
) -> None:
    """Bit for bit, or, of what rests on exponentials, the same code wherever that is sure."""
    scale, start = torch.tensor(GRADIENT_SCALE, device=x.device), 10.0 * (number % 2)
    gathered, expected_gathered = torch.full((2,), start, device=x.device)
    format, inf_to_nan = (E5M2, E4M3)[number % 2], number % 3 != 1
    codes, used, codes_t, sums = function(grad, x, activation, format, scale, through, gathered, inf_to_nan, True)
    expected = activation_backward_cast_reference(
        grad, x, activation, format, scale, through, expected_gathered, inf_to_nan, True
    )
    assert used == scale
    values = gradient_range(grad, x, activation)
    low, high = (end.double() for end in values.rounded(through))
    # float32 sums of M rows in whatever order: at most M roundings of the sum of magnitudes.
    slack = x.shape[0] * 2.0**-24 * torch.maximum(low.abs(), high.abs()).sum(0)
    finite = (low.isfinite() & high.isfinite()).all(0)
    assert ((low.sum(0) - slack <= sums.double()) & (sums.double() <= high.sum(0) + slack))[finite].all()
    assert not sums.isfinite()[~finite].any()
    if base_of(activation) not in TRANSCENDENTAL:
        assert_same((codes, used, codes_t, gathered), (*expected[:3], expected_gathered))
        return
    for outputs, largest in (((codes, codes_t), gathered), ((expected[0], expected[2]), expected_gathered)):
        unsure = assert_codes_within(*outputs, largest, values, scale, through, start, inf_to_nan)
        # Where a gradient passes through 0, or is next to it, few codes are sure; elsewhere nearly all.
        assert unsure <= values.low.numel() / 8 + 3


def gradients(shape: tuple[int, int], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Normal numbers; some zeros, a NaN and infinities where there is room."""
    grad = torch.randn(shape, device=device)
    grad[torch.rand(shape, device=device) < 0.05] = 0.0
    if min(shape) > 4:
        grad[2, 1], grad[3, 2], grad[4, 3] = float("nan"), float("inf"), -float("inf")
    return grad.to(dtype)


def specials(x: Tensor, grad: Tensor, activation: str) -> Tensor:
    """x of ordinary numbers beside infinite gradients (0 times inf or just above is not sure); relu's anywhere."""
    x = x.clone()
    x[torch.rand(x.shape, device=x.device) < 0.05] = 0.0
    if base_of(activation) in TRANSCENDENTAL:
        infinite = grad.isinf() if activation not in GATED else torch.cat([grad.isinf(), grad.isinf()], dim=1)
        return torch.where(infinite, 1.5, x)
    if min(grad.shape) > 4:
        x[0, 0], x[1, 1], x[0, 2] = float("inf"), float("nan"), -float("inf")
    return x
