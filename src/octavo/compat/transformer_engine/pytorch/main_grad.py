"""`fuse_wgrad_accumulation`: a weight whose gradient is added to `weight.main_grad`, as Megatron-style training wants.

    forward    w -> w, in the dtype of main_grad (exact: that dtype holds every value of w)
    backward   main_grad += dw;  w.grad stays as it is

dw leaves its product in the dtype of main_grad, so sums of micro-batches are rounded there alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.compat.planned import refuse


def into_main_grad(weight: Tensor) -> Tensor:
    """`weight`, with its gradient going to `weight.main_grad`.

    Raises:
        RuntimeError: the weight has no `main_grad`.
    """
    if torch.compiler.is_compiling():
        # A gradient that leaves autograd cannot be traced: without fullgraph=True the layer then runs uncompiled.
        refuse("fuse_wgrad_accumulation=True of te.Linear and its kin under torch.compile")
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise RuntimeError(
            "fuse_wgrad_accumulation=True adds to weight.main_grad, which is not there: give each weight one, such as"
            " weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)"
        )
    result: Tensor = _IntoMainGrad.apply(weight, main_grad)
    return result


class _IntoMainGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, main_grad: Tensor) -> Tensor:
        ctx.weight, ctx.main_grad = weight, main_grad
        return weight.to(main_grad.dtype) if weight.dtype != main_grad.dtype else weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> tuple[Tensor | None, None]:
        ctx.main_grad.add_(dw)
        weight = ctx.weight
        # Megatron marks its parameters: it wants to know, and waits for a gradient to arrive all the same.
        if "grad_added_to_main_grad" not in vars(weight):
            return None, None
        weight.grad_added_to_main_grad = True
        return torch.zeros_like(weight), None
