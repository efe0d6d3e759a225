"""The three products of a linear layer as parts of larger layers.

    fprop   y  [M, N] = x  [M, K] @ w  [N, K]^T + b
    dgrad   dx [M, K] = dy [M, N] @ w  [N, K]
    wgrad   dw [N, K] = dy [M, N]^T @ x [M, K]
    dbias   db [N]    = sum of dy over M, in float32

What each takes and gives is what `octavo.functional.linear` takes and gives, to the bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.functional.shared_input import as_rows
from octavo.kernels import padded, runs_natively, scaled_mm
from octavo.kernels.side_stream import side_of
from octavo.runtime import LinearPlan
from octavo.tensor import Operand, QuantizedTensor


class Needs(NamedTuple):
    """Which gradients of a product somebody wants."""

    dx: bool
    dw: bool
    db: bool


class Kept(NamedTuple):
    """What a backward has of an operand: codes_t and scale_t for an FP8 product, `high` for one in high precision.

    Codes that are to be made again are those of `high`; scale_t is then the scale of the forward's cast.
    """

    codes_t: Tensor | None = None
    scale_t: Tensor | None = None
    high: Tensor | None = None


class Gradient(NamedTuple):
    """dy as it enters the products: rows [M, N] in high precision, its codes; None for what no product takes."""

    rows: Tensor | None
    codes: Operand | None


class Extents(NamedTuple):
    """M, N, K and the dtypes of dx and dw."""

    tokens: int
    num_out: int
    num_in: int
    dtype: torch.dtype
    weight_dtype: torch.dtype


def kept_input(operand: Operand, high: Tensor | None, plan: LinearPlan, needs_dw: bool) -> Kept:
    """What wgrad needs of x."""
    if not needs_dw:
        return Kept()
    return Kept(operand.codes_t, operand.scale_t) if plan.wgrad_fp8 else Kept(high=high)


def keeps_weight_codes(weight: Tensor, plan: LinearPlan, needs_dx: bool) -> bool:
    """True if dgrad takes the column-wise codes of w that the forward makes."""
    return needs_dx and plan.dgrad_fp8 and not (plan.keeps_weight and _is_there_anyway(weight))


def _is_there_anyway(weight: Tensor) -> bool:
    """True of a weight in high precision that somebody else keeps, a parameter: it is no new tensor of this forward."""
    if isinstance(weight, QuantizedTensor):
        return False
    # (Of traced code the compiler knows what it makes again.)
    return torch.compiler.is_compiling() or isinstance(weight if weight._base is None else weight._base, nn.Parameter)


def kept_weight(operand: Operand, weight: Tensor, plan: LinearPlan, needs_dx: bool) -> Kept:
    """What dgrad needs of w: codes, if the forward has made them, or what they are made of."""
    if not needs_dx:
        return Kept()
    if not plan.dgrad_fp8:
        return Kept(high=weight)
    return Kept(None, operand.scale, weight) if operand.codes_t is None else Kept(operand.codes_t, operand.scale_t)


def codes_of_weight(w: Kept, plan: LinearPlan, after: Tensor) -> tuple[Tensor, Tensor]:
    """Column-wise codes of w and their scale: as they were kept, or made again.

    after: the scale of dy, see `Quantizer.again`.
    """
    codes_t, scale_t = w.codes_t, w.scale_t
    if codes_t is None:
        assert w.high is not None, "codes or a weight were kept"
        again = plan.weight.again(w.high, scale_t, after)  # type: ignore[attr-defined]
        codes_t, scale_t = again.column_wise
    assert scale_t is not None, "codes come with their scale"
    return codes_t, scale_t


def fprop(x: Operand, w: Operand, bias: Tensor | None, extents: Extents, plan: LinearPlan) -> Tensor:
    """[M', K'] @ [K', N'] -> [M, N] of the dtype of the layer."""
    codes, scale = x.row_wise
    w_codes, w_scale = w.row_wise
    count(plan, "fprop", codes, w_codes, scale)
    num_out, dtype = extents.num_out, extents.dtype
    if bias is not None:
        bias = bias.to(dtype)
        if padded(num_out) != num_out:
            bias = torch.nn.functional.pad(bias, (0, padded(num_out) - num_out))
    y = scaled_mm(codes, w_codes, scale, w_scale, bias, dtype, plan.accumulate.fprop)
    return unpadded(y, extents.tokens, num_out, torch.compiler.is_compiling())


def fp8_layouts(plan: LinearPlan, needs: Needs) -> tuple[bool, bool]:
    """(row-wise, column-wise): which codes of dy the products take."""
    return needs.dx and plan.dgrad_fp8, needs.dw and plan.wgrad_fp8


def all_fp8(plan: LinearPlan, needs: Needs) -> bool:
    """True if there is a product to compute and none of them takes dy in high precision."""
    return (needs.dx or needs.dw) and plan.dgrad_fp8 >= needs.dx and plan.wgrad_fp8 >= needs.dw


def quantized_gradient(rows: Tensor, plan: LinearPlan, needs: Needs) -> Gradient:
    """dy [M, N] with its codes in the layouts that somebody will use."""
    rowwise, columnwise = fp8_layouts(plan, needs)
    # The same read gives the gradient of the bias.
    codes = plan.grad_output(rows, rowwise, columnwise, needs.db) if rowwise or columnwise else None
    return Gradient(rows, codes)


def gradients(
    dy: Gradient, x: Kept, w: Kept, needs: Needs, extents: Extents, plan: LinearPlan
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx [M, K], dw [N, K], db [N] in float32); None for what nobody needs."""
    side = None
    if dy.codes is not None and all(fp8_layouts(plan, needs)) and not torch.compiler.is_compiling():
        side = side_of(dy.codes.row_wise[0], 2 * extents.tokens * extents.num_out * extents.num_in)
    if side is None:
        return _dgrad(dy, w, needs, extents, plan), _wgrad(dy, x, needs, extents, plan), _dbias(dy, needs)
    dw, dx = side.both(lambda: _wgrad(dy, x, needs, extents, plan), lambda: _dgrad(dy, w, needs, extents, plan))
    return dx, dw, _dbias(dy, needs)


def _dgrad(dy: Gradient, w: Kept, needs: Needs, extents: Extents, plan: LinearPlan) -> Tensor | None:
    """[M, N] @ [N, K] -> [M, K]"""
    if not needs.dx:
        return None
    if plan.dgrad_fp8:
        assert dy.codes is not None, "an FP8 product takes codes"
        codes, scale = dy.codes.row_wise
        w_codes_t, w_scale_t = codes_of_weight(w, plan, scale)
        count(plan, "dgrad", codes, w_codes_t, scale)
        dx = scaled_mm(codes, w_codes_t, scale, w_scale_t, None, extents.dtype, plan.accumulate.dgrad)
        return unpadded(dx, extents.tokens, extents.num_in, torch.compiler.is_compiling())
    count(plan, "dgrad", None, None)
    assert dy.rows is not None, "a product in high precision takes dy itself"
    assert w.high is not None, "the forward kept it"
    return dy.rows @ in_high_precision(w.high, dy.rows.dtype)


def _wgrad(dy: Gradient, x: Kept, needs: Needs, extents: Extents, plan: LinearPlan) -> Tensor | None:
    """[N, M] @ [M, K] -> [N, K]"""
    if not needs.dw:
        return None
    if plan.wgrad_fp8:
        assert dy.codes is not None, "an FP8 product takes codes"
        assert x.codes_t is not None, "the forward kept them"
        assert x.scale_t is not None, "codes come with their scale"
        codes, scale = dy.codes.column_wise
        count(plan, "wgrad", codes, x.codes_t, scale)
        dw = scaled_mm(codes, x.codes_t, scale, x.scale_t, None, extents.weight_dtype, plan.accumulate.wgrad)
        return unpadded(dw, extents.num_out, extents.num_in, torch.compiler.is_compiling())
    count(plan, "wgrad", None, None)
    assert dy.rows is not None, "a product in high precision takes dy itself"
    assert x.high is not None, "the forward kept it"
    return (dy.rows.t() @ as_rows(x.high)).to(extents.weight_dtype)


def _dbias(dy: Gradient, needs: Needs) -> Tensor | None:
    """[M, N] -> [N], of the high-precision dy"""
    if not needs.db:
        return None
    if dy.codes is not None and dy.codes.column_sum is not None:
        return dy.codes.column_sum
    assert dy.rows is not None, "the sums are those of dy itself"
    return dy.rows.sum(0, dtype=torch.float32)


def refuse_second_derivative() -> None:
    """Raise if a backward is asked for a graph of its own.

    Gradients are enabled in a backward only for create_graph=True. (The compiler refuses that by itself.)
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "create_graph=True asks for the gradient of a gradient, which FP8 products do not have: the part of it"
            " that goes through this layer would be missing. Run it under octavo.autocast(enabled=False)"
        )


def summed(dn: Tensor | None, returned: Tensor | None) -> Tensor | None:
    """The gradient of n [M, K]: that which a product gives, and that of an n which was handed out [..., K]."""
    if returned is None:
        return dn
    return as_rows(returned) if dn is None else dn + as_rows(returned)


def leave_out_zeros(ctx: Any) -> None:
    """Have a backward see None, not zeros, for an output that nobody used. (Compiled code sees zeros.)"""
    if not torch.compiler.is_compiling():
        ctx.set_materialize_grads(False)


def shaped(rows: Tensor, lead: torch.Size) -> Tensor:
    """[M, N] as [*lead, N], a tensor that is no view to autograd, so that its user may change it in place."""
    result: Tensor = torch.ops.aten._unsafe_view.default(rows, (*lead, rows.shape[1]))
    return result


def count(plan: LinearPlan, gemm: str, a: Tensor | None, b: Tensor | None, scale_a: Tensor | None = None) -> None:
    """Note a product for `octavo.count_gemms`; without codes, one in high precision."""
    if plan.counter is None:
        return
    if a is None or b is None:
        plan.counter.add(plan.name, gemm, "high precision")
    else:
        plan.counter.add(plan.name, gemm, "fp8" if runs_natively(a, b, scale_a) else "fp8 emulated")


def unpadded(out: Tensor, rows: int, columns: int, traced: bool) -> Tensor:
    """The real part of a product of padded operands, contiguous."""
    # Whether tokens were padded is not asked while compiling: each answer would be a graph of its own.
    if traced or out.shape[0] != rows:
        out = out.narrow(0, 0, rows)
    return out if out.shape[1] == columns else out[:, :columns].contiguous()


def in_high_precision(weight: Any, dtype: torch.dtype) -> Tensor:
    """A weight as a matrix of this dtype."""
    high: Tensor = weight.dequantize(dtype) if isinstance(weight, QuantizedTensor) else weight.to(dtype)
    return high
