"""What a QuantizedTensor answers to: the operations that move or show numbers, and an optimizer's in-place step.

Each handler takes the operator, its arguments and its keywords. Whatever is not in the table raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.scaling import BLOCK_1X128, MX, ROW, TENSOR
from octavo.tensor.quantized_tensor import STANDS_FOR, QuantizedTensor, values

aten = torch.ops.aten
# What optimizers call with foreach=True and fused=True; of a foreach operator only the form that works in place.
_LISTS_IN_PLACE = re.compile(r"aten::(_foreach_\w+_|_fused_\w+_)$")
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def dispatch(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `function` on arguments among which there are QuantizedTensors."""
    handler = _HANDLERS.get(function)
    if handler is None and _LISTS_IN_PLACE.match(function._schema.name):
        handler = _lists_in_place
    if handler is None:
        raise NotImplementedError(
            f"{function} is not defined for a QuantizedTensor: call .dequantize() first,"
            " or octavo.scaled_mm for a matrix product"
        )
    return handler(function, args, kwargs)


def _wrap(like: QuantizedTensor, codes: Tensor, scale: Tensor, dtype: torch.dtype | None = None) -> QuantizedTensor:
    return QuantizedTensor(codes, scale, like.granularity, dtype or like.dtype)


def _same_view(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    q = args[0]
    return _wrap(q, function(q.codes), q.scale)


def _clone(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    q = args[0]
    return _wrap(q, q.codes.clone(**kwargs), q.scale.clone())


def _to_copy(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    q, dtype = args[0], kwargs.get("dtype")
    if dtype not in (None, *STANDS_FOR):
        raise NotImplementedError(f"{function}: a QuantizedTensor cannot stand for {dtype}: call .dequantize() first")
    where = {k: v for k, v in kwargs.items() if k in ("device", "non_blocking") and v is not None}
    codes, scale = aten._to_copy(q.codes, **where), aten._to_copy(q.scale, **where)
    return _wrap(q, codes, scale, dtype)


def _transpose(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    q = args[0]
    if q.dim() != 2:
        raise NotImplementedError(f"{function} of a QuantizedTensor needs a matrix, found shape {tuple(q.shape)}")
    codes = function(q.codes, *args[1:])
    turns = 1
    if function is aten.transpose.int:
        turns = args[1] - args[2]
    elif function is aten.permute.default:
        turns = args[1][0]
    if turns % 2 == 0:
        return _wrap(q, codes, q.scale)
    scale = q.scale.t() if q.scale.dim() else q.scale
    return QuantizedTensor(codes, scale, q.granularity.transposed, q.dtype)


def _view(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    q, shape = args[0], args[1]
    codes = function(q.codes, shape)
    keeps_rows = q.granularity in (ROW, BLOCK_1X128, MX) and codes.shape[-1:] == q.shape[-1:]
    if q.granularity is not TENSOR and not keeps_rows and tuple(codes.shape) != tuple(q.shape):
        raise NotImplementedError(
            f"{function}: a view of shape {tuple(codes.shape)} would tear blocks of granularity {q.granularity}"
        )
    return _wrap(q, codes, q.scale)


def _equal(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    a, b = args[0], args[1]
    if not (isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor)):
        return False
    return (
        (a.format, a.granularity, a.dtype) == (b.format, b.granularity, b.dtype)
        and torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8))
        and torch.equal(a.scale.float(), b.scale.float())
    )


def _plain_like(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """zeros_like and its kin give an ordinary tensor: an optimizer's state is no FP8."""
    q = args[0]
    shadow = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device=q.device)
    result: Tensor = function(shadow, *args[1:], **kwargs)
    return result


def _plain_new(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    q = args[0]
    result: Tensor = function(torch.empty(0, dtype=q.dtype, device=q.device), *args[1:], **kwargs)
    return result


def _empty_like(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of the same kind, to be filled from elsewhere: what `Module.to_empty` makes of an FP8 weight."""
    q = args[0]
    if kwargs.get("dtype") not in (None, q.dtype):
        return _plain_like(function, args, kwargs)
    where = {k: v for k, v in kwargs.items() if k == "device" and v is not None}
    return _wrap(q, torch.empty_like(q.codes, **where), torch.empty_like(q.scale, **where))


def _in_place(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Decode, change, quantize again with fresh scales; the codes and the scale keep their storage."""
    target = args[0]
    high = _decoded(target)
    function(high, *(_decoded(x) for x in args[1:]), **kwargs)
    _store(target, high)
    return target


def _lists_in_place(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The same for lists of tensors, of which the first is changed."""
    decoded = [[_decoded(x, x.dtype) for x in arg] if _is_list_of_tensors(arg) else arg for arg in args]
    function(*decoded, **kwargs)
    for target, high in zip(args[0], decoded[0], strict=True):
        _store(target, high)
    # Of a list's members autograd counts only the changes that it sees.
    torch.autograd.graph.increment_version([x for x in args[0] if isinstance(x, QuantizedTensor)])


def _is_list_of_tensors(argument: Any) -> bool:
    return isinstance(argument, list) and all(isinstance(x, Tensor) for x in argument)


def _decoded(x: Any, dtype: torch.dtype = torch.float32) -> Any:
    return values(x.codes, x.scale, x.granularity).to(dtype) if isinstance(x, QuantizedTensor) else x


def _store(q: Tensor, high: Tensor) -> None:
    """Values into a QuantizedTensor; a plain tensor holds them already."""
    if not isinstance(q, QuantizedTensor):
        return
    from octavo.tensor.quantize import quantize

    fresh = quantize(high, q.format, q.granularity)
    q.codes.copy_(fresh.codes)
    q.scale.copy_(fresh.scale)


def _copy(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if not isinstance(target, QuantizedTensor):
        target.copy_(source.dequantize())
    elif isinstance(source, QuantizedTensor) and (source.format, source.granularity) == (
        target.format,
        target.granularity,
    ):
        target.codes.copy_(source.codes)
        target.scale.copy_(source.scale)
    else:
        high = source.dequantize(torch.float32) if isinstance(source, QuantizedTensor) else source.float()
        _store(target, high.expand(target.shape).to(target.device))
    return target


_HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys((aten.detach.default, aten.alias.default), _same_view),
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    **dict.fromkeys((aten.t.default, aten.transpose.int, aten.permute.default), _transpose),
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default), _view),
    aten.equal.default: _equal,
    aten.copy_.default: _copy,
    aten.empty_like.default: _empty_like,
    **dict.fromkeys(
        (
            aten.zeros_like.default,
            aten.ones_like.default,
            aten.full_like.default,
            aten.rand_like.default,
            aten.randn_like.default,
        ),
        _plain_like,
    ),
    **dict.fromkeys(
        (aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default), _plain_new
    ),
    **dict.fromkeys(
        (
            aten.add_.Tensor,
            aten.add_.Scalar,
            aten.sub_.Tensor,
            aten.sub_.Scalar,
            aten.mul_.Tensor,
            aten.mul_.Scalar,
            aten.div_.Tensor,
            aten.div_.Scalar,
            aten.addcmul_.default,
            aten.addcdiv_.default,
            aten.lerp_.Scalar,
            aten.lerp_.Tensor,
            aten.clamp_.default,
            aten.zero_.default,
            aten.fill_.Scalar,
            aten.normal_.default,
            aten.uniform_.default,
        ),
        _in_place,
    ),
}
