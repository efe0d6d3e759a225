"""Operands for products alone and casts to time, all through `octavo.tensor`'s quantizers: the one place here that
knows how they are called."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.formats import E4M3, E5M2, Format
from octavo.scaling import ROW, TENSOR
from octavo.tensor import CurrentQuantizer, DelayedQuantizer, Operand, OperandState, QuantizeSpec

Cast = Callable[[Tensor], Operand]


def delayed_cast(device: torch.device, gradient: bool = False) -> Cast:
    """Cast to both layouts under a known scale, gathering the amax."""
    spec = QuantizeSpec(format=_format(gradient), scaling="delayed", inf_to_nan=gradient)
    state = OperandState(device, late_bound=gradient)
    quantizer = DelayedQuantizer(spec, state, gather=True, from_data=False)
    return lambda x: quantizer(x, True, True)


def current_cast(gradient: bool = False) -> Cast:
    """Measure the amax, then cast to both layouts."""
    quantizer = CurrentQuantizer(QuantizeSpec(format=_format(gradient), granularity=TENSOR, inf_to_nan=gradient))
    return lambda x: quantizer(x, True, True)


def rowwise_cast() -> Cast:
    """Measure amaxes of rows and of columns, then cast to both layouts, each under its own scales."""
    quantizer = CurrentQuantizer(QuantizeSpec(format=E4M3, granularity=ROW, power_of_two=True))
    return lambda x: quantizer(x, True, True)


def _format(gradient: bool) -> Format:
    return E5M2 if gradient else E4M3
