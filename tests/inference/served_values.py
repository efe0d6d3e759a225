"""What a frozen layer must give, computed from its state dict in numpy: no code of Octavo takes part.

E4M3 by ml_dtypes, scales by the arithmetic of their definition, products in float64.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

E4M3_MAX = 448.0
Array = NDArray[np.float64]
# Half a unit in the last place of each output dtype, relative.
HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def codes_of(values: NDArray[np.float32]) -> Array:
    """E4M3 values nearest to float32 `values`, saturating."""
    return np.clip(values, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def stored_weight(state: dict[str, torch.Tensor], blocks: tuple[int, int]) -> Array:
    """code * scale of a state dict; `blocks` are the rows and columns that share a scale."""
    codes = state["weight"].view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scale = state["weight_scale"]
    if scale.dtype == torch.float8_e8m0fnu:
        factors = 2.0 ** (scale.view(torch.uint8).numpy().astype(np.float64) - 127)
    else:
        factors = scale.numpy().astype(np.float64)
    return codes * spread(factors, blocks, codes.shape)


def spread(factors: Array, blocks: tuple[int, int], shape: tuple[int, ...]) -> Array:
    if factors.ndim == 0:
        return np.broadcast_to(factors, shape)
    return factors.repeat(blocks[0], axis=0).repeat(blocks[1], axis=1)[: shape[0], : shape[1]]


def cast_activation(x: torch.Tensor, scheme: str, input_scale: torch.Tensor | None) -> Array:
    """Values of x [M, K] after its cast."""
    x32 = x.float().numpy()
    one = np.float32(1)
    if scheme == "tensor_static":
        assert input_scale is not None
        m = one / np.float32(input_scale.item())
        return codes_of(x32 * m) * np.float64(input_scale.item())
    width = {"block128": 128, "mxfp8": 32}.get(scheme, x.shape[1])
    out = np.zeros(x32.shape)
    for start in range(0, x.shape[1], width):
        part = x32[:, start : start + width]
        amax = np.abs(part).max(axis=1, keepdims=True)
        if scheme == "tensor_dynamic":
            amax = amax.max(keepdims=True)
        with np.errstate(divide="ignore"):
            m = np.where(amax == 0, one, np.float32(E4M3_MAX) / amax).astype(np.float32)
        if scheme == "block128":
            m = np.exp2(np.floor(np.log2(m.astype(np.float64)))).astype(np.float32)
        if scheme == "mxfp8":
            with np.errstate(divide="ignore"):
                exponent = np.where(amax == 0, -127, np.ceil(np.log2(amax.astype(np.float64) / E4M3_MAX)))
            m = np.exp2(-exponent).astype(np.float32)
        out[:, start : start + width] = codes_of(part * m) * (one / m).astype(np.float64)
    return out


def expected(
    state: dict[str, torch.Tensor], scheme: str, x: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [M, N], how far from it a right answer may lie), float64.

    The bound: K products summed in float32 in any order, the two scales and the bias, each a rounding of 2^-24, on
    the sum of magnitudes; then one rounding of the output, of half its ulp; and fp16's smallest subnormal.
    """
    blocks = {"row": (1, x.shape[1]), "block128": (128, 128), "mxfp8": (1, 32)}.get(scheme, (1, 1))
    w = stored_weight(state, blocks)
    a = cast_activation(x, scheme, state.get("input_scale"))
    bias = state["bias"].double().numpy() if "bias" in state else np.zeros(w.shape[0])
    y = a @ w.T + bias
    magnitude = np.abs(a) @ np.abs(w).T + np.abs(bias)
    bound = (x.shape[1] + 4) * 2.0**-24 * magnitude + HALF_ULP[dtype] * np.abs(y) * (1 + 2.0**-8) + 2.0**-24
    return torch.from_numpy(y), torch.from_numpy(bound)
