"""FrozenLayer: what layers for serving share: E4M3 codes for weights, and how they are kept, moved, loaded and run.

Each matrix product has buffers of its own: codes [N, K], their scale, bias [N] or None, and input_scale, float32 [],
where activations are static; value = code * scale. No gradient passes: a backward that needs one raises. Codes and
scales keep their dtypes under `.half()` and the like; all else follows.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.conversion.ends import CountedLayer
from octavo.formats import E4M3
from octavo.inference.known_scales import KnownScales
from octavo.inference.scheme import Scheme, scheme_of
from octavo.kernels import ALIGNMENT, pad_matrix, pad_row_scale
from octavo.kernels.scaled_mm import with_bias
from octavo.modules import FixedWeights
from octavo.recipes import Accumulate
from octavo.runtime import LinearPlan
from octavo.runtime.counting import current_count
from octavo.scaling import ROW, TENSOR
from octavo.scaling.rules import LARGEST_MULTIPLIER, SMALLEST_MULTIPLIER
from octavo.tensor import (
    CurrentQuantizer,
    DelayedQuantizer,
    Operand,
    OperandState,
    QuantizedTensor,
    Quantizer,
    QuantizeSpec,
    quantize,
)

_MEASURED = {
    granularity.name: CurrentQuantizer(QuantizeSpec(format=E4M3, granularity=granularity))
    for granularity in (TENSOR, ROW)
}
# The scale is a tensor of the layer's, as one of delayed scaling is, but nothing is gathered and nothing updates it.
_GIVEN = QuantizeSpec(format=E4M3, scaling="delayed")
_SUMS = Accumulate()


class Product(NamedTuple):
    """Names of the buffers of one matrix product."""

    weight: str
    weight_scale: str
    bias: str
    input_scale: str

    @classmethod
    def prefixed(cls, prefix: str) -> Product:
        """Names that all begin alike."""
        return cls(*(f"{prefix}{name}" for name in cls._fields))


class FrozenLayer(FixedWeights, CountedLayer):
    """FP8 weights, FP8 activations, no training.

    Args:
        scheme: granularities, and whether activations are static.
        products: buffers of each matrix product.

    Attributes:
        layer_name: qualified name in the model that was frozen, for `octavo.count_gemms`.
        input_group: one for layers that always run on one input; None of a layer that has no such.
    """

    layer_name: str | None = None
    input_group: OperandState | None = None

    def __init__(self, scheme: Scheme, products: tuple[Product, ...]) -> None:
        super().__init__()
        self.scheme, self.products = scheme, products
        self.kept_states = tuple(OperandState() for _ in products)
        self._known_scales = KnownScales()

    def hold(self, product: Product, weight: Tensor, bias: Tensor | None, input_scale: float | None) -> None:
        """Give the layer codes of a weight [N, K], a copy of its bias, and the scale of its input if it is static."""
        if self.scheme.static:
            check_input_scale(input_scale)
        q = quantize(weight, E4M3, self.scheme.weight, power_of_two=self.scheme.power_of_two)
        # K-major whatever the strides of the weight: that of a Conv1D arrives transposed.
        self.register_buffer(product.weight, q.codes.contiguous())
        self.register_buffer(product.weight_scale, q.scale)
        self.register_buffer(product.bias, None if bias is None else bias.detach().clone())
        given = torch.tensor(input_scale, dtype=torch.float32, device=weight.device) if self.scheme.static else None
        self.register_buffer(product.input_scale, given)
        if given is not None and input_scale is not None:
            self._known_scales.note(product.input_scale, given, input_scale)

    def hold_copy(self, name: str, value: Tensor | None) -> None:
        """Give the layer a copy of a parameter that stays as it is."""
        self.register_buffer(name, None if value is None else value.detach().clone())

    @property
    def is_blockwise(self) -> bool:
        """Products are emulated: scales are those of blocks."""
        return self.scheme.weight.columns is not None

    def plan(self, number: int, part: str = "") -> LinearPlan:
        """What the functions of Octavo's layers run one of the products with.

        Args:
            number: of the product.
            part: what its name adds to the layer's, for `octavo.count_gemms`.
        """
        scale_name = self.products[number].input_scale
        state, given, traced = self.kept_states[number], self._buffers[scale_name], torch.compiler.is_compiling()
        quantizer: Quantizer
        if given is None:
            quantizer = _MEASURED[self.scheme.activation.name]
        else:
            alike = None if traced else self._known_scales.text(scale_name, given)
            quantizer = DelayedQuantizer(_GIVEN, state, gather=False, from_data=False, scale=given, alike=alike)
        name, counter = ("", None) if traced else (f"{self.shown_name}{part}", current_count())
        # There is no backward, and the codes of the weight are given.
        return LinearPlan(
            quantizer,
            quantizer,
            quantizer,
            _SUMS,
            True,
            True,
            False,
            _GIVEN,
            _GIVEN,
            state,
            name,
            counter,
            self.input_group,
        )

    @property
    def shown_name(self) -> str:
        """What counts call the layer."""
        return self.layer_name or type(self).__name__

    def operand(self, number: int) -> Operand:
        """The weight of one of the products, as they take it."""
        codes, scale = self.codes(number), self._buffers[self.products[number].weight_scale]
        assert scale is not None, "codes come with their scale"
        if codes.shape[0] % ALIGNMENT or codes.shape[1] % ALIGNMENT:
            codes = pad_matrix(codes.view(torch.uint8)).view(codes.dtype)
        return Operand(codes, pad_row_scale(scale), None, None)

    def codes(self, number: int) -> Tensor:
        """Of the weight of one of the products, [N, K]."""
        codes = self._buffers[self.products[number].weight]
        assert codes is not None, "a product has a weight"
        return codes

    def bias_of(self, number: int) -> Tensor | None:
        """Of one of the products, [N] or None."""
        return self._buffers[self.products[number].bias]

    def count(self, name: str, precision: str) -> None:
        """Note a product for `octavo.count_gemms`."""
        if not torch.compiler.is_compiling() and (counter := current_count()) is not None:
            counter.add(name, "fprop", precision)

    def blockwise(self, number: int, x: Tensor, dtype: torch.dtype, part: str = "") -> Tensor:
        """y [M, N] of x [M, K], emulated: values of both operands, exact in bf16 since scales are powers of two,
        multiplied as such."""
        self.count(f"{self.shown_name}{part}", "fp8 emulated")
        scheme, scale, bias = self.scheme, self._buffers[self.products[number].weight_scale], self.bias_of(number)
        assert scale is not None, "codes come with their scale"
        q = quantize(x, E4M3, scheme.activation, power_of_two=scheme.power_of_two)
        inner = torch.float32 if x.device.type == "cpu" else torch.bfloat16
        w = QuantizedTensor(self.codes(number), scale, scheme.weight, inner).dequantize()
        with torch.autocast(x.device.type, enabled=False):
            out = nn.functional.linear(q.dequantize(inner), w).float()
        return with_bias(out, bias, dtype)

    def _given_scales(self) -> dict[str, Tensor | None]:
        return {product.input_scale: self._buffers.get(product.input_scale) for product in self.products}

    def _keeps_dtype(self, name: str) -> bool:
        return any(name in (p.weight, p.weight_scale, p.input_scale) for p in self.products)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """To another device; another dtype is for biases and parameters of a norm alone."""
        before = {name: tensor for name, tensor in self._buffers.items() if tensor is not None}
        known = self._known_scales.texts(self._given_scales())
        result = super()._apply(fn, recurse)
        for name, tensor in before.items():
            after = self._buffers[name]
            if after is not None and self._keeps_dtype(name) and after.dtype != tensor.dtype:
                self._buffers[name] = tensor.to(after.device)
        self._known_scales.follow(self._given_scales(), known)
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
        for product in self.products:
            other = self._other_scheme(product, state_dict, prefix)
            if other is not None:
                differs = _scheme_differs(other, self.scheme)
                # All layers of a model mostly differ alike.
                if not any(message.endswith(differs) for message in error_msgs):
                    error_msgs.append(f"{prefix.removesuffix('.') or '(root)'} {differs}")
                return
            for name in (product.weight, product.weight_scale):
                found, own = state_dict.get(prefix + name), self._buffers[name]
                if found is not None and own is not None and found.dtype != own.dtype:
                    error_msgs.append(
                        f"{prefix}{name} is {found.dtype}: a frozen layer of scheme {self.scheme.name!r} loads"
                        f" {own.dtype}; load high-precision weights before freezing"
                    )
                    return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        for name, scale in self._given_scales().items():
            if scale is not None and prefix + name in state_dict:
                self._known_scales.read(name, scale)

    def _other_scheme(self, product: Product, state_dict: dict[str, Any], prefix: str) -> Scheme | None:
        """The scheme that codes to load were made by, if their scale would not do here."""
        codes, own = (state_dict.get(prefix + product.weight), self._buffers[product.weight])
        scale, own_scale = (state_dict.get(prefix + product.weight_scale), self._buffers[product.weight_scale])
        if codes is None or own is None or scale is None or own_scale is None:
            return None
        if (codes.dtype, codes.shape) != (own.dtype, own.shape):
            return None
        if (scale.dtype, scale.shape) == (own_scale.dtype, own_scale.shape):
            return None
        return scheme_of(codes, scale, prefix + product.input_scale in state_dict)

    def __getstate__(self) -> dict[str, Any]:
        # Plain pickle does not know the storages of float8: bytes travel as bytes, each with its dtype.
        stored = {name: _stored(buffer) for name, buffer in self._buffers.items()}
        known = self._known_scales.texts(self._given_scales())
        return {**self.__dict__, "_buffers": stored, "_known_scales": known}

    def __setstate__(self, state: dict[str, Any]) -> None:
        buffers = {name: None if one is None else one[0].view(one[1]) for name, one in state["_buffers"].items()}
        super().__setstate__({**state, "_buffers": buffers, "_known_scales": KnownScales()})
        self._known_scales.follow(self._given_scales(), state.get("_known_scales", {}))


def _scheme_differs(found: Scheme, own: Scheme) -> str:
    scales = ", input_scales=..." if found.static else ""
    return (
        f"was saved with the scheme {found.name!r}, and is frozen with {own.name!r} here: build the model, freeze it"
        f" alike by octavo.freeze(model, {found.name!r}{scales}), and load the file then"
    )


def check_input_scale(scale: Any, whose: str = "") -> None:
    """Raise ValueError unless `scale` and its reciprocal are positive normal numbers of float32."""
    number = isinstance(scale, Real) or (isinstance(scale, Tensor) and scale.numel() == 1)
    if not number or not SMALLEST_MULTIPLIER <= scale <= LARGEST_MULTIPLIER:
        raise ValueError(
            f"input_scale {whose}is {scale}: a static scheme needs one from 2^-126 to 2^126: calibrate the model first"
        )


def _stored(buffer: Tensor | None) -> tuple[Tensor, torch.dtype] | None:
    if buffer is None:
        return None
    return buffer.view(torch.uint8) if buffer.dtype.itemsize == 1 else buffer, buffer.dtype
