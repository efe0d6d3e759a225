"""What a training step keeps for its backward, counted by running the model's forward on the meta device.

Nothing is computed and no memory is used: every operation runs on shapes alone, and what autograd saves is summed, each
storage once, parameters and buffers aside. So the count is that of eager code; the compiler keeps less.

Where the meta device would keep other things than a GPU, this one's are put in their place:

    attention   q, k, v, the output and a float32 logarithm a row, as the fused kernels keep them
    dropout     a mask of one byte an element
    autocast    the casts of torch.autocast to bf16 and back to float32, the weights' copies kept until the backward
    FP8 Linear  one byte an element of x and of w, and scales, but no x in 16 bits; layers on one input share its codes

A branch that depends on data (is there padding? are sequences packed?) is taken as for whole, single sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from octavo.kernels import padded

Precision = Literal["autocast", "bf16"]
Kind = Literal["activations", "input codes", "weight codes", "weight copies"]

# What torch.autocast runs in 16 bits, and what in float32, of what transformers call.
_LOW = frozenset(
    {
        "linear",
        "matmul",
        "__matmul__",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "einsum",
        "conv1d",
        "conv2d",
        "conv3d",
        "_grouped_mm",
        "grouped_mm",
    }
)
_FLOAT = frozenset({"layer_norm", "group_norm", "softmax", "log_softmax", "cross_entropy", "nll_loss", "pow", "rsqrt"})


@dataclass
class Kept:
    """What one forward keeps, in bytes, and how many tokens each weight met.

    Attributes:
        bytes: by kind.
        largest: of the activations, one tensor.
        tokens: by id of a weight, of each call.
    """

    bytes: dict[Kind, int] = field(
        default_factory=lambda: {"activations": 0, "input codes": 0, "weight codes": 0, "weight copies": 0}
    )
    largest: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Scales:
    """Bytes of scales that go with kept codes of an operand.

    Attributes:
        input, weight: of a matrix of so many rows and columns, in the layout that the backward wants.
    """

    input: Callable[[int, int], int]
    weight: Callable[[int, int], int]


SCALES: Mapping[str, Scales] = {
    "delayed": Scales(lambda m, k: 4, lambda n, k: 4),
    "current": Scales(lambda m, k: 4, lambda n, k: 4),
    "rowwise": Scales(lambda m, k: 4 * k, lambda n, k: 4 * k),
    "block": Scales(lambda m, k: 4 * k * -(-m // 128), lambda n, k: 4 * -(-n // 128) * -(-k // 128)),
}


def kept_by(
    model: nn.Module, forward: Callable[[], object], precision: Precision, fp8: Mapping[int, Scales] | None = None
) -> Kept:
    """Run `forward` of a model on the meta device and count what it keeps.

    Args:
        model: its parameters and buffers are not counted.
        forward: calls it.
        precision: "autocast" casts as torch.autocast does, "bf16" leaves dtypes alone.
        fp8: ids of the weights whose layers run in FP8, and their scales.
    """
    tracing = _Tracing(model, precision, fp8 or {})
    with torch.autograd.graph.saved_tensors_hooks(tracing.count, lambda packed: packed), torch.device("meta"), tracing:
        forward()
    return tracing.kept


class _Tracing(TorchFunctionMode):
    """Sees every call of torch's functions, and what autograd saves."""

    def __init__(self, model: nn.Module, precision: Precision, fp8: Mapping[int, Scales]) -> None:
        super().__init__()
        self.kept = Kept()
        self._casts = precision == "autocast"
        self._fp8 = fp8
        held = [*model.parameters(), *model.buffers()]
        # By storage; each is held, so that no other takes its place.
        self._seen: dict[int, Any] = {_key(tensor): tensor.untyped_storage() for tensor in held}
        self._kinds: dict[int, Kind] = {}
        self._parameters = {id(parameter) for parameter in model.parameters()}
        self._copies: dict[int, Tensor] = {}
        self._input_codes: dict[int, tuple[Tensor, Tensor]] = {}

    def count(self, tensor: Tensor) -> Tensor:
        """Add a tensor that autograd saves, if its storage is new."""
        key = _key(tensor)
        if key not in self._seen:
            storage = self._seen[key] = tensor.untyped_storage()
            kind = self._kinds.get(key, "activations")
            self.kept.bytes[kind] += storage.nbytes()
            if kind == "activations":
                self.kept.largest = max(self.kept.largest, storage.nbytes())
        return tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function, or what stands for it."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "__bool__":
            return True  # "no padding", "nothing packed": what models ask of masks
        if name == "scaled_dot_product_attention":
            return self._attention(*args, **kwargs)
        if name == "dropout":
            return self._dropout(*args, **kwargs)
        weight = _weight_of(name, args, kwargs)
        if weight is not None:
            x, matrix, bias = weight
            self.kept.tokens.setdefault(id(matrix), []).append(x.numel() // x.shape[-1])
            if id(matrix) in self._fp8:
                return self._linear(x, matrix, bias, name == "addmm")
        if self._casts and name in _LOW | _FLOAT:
            cast = self._to_low if name in _LOW else _to_float
            args, kwargs = _mapped(args, cast), {key: _mapped(value, cast) for key, value in kwargs.items()}
        return func(*args, **kwargs)

    def _to_low(self, tensor: Tensor) -> Tensor:
        """In bf16, as autocast casts: of a parameter one copy serves all its uses."""
        if tensor.dtype is not torch.float32:
            return tensor
        if id(tensor) not in self._parameters or not tensor.requires_grad:
            return tensor.bfloat16()
        copy = self._copies.get(id(tensor))
        if copy is None:
            copy = self._copies[id(tensor)] = tensor.bfloat16()
            self._kinds[_key(copy)] = "weight copies"
        return copy

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        operands = [self._to_low(one) if self._casts else one for one in (q, k, v)]
        out: Tensor = _Attention.apply(*operands)
        return out

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> Tensor:
        if not training or p == 0:
            return x
        out: Tensor = _Dropout.apply(x)
        return out

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        scales = self._fp8[id(weight)]
        rows, columns = x.numel() // x.shape[-1], x.shape[-1]
        made = self._input_codes.get(id(x))
        if made is None:
            codes = self._codes(rows, columns, scales.input(rows, columns), "input codes")
            made = self._input_codes[id(x)] = (x, codes)
        out_features = weight.shape[1 if transposed else 0]
        of_weight = self._codes(out_features, columns, scales.weight(out_features, columns), "weight codes")
        dtype = torch.bfloat16 if self._casts else x.dtype
        out: Tensor = _Linear.apply(x, weight, bias, made[1], of_weight, dtype, out_features)
        return out

    def _codes(self, rows: int, columns: int, scale_bytes: int, kind: Kind) -> Tensor:
        """A storage as large as codes of a matrix, padded, and their scales."""
        codes = torch.empty(padded(rows) * padded(columns) + scale_bytes, dtype=torch.uint8, device="meta")
        self._kinds[_key(codes)] = kind
        return codes


class _Linear(torch.autograd.Function):
    """Keeps what an FP8 Linear keeps."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        x_codes: Tensor,
        w_codes: Tensor,
        dtype: torch.dtype,
        out_features: int,
    ) -> Tensor:
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x_codes if needs_dw else None, w_codes if needs_dx else None)
        return x.new_empty((*x.shape[:-1], out_features), dtype=dtype)


class _Attention(torch.autograd.Function):
    """Keeps what fused attention keeps: q [B, H, T, D], k, v, the output, a logarithm a row."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Laid out as [B, T, H, D], as the fused kernels do: what follows transposes it back without a copy.
        batch, heads, tokens, _ = q.shape
        out = q.new_empty((batch, tokens, heads, v.shape[-1])).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out


class _Dropout(torch.autograd.Function):
    """Keeps a mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)


def _weight_of(name: str, args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Input, weight and bias of a linear layer's product; of Conv1D it is addmm. None for anything else."""
    if name == "linear":
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        return given["input"], given["weight"], given.get("bias")
    if name == "addmm" and len(args) == 3:
        return args[1], args[2], args[0]
    return None


def _mapped(value: Any, cast: Callable[[Tensor], Tensor]) -> Any:
    """Floating tensors in an argument, cast; tuples and lists of them too."""
    if isinstance(value, Tensor):
        return cast(value) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(_mapped(one, cast) for one in value)
    return value


def _to_float(tensor: Tensor) -> Tensor:
    return tensor.float()


def _key(tensor: Tensor) -> int:
    """Identity of a tensor's storage: on the meta device there is no address."""
    key: int = tensor.untyped_storage()._cdata
    return key
