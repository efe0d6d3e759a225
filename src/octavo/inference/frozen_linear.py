"""FrozenLinear: a Linear for serving, with E4M3 codes for its weight.

    y = (codes of x) (codes of w)^T * scales + b

State dict: `weight` (float8 codes [N, K]), `weight_scale` (float32, E8M0 codes for MX), `bias`, and `input_scale`
(float32 []) where activations are static; value = code * scale. No gradient passes: a backward that needs one raises.
Codes and scales keep their dtypes under `.half()` and the like; the bias follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from octavo.formats import E4M3
from octavo.inference.scheme import Scheme
from octavo.kernels import (
    ScaleRule,
    amax,
    cast_transpose,
    pad_matrix,
    pad_row_scale,
    padded,
    partial_amax,
    runs_natively,
)
from octavo.kernels import scaled_mm as product
from octavo.scaling import TENSOR
from octavo.scaling.rules import LARGEST_MULTIPLIER, SMALLEST_MULTIPLIER
from octavo.tensor import QuantizedTensor, quantize

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class FrozenLinear(nn.Module):
    """FP8 weight, FP8 activations, no training.

    Args:
        weight: high-precision values [N, K].
        bias: [N] or None.
        scheme: granularities, and whether activations are static.
        input_scale: value = code * input_scale of the activations, for a static scheme.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    input_scale: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, scheme: Scheme, input_scale: float | None = None) -> None:
        super().__init__()
        if scheme.static:
            check_input_scale(input_scale)
        self.scheme = scheme
        self.out_features, self.in_features = weight.shape
        q = quantize(weight, E4M3, scheme.weight, power_of_two=scheme.power_of_two)
        # K-major whatever the strides of the weight: that of a Conv1D arrives transposed.
        self.register_buffer("weight", q.codes.contiguous())
        self.register_buffer("weight_scale", q.scale)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        scale = torch.tensor(input_scale, dtype=torch.float32, device=weight.device) if scheme.static else None
        self.register_buffer("input_scale", scale)

    @property
    def is_native(self) -> bool:
        """True if its product runs on FP8 units here."""
        codes = self._padded_weight()
        return not self._is_blockwise and runs_natively(codes, codes)

    @property
    def _is_blockwise(self) -> bool:
        return self.scheme.weight.columns is not None

    def forward(self, input: Tensor) -> Tensor:
        """y [..., N] of x [..., K], in x's dtype, or in that of torch.autocast.

        Raises:
            ValueError: the last dimension is not K, or the dtype none of float32, bfloat16 and float16.
        """
        dtype = self._checked_dtype(input)
        with torch.no_grad():
            rows = input.reshape(input.shape[:-1].numel(), self.in_features)
            out = self._blockwise(rows, dtype) if self._is_blockwise else self._scaled(rows, dtype)
            out = out.reshape(*input.shape[:-1], self.out_features)
        if torch.is_grad_enabled() and input.requires_grad and not torch.compiler.is_compiling():
            refused: Tensor = _NoGradient.apply(input, out)
            return refused
        return out

    def _checked_dtype(self, input: Tensor) -> torch.dtype:
        """The dtype of the output, of an input that fits."""
        if input.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"input has shape {tuple(input.shape)}: its last dimension must be in_features = {self.in_features}"
            )
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        if dtype not in _DTYPES:
            raise ValueError(f"input has dtype {dtype}: a frozen layer takes float32, bfloat16 or float16")
        return dtype

    def _scaled(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """One scale a tensor, or one a row of each."""
        granularity = self.scheme.activation
        source, rule = self.input_scale, None
        if source is None:
            source = partial_amax(x) if granularity is TENSOR else amax(x, granularity)
            rule = ScaleRule(power_of_two=self.scheme.power_of_two)
        codes, scale = cast_transpose(x, E4M3, source, None, rule=rule)[:2]
        assert codes is not None, "the row-wise layout was asked for"
        assert scale is not None, "codes come with their scale"
        bias = self.bias
        if bias is not None and padded(self.out_features) != self.out_features:
            bias = nn.functional.pad(bias, (0, padded(self.out_features) - self.out_features))
        weight_scale = pad_row_scale(self.weight_scale)
        out = product(codes, self._padded_weight(), scale, weight_scale, bias, dtype, "fast")
        return out[: x.shape[0], : self.out_features]

    def _blockwise(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Emulated: values of both operands, exact in bf16 since scales are powers of two, multiplied as such."""
        scheme = self.scheme
        q = quantize(x, E4M3, scheme.activation, power_of_two=scheme.power_of_two)
        inner = torch.float32 if x.device.type == "cpu" else torch.bfloat16
        w = QuantizedTensor(self.weight, self.weight_scale, scheme.weight, inner).dequantize()
        with torch.autocast(x.device.type, enabled=False):
            out = nn.functional.linear(q.dequantize(inner), w).float()
        return (out if self.bias is None else out + self.bias.float()).to(dtype)

    def _padded_weight(self) -> Tensor:
        return pad_matrix(self.weight.view(torch.uint8)).view(self.weight.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """To another device; another dtype is for the bias alone."""
        before = {name: tensor for name, tensor in self._buffers.items() if name != "bias" and tensor is not None}
        result = super()._apply(fn, recurse)
        for name, tensor in before.items():
            after = self._buffers[name]
            if after is not None and after.dtype != tensor.dtype:
                self._buffers[name] = tensor.to(after.device)
        return result

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # copy_ would convert anything without a word, high-precision weights included.
        for name in ("weight", "weight_scale"):
            found, own = state_dict.get(prefix + name), self._buffers[name]
            if found is not None and own is not None and found.dtype != own.dtype:
                error_msgs.append(
                    f"{prefix}{name} is {found.dtype}: a frozen layer of scheme {self.scheme.name!r} loads {own.dtype};"
                    " load high-precision weights before freezing"
                )
                return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def __getstate__(self) -> dict[str, Any]:
        # Plain pickle does not know the storages of float8: bytes travel as bytes, each with its dtype.
        stored = {name: _stored(buffer) for name, buffer in self._buffers.items()}
        return {**self.__dict__, "_buffers": stored}

    def __setstate__(self, state: dict[str, Any]) -> None:
        buffers = {name: None if one is None else one[0].view(one[1]) for name, one in state["_buffers"].items()}
        super().__setstate__({**state, "_buffers": buffers})

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None},"
            f" scheme={self.scheme.name}"
        )


def _stored(buffer: Tensor | None) -> tuple[Tensor, torch.dtype] | None:
    if buffer is None:
        return None
    return buffer.view(torch.uint8) if buffer.dtype.itemsize == 1 else buffer, buffer.dtype


def check_input_scale(scale: float | None, whose: str = "") -> None:
    """Raise ValueError unless `scale` and its reciprocal are positive normal numbers of float32."""
    if scale is None or not SMALLEST_MULTIPLIER <= float(scale) <= LARGEST_MULTIPLIER:
        raise ValueError(
            f"input_scale {whose}is {scale}: a static scheme needs one from 2^-126 to 2^126: calibrate the model first"
        )


class _NoGradient(torch.autograd.Function):
    """An output that says so when a gradient is asked of it, rather than be a constant without a word."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, out: Tensor) -> Tensor:
        # Not known as a view of `out`, which could not be changed in place by what follows.
        same: Tensor = torch.ops.aten._unsafe_view.default(out, out.shape)
        return same

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        raise RuntimeError(
            "a frozen layer passes no gradient: train with octavo.convert, and freeze afterwards; or run it under"
            " torch.no_grad()"
        )
