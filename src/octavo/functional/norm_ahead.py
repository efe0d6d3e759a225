"""A normalisation that casts its output ahead, for the linear layers that take it.

    n      [..., K] = norm of x, rounded to the dtype that it is handed on in     (`octavo.functional.norm`)
    codes  of n     = what the layer behind it would make of n                    (`octavo.functional.linear`)

n is there for whoever reads it; in the same pass over x it has been cast, and the layers that would make the same codes
of that very n take them (`octavo.functional.shared_input`). One that would make others, or is given something else,
casts for itself, and the amax of n is gathered when its codes are taken. Bits and gathered amaxes are those of a
normalisation and a cast. Bytes moved an element of bf16: 2 read and 4 written, against 4 and 4.

Eager code only: what is handed on beside n the compiler does not see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.functional.forward_mode import refuse_tangents
from octavo.functional.fused_casts import cast_normalised
from octavo.functional.norm import dense_rows, keep_for_norm_gradients, norm_gradients
from octavo.functional.products import shaped
from octavo.functional.shared_input import keep_for_followers
from octavo.kernels.norm_cast import Norm
from octavo.tensor import DelayedQuantizer, Operand, OperandState, Quantizer


def normalise_ahead(
    x: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None, quantizer: Quantizer, columnwise: bool
) -> Tensor:
    """Normalised rows of x [..., K] -> the same shape, of dtype `norm.through`; their codes wait for the next layer.

    Args:
        x: float32, bfloat16 or float16.
        norm: which normalisation.
        weight, bias: [K] or None.
        quantizer: of the input of the layer that takes n; one that tells its origin.
        columnwise: both layouts will be wanted.
    """
    assert norm.through is not None, "a layer hands on a dtype"
    ahead, gather = _gathering_when_taken(quantizer)
    if torch.is_grad_enabled():
        made: list[Operand] = []
        n: Tensor = _NormAhead.apply(x, weight, bias, norm, ahead, columnwise, made)
        operand = made[0]
    else:
        refuse_tangents(x, weight, bias)
        cast = cast_normalised(dense_rows(x), norm, weight, bias, ahead, columnwise, True)
        assert cast.rows is not None, "they were asked for"
        n, operand = cast.rows.reshape(x.shape), cast.operand
    if gather is not None and ahead.state.captured:  # type: ignore[attr-defined]
        # Also of codes that nobody takes: a graph reads the scale.
        quantizer.state.captured = True  # type: ignore[attr-defined]
    keep_for_followers(n, operand, quantizer, norm.through, columnwise, gather)
    return n


def _gathering_when_taken(quantizer: Quantizer) -> tuple[Quantizer, Callable[[], None] | None]:
    """A quantizer of the same codes, and what gathers their amax where `quantizer` does.

    The layer behind may be given something else: then this amax is none of its input's.
    """
    if not isinstance(quantizer, DelayedQuantizer) or not quantizer.gather:
        return quantizer, None
    state = quantizer.state
    apart = object.__new__(OperandState)
    apart.__dict__.update(state.__dict__, gathered=torch.zeros_like(state.gathered))
    ahead = DelayedQuantizer(
        quantizer.spec,
        apart,
        gather=True,
        from_data=quantizer.from_data,
        scale=quantizer.fixed,
        used=quantizer.used,
    )

    return ahead, lambda: state.gather(apart.gathered)


class _NormAhead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        norm: Norm,
        quantizer: Quantizer,
        columnwise: bool,
        made: list[Operand],
    ) -> Tensor:
        cast = cast_normalised(dense_rows(x), norm, weight, bias, quantizer, columnwise, True)
        assert cast.rows is not None, "they were asked for"
        made.append(cast.operand)
        keep_for_norm_gradients(ctx, x, norm, weight, bias, cast.mean, cast.rstd)
        return shaped(cast.rows, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, dn: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True asks for the gradient of a gradient, which a normalisation fused with the FP8 layers"
                " behind it does not have: convert with fuse=False, and run the layers in high precision"
            )
        return *norm_gradients(ctx, dn), *(None,) * 4
