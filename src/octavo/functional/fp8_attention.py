"""Attention whose two products run on FP8 units, with its gradient; and why a call is not computed so.

    o = softmax(scale q k^T) v        q, k, v as E4M3 codes, probabilities too: `octavo.kernels.fp8_attention`

The casts pass the gradient, which is that of the decoded operands in high precision. Kept for the backward, a token:
codes of q, k and v, (H + 2 G) D bytes, their scales, o in its own dtype, and 4 H of statistics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.functional.attention import Attention, Extras
from octavo.functional.attention_mask import MaskRules
from octavo.kernels import fp8_attention as kernel


def fp8_attention(q: Tensor, k: Tensor, v: Tensor, setup: Attention) -> Tensor:
    """o [B, H, M, D] of the dtype of q, or of torch.autocast.

    Args:
        q: [B, H, M, D].
        k, v: [B, G, N, D]; H is a multiple of G.
        setup: what to run with, of which there are no `fp8_reasons`.
    """
    q, k, v = (x.to(_product_dtype(q)) for x in (q, k, v))
    causal = setup.rules.window[1] == 0
    if causal and setup.rules.top_left:
        # What stands behind the last query's own place nobody sees; without it both corners are one.
        k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
    result: Tensor = _Fp8Attention.apply(q, k, v, setup.scale, causal)
    return result


def fp8_reasons(q: Tensor, k: Tensor, v: Tensor, setup: Attention, extras: Extras) -> list[str]:
    """Why a batch without padding is not computed so; empty if it is.

    Args:
        q, k, v: [B, H, M, D], [B, G, N, D], [B, G, N, Dv].
        setup, extras: of the call.
    """
    reasons = kernel.operand_reasons(q, k, v, setup.scale, _product_dtype(q)) + _rule_reasons(setup.rules)
    if any(extra is not None for extra in extras):
        reasons.append("a mask, a bias or ALiBi")
    if setup.dropout > 0:
        reasons.append("attention dropout")
    if setup.rules.window[1] == 0 and setup.rules.top_left and q.shape[2] > k.shape[2]:
        reasons.append("causal at the top left of more queries than keys")
    return reasons


def fp8_layer_reasons(key_features: int, value_features: int, rules: MaskRules) -> list[str]:
    """Why no call of such a layer is computed so, as far as the layer alone decides."""
    return kernel.feature_reasons(key_features, value_features) + _rule_reasons(rules)


def _rule_reasons(rules: MaskRules) -> list[str]:
    if rules.mask_type == "arbitrary" or rules.padded:
        return [f"attn_mask_type={rules.mask_type!r}"]
    left, right = rules.window
    return ["a sliding window"] if left >= 0 or right > 0 else []


def fp8_way(q: Tensor) -> str:
    """How a call is computed of which there are no `fp8_reasons`, in words."""
    reasons = kernel.unsupported_reasons(q)
    if reasons:
        return f"FP8 products, emulated ({'; '.join(reasons)})"
    return "FP8 products by Octavo's kernel, the backward in high precision of the decoded operands"


def _product_dtype(q: Tensor) -> torch.dtype:
    """The dtype that torch.autocast would give q."""
    device = q.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q.dtype


class _Fp8Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
        out, lse, codes = kernel.fp8_attention(q, k, v, scale, causal)
        ctx.save_for_backward(*codes, out, lse)
        ctx.num_keys, ctx.scale, ctx.causal = k.shape[2], scale, causal
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "create_graph=True asks for the gradient of a gradient, which attention with FP8 products does not"
                " have: use fp8_attention=False here"
            )
        *codes, out, lse = ctx.saved_tensors
        gradients = kernel.fp8_attention_gradient(
            dy, kernel.AttentionCodes(*codes), out, lse, ctx.num_keys, ctx.scale, ctx.causal
        )
        return *gradients, None, None
