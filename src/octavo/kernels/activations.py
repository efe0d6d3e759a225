"""Activation functions by name, with their gradients, in plain PyTorch and float32: the definition.

    name            f(x)                                    name of the gated kind
    gelu_tanh       x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3))      geglu_tanh
    gelu_erf        x (1 + erf(x / sqrt 2)) / 2             geglu_erf
    silu            x sigmoid(x)                            swiglu
    qgelu           x sigmoid(1.702 x)                      qgeglu
    relu            max(x, 0)                               reglu
    srelu           max(x, 0)^2                             sreglu
    sigmoid         sigmoid(x)                              glu

A gated kind takes [M, 2K] and gives f(first half) * second half, [M, K]: the order of Transformer Engine. gelu_tanh is
gelu(approximate="tanh") of torch, since (1 + tanh u) / 2 = sigmoid(2u); written so, nothing cancels for negative x.

Gradients are those of torch at kinks: of relu and srelu 0 where x <= 0, and NaN passes. Every finite x gives a finite
f'(x): the factor of sigmoid' that grows with x is kept from overflow where sigmoid' is 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

PLAIN = ("gelu_tanh", "gelu_erf", "silu", "qgelu", "relu", "srelu", "sigmoid")
GATED = {
    "geglu_tanh": "gelu_tanh",
    "geglu_erf": "gelu_erf",
    "swiglu": "silu",
    "qgeglu": "qgelu",
    "reglu": "relu",
    "sreglu": "srelu",
    "glu": "sigmoid",
}
ACTIVATIONS = (*PLAIN, *GATED)

# gelu_tanh: sigmoid of x (TANH_LINEAR + TANH_CUBIC x^2).
TANH_LINEAR = 2 * math.sqrt(2 / math.pi)
TANH_CUBIC = 0.044715 * TANH_LINEAR
# Beyond it sigmoid' of gelu_tanh is 0 in float32.
TANH_FLAT = 16.0
QUICK = 1.702


def base_of(activation: str) -> str:
    """f of a plain or gated kind."""
    return GATED.get(activation, activation)


def check_activation(activation: str, columns: int) -> None:
    """Raise unless the activation is known, and the columns of its input are halves where it is gated."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}: expected one of {', '.join(ACTIVATIONS)}")
    if activation in GATED and columns % 2:
        raise ValueError(
            f"{activation} multiplies two halves of its input's columns, found {columns}: give an even number of them"
        )


def activated(x: Tensor, activation: str) -> Tensor:
    """f(x) [M, K] of float32 x [M, K], or [M, 2K] if gated."""
    base = base_of(activation)
    if activation in GATED:
        first, second = x.chunk(2, dim=1)
        return _function(first, base) * second
    return _function(x, base)


def activation_gradient(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    """Gradient of x, float32 and of its shape, from `grad` [M, K], that of `activated(x, activation)`."""
    base = base_of(activation)
    if activation in GATED:
        first, second = x.chunk(2, dim=1)
        return torch.cat([_gradient(grad * second, first, base), grad * _function(first, base)], dim=1)
    return _gradient(grad, x, base)


def _sigmoid(z: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-z))


def _argument(x: Tensor, base: str) -> Tensor:
    """Of the sigmoid in x sigmoid(z)."""
    if base == "gelu_tanh":
        return x * (TANH_LINEAR + TANH_CUBIC * (x * x))
    return x * QUICK if base == "qgelu" else x


def _function(x: Tensor, base: str) -> Tensor:
    if base in ("relu", "srelu"):
        kept = torch.where(x <= 0, 0.0, x)
        return kept * kept if base == "srelu" else kept
    if base == "gelu_erf":
        return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))
    if base == "sigmoid":
        return _sigmoid(x)
    return x / (1 + torch.exp(-_argument(x, base)))


def _gradient(grad: Tensor, x: Tensor, base: str) -> Tensor:
    """grad * f'(x)."""
    if base in ("relu", "srelu"):
        return torch.where(x <= 0, 0.0, grad * (2 * x) if base == "srelu" else grad)
    if base == "gelu_erf":
        density = torch.exp(-0.5 * (x * x)) * (1 / math.sqrt(2 * math.pi))
        return grad * (0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * density)
    s = _sigmoid(_argument(x, base))
    rise = s * (1 - s)
    if base == "sigmoid":
        return grad * rise
    if base == "gelu_tanh":
        near = x.clamp(-TANH_FLAT, TANH_FLAT)
        return grad * (s + rise * (near * (TANH_LINEAR + 3 * TANH_CUBIC * (near * near))))
    return grad * (s + rise * x * QUICK if base == "qgelu" else s + rise * x)
