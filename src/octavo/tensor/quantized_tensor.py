"""QuantizedTensor: eight-bit codes, their scale, and the dtype they stand for. Only a number.

It is a tensor subclass because FP8 parameters must be parameters and because people hold it in their hands: it prints,
compares, copies, saves, loads and moves. It computes nothing: an operation that would need values raises and names
itself and the remedy. An optimizer's in-place step is the exception: values are decoded, changed, and quantized again
with a fresh scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.formats import E8M0, Format, decode, format_named, format_of
from octavo.scaling import Granularity, as_matrix, expand_scale, granularity_named

# One list from which flattening, unflattening, pickling and comparison follow.
TENSOR_FIELDS = ("codes", "scale")
# What codes can stand for.
STANDS_FOR = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# How many values a printed tensor shows.
PREVIEW = 8


class QuantizedTensor(Tensor):
    """Codes with their scale: value = code * scale.

    Attributes:
        codes: eight-bit codes, of the tensor's own shape.
        scale: float32, [] for one scale a tensor, else [tall, wide] of the tensor seen as a matrix (E8M0 codes for MX).
        granularity: which elements share a scale.
        dtype: what `dequantize` gives, and what autograd and modules believe the tensor to be.
    """

    codes: Tensor
    scale: Tensor
    granularity: Granularity

    @staticmethod
    def __new__(
        cls, codes: Tensor, scale: Tensor, granularity: Granularity, dtype: torch.dtype, requires_grad: bool = False
    ) -> QuantizedTensor:
        """Wrap codes and scale; nothing is copied."""
        self = Tensor._make_wrapper_subclass(
            cls,
            codes.shape,
            strides=codes.stride(),
            storage_offset=codes.storage_offset(),
            dtype=dtype,
            device=codes.device,
            requires_grad=requires_grad,
        )
        self.codes = codes
        self.scale = scale
        self.granularity = granularity
        wrapped: QuantizedTensor = self
        return wrapped

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @property
    def format(self) -> Format:
        """The format of the codes."""
        return format_of(self.codes.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override, unused-ignore]
        """Values code * scale, computed in float32, rounded once to `dtype` (the tensor's own if None).

        Differentiable as the identity, so that an FP8 parameter can serve a high-precision layer.
        """
        result: Tensor = _Dequantize.apply(self, dtype or self.dtype)
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        numbers, scale = ["…"], f"one of {list(self.scale.shape)}"
        if type(self.codes) is Tensor and self.device.type != "meta":  # else there are no values to show
            flat = values(self.codes, self.scale, self.granularity).reshape(-1)
            numbers = [f"{value:.4g}" for value in flat[:PREVIEW].tolist()] + ["…"] * (flat.numel() > PREVIEW)
            scale = f"{self.scale.item():.6g}" if self.scale.dim() == 0 else scale
        return (
            f"QuantizedTensor([{', '.join(numbers)}], shape={list(self.shape)}, format={self.format},"
            f" granularity={self.granularity}, scale={scale}, dtype={self.dtype}, device='{self.device}')"
        )

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, torch.dtype]]:
        return list(TENSOR_FIELDS), (self.granularity.name, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[str, torch.dtype], outer_size: Any, outer_stride: Any
    ) -> QuantizedTensor:
        name, dtype = context
        return QuantizedTensor(inner["codes"], inner["scale"], granularity_named(name), dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Plain pickle does not know the storages of float8: bytes travel as bytes.
        is_parameter = bool(getattr(self, "_is_param", False))
        extra = {k: v for k, v in self.__dict__.items() if k not in (*TENSOR_FIELDS, "granularity", "_is_param")}
        numbers = (self.codes.view(torch.uint8), self.format.name, _as_bytes(self.scale))
        return (
            rebuild,
            (*numbers, self.granularity.name, self.dtype, self.requires_grad, is_parameter),
            extra or None,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Attributes that people have put on it."""
        self.__dict__.update(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        if id(self) in memo:
            known: QuantizedTensor = memo[id(self)]
            return known
        is_parameter = bool(getattr(self, "_is_param", False))
        copy = QuantizedTensor(self.codes.clone(), self.scale.clone(), self.granularity, self.dtype, self.requires_grad)
        if is_parameter:
            copy._is_param = True
        memo[id(self)] = copy
        if self.grad is not None:
            copy.grad = self.grad.clone()
        return copy

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from octavo.tensor.operations import dispatch

        return dispatch(function, args, kwargs or {})


def rebuild(
    codes: Tensor,
    format: str,
    scale: Tensor,
    granularity: str,
    dtype: torch.dtype,
    requires_grad: bool,
    is_parameter: bool,
) -> QuantizedTensor:
    """The inverse of pickling: codes as bytes, the scale as float32 or, of MX, as bytes."""
    stored = scale.view(E8M0.dtype) if scale.dtype == torch.uint8 else scale
    typed = codes.view(format_named(format).dtype)
    tensor = QuantizedTensor(typed, stored, granularity_named(granularity), dtype, requires_grad)
    if is_parameter:
        tensor._is_param = True  # what isinstance(x, nn.Parameter) looks at
    return tensor


def _as_bytes(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8) if scale.dtype == E8M0.dtype else scale


def values(codes: Tensor, scale: Tensor, granularity: Granularity) -> Tensor:
    """code * scale in float32, of the shape of the codes."""
    matrix = as_matrix(decode(codes))
    shape = (matrix.shape[0], matrix.shape[1])
    return (matrix * expand_scale(decode(scale), granularity, shape)).reshape(codes.shape)


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, quantized: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = quantized.dtype
        return values(quantized.codes, quantized.scale, quantized.granularity).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


torch.serialization.add_safe_globals([rebuild, QuantizedTensor])
