"""How a served model holds its weights and casts its activations."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from octavo.formats import E8M0
from octavo.scaling import BLOCK_1X128, BLOCK_128X128, MX, ROW, TENSOR, Granularity


@dataclass(frozen=True)
class Scheme:
    """One way of serving in FP8 (E4M3 weights and activations).

    Attributes:
        name: as users write it.
        label: as a table shows it.
        weight, activation: granularities.
        static: activations take a calibrated scale; else they are measured at each call.
        power_of_two: scales are powers of two.
    """

    name: str
    label: str
    weight: Granularity
    activation: Granularity
    static: bool = False
    power_of_two: bool = False


SCHEMES: tuple[Scheme, ...] = (
    Scheme("tensor_static", "FP8 tensor, static", TENSOR, TENSOR, static=True),
    Scheme("tensor_dynamic", "FP8 tensor, dynamic", TENSOR, TENSOR),
    Scheme("row", "FP8 row-wise", ROW, ROW),
    # Power-of-two scales make code * scale exact in bf16, in which the emulated product runs on a GPU.
    Scheme("block128", "FP8 block 128", BLOCK_128X128, BLOCK_1X128, power_of_two=True),
    Scheme("mxfp8", "MXFP8", MX, MX, power_of_two=True),
)


def scheme_of(codes: Tensor, scale: Tensor, static: bool) -> Scheme | None:
    """The scheme that gives codes [N, K] a scale like this one; None if none does.

    Args:
        codes: of a weight.
        scale: of these codes.
        static: the scale of the activations lies beside it.
    """
    rows, columns = codes.shape
    if scale.dtype == E8M0.dtype:
        return scheme_named("mxfp8")
    if scale.dim() == 0:
        return scheme_named("tensor_static" if static else "tensor_dynamic")
    if tuple(scale.shape) == (rows, 1):
        return scheme_named("row")
    return scheme_named("block128") if tuple(scale.shape) == (-(-rows // 128), -(-columns // 128)) else None


def scheme_named(name: str) -> Scheme:
    """The scheme called `name`; ValueError with the known names otherwise."""
    for scheme in SCHEMES:
        if scheme.name == name:
            return scheme
    raise ValueError(f"unknown scheme {name!r}: expected one of {', '.join(s.name for s in SCHEMES)}")
