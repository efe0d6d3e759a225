"""Sixteen-bit products at full speed on processors without them.

A BF16 or FP16 GEMM rounds its operands to 16 bits, multiplies exactly, adds in fp32 and rounds the result. A CPU
without such instructions runs torch's own 16-bit GEMM about ten times slower than an fp32 one (measured: 10–15 against
115–135 GFLOP/s on two AVX2 cores). Since products of 16-bit numbers are exact in fp32, an fp32 GEMM on rounded operands
gives the same numbers but for the order of addition. `half_products` computes linear layers and attention that way for
as long as it is active; on other devices it does nothing.

In attention only q, k, v and the result are rounded, the probabilities stay fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_HALF_DTYPES = (torch.bfloat16, torch.float16)


class _RoundedLinear(torch.autograd.Function):
    """y = x wᵀ + b with operands, result and gradients rounded to `dtype`, and fp32 sums."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Take x [..., K], weight [N, K], bias [N] or None; give [..., N]."""
        with torch.autocast("cpu", enabled=False):
            x_rounded, weight_rounded = x.to(dtype), weight.to(dtype)
            ctx.save_for_backward(x_rounded, weight_rounded)
            ctx.dtype = dtype
            ctx.grad_dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
            rounded_bias = None if bias is None else bias.to(dtype).float()
            y: torch.Tensor = F.linear(x_rounded.float(), weight_rounded.float(), rounded_bias)
            return y.to(dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Take dy [..., N]; give the gradients of x, weight and bias in their own dtypes."""
        x, weight = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.grad_dtypes
        dy_rows = dy.to(ctx.dtype).float().reshape(-1, dy.shape[-1])  # [M, N]
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = (dy_rows @ weight.float()).to(ctx.dtype).to(x_dtype).view(x.shape)  # [M, N] @ [N, K]
        if ctx.needs_input_grad[1]:
            x_rows = x.float().reshape(-1, x.shape[-1])
            dw = (dy_rows.t() @ x_rows).to(ctx.dtype).to(weight_dtype)  # [N, M] @ [M, K]
        if bias_dtype is not None and ctx.needs_input_grad[2]:
            db = dy_rows.sum(0).to(ctx.dtype).to(bias_dtype)
        return dx, dw, db, None


class _HalfProducts(TorchFunctionMode):
    """Routes `linear` and `scaled_dot_product_attention` of 16-bit computations on the CPU to fp32 products."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Called by torch for every function while the mode is active."""
        kwargs = kwargs or {}
        if func is F.linear:
            dtype = _product_dtype(args[0])
            if dtype is not None:
                bias = args[2] if len(args) > 2 else kwargs.get("bias")
                return _RoundedLinear.apply(args[0], args[1], bias, dtype)
        elif func is F.scaled_dot_product_attention and len(args) >= 3:
            dtype = _product_dtype(args[0])
            if dtype is not None:
                with torch.autocast("cpu", enabled=False):
                    q, k, v = (operand.to(dtype).float() for operand in args[:3])
                    mask = kwargs.get("attn_mask")
                    if mask is not None and mask.is_floating_point():
                        kwargs = {**kwargs, "attn_mask": mask.float()}
                    return func(q, k, v, *args[3:], **kwargs).to(dtype)
        return func(*args, **kwargs)


def _product_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The 16-bit dtype in which torch would multiply x, or None."""
    if x.device.type != "cpu":
        return None
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    return dtype if dtype in _HALF_DTYPES else None


@contextmanager
def half_products(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Compute 16-bit linear layers and attention by fp32 GEMMs where that is faster; elsewhere do nothing."""
    if not needs_fp32_products(device, dtype):
        yield
        return
    with _HalfProducts():
        yield


def needs_fp32_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this device lacks fast products of `dtype`, by what oneDNN says of the processor.

    Not by measurement: the answer decides the order of addition, and must not change with the load of the machine.
    """
    if device.type != "cpu" or dtype not in _HALF_DTYPES:
        return False
    name = "_is_mkldnn_bf16_supported" if dtype is torch.bfloat16 else "_is_mkldnn_fp16_supported"
    supported = getattr(torch.ops.mkldnn, name, None)
    return supported is None or not supported()
