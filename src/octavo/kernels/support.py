"""`octavo.is_supported`: what runs natively on a device, and if not, why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from octavo.kernels.scaled_mm import device_reasons as product_reasons
from octavo.kernels.scaled_mm.blockwise import device_reasons as block_product_reasons
from octavo.kernels.scaled_mm.blockwise import mx_device_reasons as mx_product_reasons
from octavo.kernels.triton_support import device_reasons as kernel_reasons

Feature = Literal["fp8_products", "block_products", "mx_products", "triton_kernels"]
_REASONS: dict[str, Callable[[torch.device], list[str]]] = {
    "fp8_products": product_reasons,
    "block_products": block_product_reasons,
    "mx_products": mx_product_reasons,
    "triton_kernels": kernel_reasons,
}


@dataclass(frozen=True)
class Support:
    """Truthy if something runs natively; else `reasons` says why it is emulated.

    Attributes:
        what: the feature asked for.
        reasons: empty if it is supported.
    """

    what: str
    reasons: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        return f"{self.what}: " + ("supported" if self else "; ".join(self.reasons))


def is_supported(what: Feature, device: torch.device | str | None = None) -> Support:
    """Whether `what` runs natively on `device`; without it Octavo computes the same numbers by emulation.

    Args:
        what: "fp8_products" (matrix products on FP8 units), "block_products" (those under scales by block, for
            BlockScaling), "mx_products" (those under MX scales, for MXFP8Scaling) or "triton_kernels" (casts and
            amaxes in Triton).
        device: the current CUDA device if there is one, else the CPU, if None.

    Raises:
        ValueError: an unknown feature.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    reasons = _REASONS.get(what)
    if reasons is None:
        raise ValueError(f"unknown feature {what!r}: expected {', '.join(map(repr, _REASONS))}")
    where = torch.device(device)
    if where.type == "cuda":
        # The device's own properties can only be asked of one that is there.
        if not torch.cuda.is_available():
            return Support(what, ("no CUDA device is available",))
        where = torch.device("cuda", torch.cuda.current_device()) if where == torch.device("cuda") else where
        count = torch.cuda.device_count()
        if where.index >= count:
            return Support(what, (f"there is no {where}: CUDA devices here are 0 to {count - 1}",))
    return Support(what, tuple(reasons(where)))
