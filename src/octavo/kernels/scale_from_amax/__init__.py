"""scale_from_amax: the multiplier and the scale of each amax, by the rule of `octavo.scaling.rules`.

A kernel of its own since the rule is six tiny operations, each a launch, and since its divisions must round to nearest,
which a compiler's fused division need not do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.formats import Format, format_named
from octavo.kernels.library import register
from octavo.kernels.scale_from_amax.reference import scale_from_amax_reference
from octavo.kernels.triton_support import device_reasons, uses_triton

NO_EPSILON = (0.0).hex()


def scale_from_amax(
    amax: Tensor, format: Format, epsilon: float | str = NO_EPSILON, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """(multiplier, scale), each float32 of the shape of `amax` (float32, any shape, contiguous).

    multiplier = M / max(amax, epsilon), 1 where that is 0, clamped, as an option rounded down to a power of two;
    scale = 1 / multiplier. epsilon may be text (`float.hex`), and is within layers: of a number
    torch.compile(dynamic=True) makes a symbol, which it then cannot take into the backward.
    """
    if torch.compiler.is_compiling():
        text = epsilon if isinstance(epsilon, str) else epsilon.hex()
        multiplier, scale = _operator(amax, format.name, text, power_of_two)
        return multiplier, scale
    return _launch(amax, format, epsilon, power_of_two)


def unsupported_reasons(amax: Tensor) -> list[str]:
    """Why the Triton twin does not run for this call; then the PyTorch reference does."""
    return device_reasons(amax.device)


def _launch(amax: Tensor, format: Format, given: float | str, power_of_two: bool) -> tuple[Tensor, Tensor]:
    epsilon = float.fromhex(given) if isinstance(given, str) else given
    if uses_triton(amax) and amax.numel():
        from octavo.kernels.scale_from_amax.triton_kernel import scale_from_amax_triton

        return scale_from_amax_triton(amax, format, epsilon, power_of_two)
    return scale_from_amax_reference(amax, format, epsilon, power_of_two)


_operator = register(
    "scale_from_amax(Tensor amax, str format, str epsilon, bool power_of_two) -> (Tensor, Tensor)",
    lambda amax, format, epsilon, power_of_two: _launch(amax, format_named(format), epsilon, power_of_two),
    lambda amax, format, epsilon, power_of_two: (torch.empty_like(amax), torch.empty_like(amax)),
)

__all__ = ["scale_from_amax", "scale_from_amax_reference", "unsupported_reasons"]
