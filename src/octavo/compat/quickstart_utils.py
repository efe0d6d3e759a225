"""`quickstart_utils`: what the tutorials of Transformer Engine import beside it.

Plain PyTorch parts of a transformer layer, a stopwatch, and functions that let two models share their parameters.
Source: docs/examples/quickstart_utils.py of Transformer Engine 2.
"""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

import octavo.compat.transformer_engine.pytorch as te
from octavo.formats import E4M3, E5M2
from octavo.tensor import cast_to_representable as octavo_cast_to_representable

_FORMATS = {"e4m3": E4M3, "e5m2": E5M2}

# (parameter of the Transformer Engine model, parameter of the plain one)
_BASIC = tuple(
    (f"{part}.{kind}", f"{part}.{kind}")
    for part in ("ln1", "qkv_projection", "projection", "ln2", "mlp.linear1", "mlp.linear2")
    for kind in ("weight", "bias")
)


def cast_to_representable(inp: Tensor, scale: float = 1.0, fp8_format: str = "e4m3") -> Tensor:
    """The values of `inp` rounded to those that FP8 holds, in its own dtype.

    Args:
        inp: any shape.
        scale: multiplier, as TE has it: representable are the values code / scale.
        fp8_format: "e4m3" or "e5m2".
    """
    if fp8_format not in _FORMATS:
        raise ValueError(f"fp8_format is {fp8_format!r}: expected 'e4m3' or 'e5m2'")
    return octavo_cast_to_representable(inp, scale=float(scale), format=_FORMATS[fp8_format])


def speedometer(
    module: nn.Module,
    input: Tensor,
    output_grad: Tensor,
    forward_kwargs: dict[str, Any] | None = None,
    fp8_autocast_kwargs: dict[str, Any] | None = None,
    timing_iters: int = 50,
    warmup_iters: int = 50,
) -> None:
    """Print the mean time of a forward and backward of `module`, in milliseconds.

    Args:
        module, input, output_grad: what is run, on what, and the gradient of its output.
        forward_kwargs: further arguments of the forward.
        fp8_autocast_kwargs: arguments of `te.fp8_autocast`; FP8 is off if None.
        timing_iters, warmup_iters: how often with and without the clock.
    """
    context = {"enabled": False} if fp8_autocast_kwargs is None else fp8_autocast_kwargs

    def run(iterations: int) -> float:
        _synchronise(input)
        start = time.perf_counter()
        for _ in range(iterations):
            with te.fp8_autocast(**context):
                output = module(input, **(forward_kwargs or {}))
            output.backward(output_grad)
        _synchronise(input)
        return time.perf_counter() - start

    run(warmup_iters)
    seconds = run(timing_iters)
    sys.stdout.write(f"Mean time: {1e3 * seconds / timing_iters} ms\n")


class DotProductAttention(nn.Module):
    """Attention of a transformer layer in plain PyTorch.

    Args:
        num_attention_heads: n.
        kv_channels: d, width of a head.
        attention_dropout: probability.
    """

    def __init__(self, num_attention_heads: int, kv_channels: int, attention_dropout: float) -> None:
        super().__init__()
        self.projection_size = kv_channels * num_attention_heads
        self.hidden_size_per_attention_head = kv_channels
        self.norm_factor = math.sqrt(kv_channels)
        self.dropout = nn.Dropout(attention_dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Attention over sequences, [S, B, n, d] each -> [S, B, n d].

        Args:
            query, key, value: [S, B, n, d].
            attention_mask: bool, broadcastable to [B, n, S, S]; True is left out.
        """
        # 1. Scores.  [B, n, S, d] @ [B, n, d, S] -> [B, n, S, S]
        scores = query.permute(1, 2, 0, 3) @ key.permute(1, 2, 3, 0) / self.norm_factor
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask, -10000.0)
        weights = self.dropout(torch.softmax(scores, dim=-1))
        # 2. Mixture.  [B, n, S, S] @ [B, n, S, d] -> [S, B, n, d]
        mixed: Tensor = (weights @ value.permute(1, 2, 0, 3)).permute(2, 0, 1, 3)
        return mixed.reshape(*mixed.shape[:2], self.projection_size)


class BasicMLP(nn.Module):
    """Feed-forward network of a transformer layer in plain PyTorch, with GELU (tanh).

    Args:
        hidden_size, ffn_hidden_size: outer and inner width.
    """

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(hidden_size, ffn_hidden_size, bias=True)
        self.linear2 = nn.Linear(ffn_hidden_size, hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]"""
        inner = nn.functional.gelu(self.linear1(x), approximate="tanh")
        out: Tensor = self.linear2(inner)
        return out


def share_parameters_with_basic_te_model(te_model: nn.Module, basic_model: nn.Module) -> None:
    """Give a layer of the tutorial's basic TE modules the parameters of the plain one."""
    _share(te_model, basic_model, _BASIC)


def share_parameters_with_fused_te_model(te_model: nn.Module, basic_model: nn.Module) -> None:
    """Give a layer of TE's fused modules (ln_qkv, projection, ln_mlp) the parameters of the plain one."""
    _share(te_model, basic_model, _fused("ln_qkv", "projection", "ln_mlp"))


def share_parameters_with_transformerlayer_te_model(te_model: nn.Module, basic_model: nn.Module) -> None:
    """Give a te.TransformerLayer the parameters of the plain one."""
    _share(te_model, basic_model, _fused("self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp"))


def _fused(qkv: str, projection: str, mlp: str) -> tuple[tuple[str, str], ...]:
    pairs = []
    for kind in ("weight", "bias"):
        pairs += [
            (f"{qkv}.layer_norm_{kind}", f"ln1.{kind}"),
            (f"{qkv}.{kind}", f"qkv_projection.{kind}"),
            (f"{projection}.{kind}", f"projection.{kind}"),
            (f"{mlp}.layer_norm_{kind}", f"ln2.{kind}"),
            (f"{mlp}.fc1_{kind}", f"mlp.linear1.{kind}"),
            (f"{mlp}.fc2_{kind}", f"mlp.linear2.{kind}"),
        ]
    return tuple(pairs)


def _share(target: nn.Module, source: nn.Module, pairs: tuple[tuple[str, str], ...]) -> None:
    for target_name, source_name in pairs:
        owner, _, attribute = target_name.rpartition(".")
        setattr(target.get_submodule(owner), attribute, source.get_parameter(source_name))


def _synchronise(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
