"""delayed_update of operands that stay where they are, as a CUDA graph wants it.

    history [L], scale [], gathered []  of each  =  update(history, scale, gathered), and 0

It is prepared once and then run once a step: on a GPU one launch that finds all it reads and writes by a table of
addresses, where new tensors would have to be stacked before and copied back behind. Writes go past autograd's version
counters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.kernels.delayed_update.reference import delayed_update_reference
from octavo.kernels.triton_support import device_reasons
from octavo.scaling import AmaxComputeAlgo

# One program holds a window.
LONGEST_WINDOW = 1 << 14


def delayed_update_in_place(
    histories: Sequence[Tensor],
    scales: Sequence[Tensor],
    gathered: Sequence[Tensor],
    maxima: tuple[float, float],
    first: int,
    margin: int,
    algorithm: AmaxComputeAlgo,
) -> Callable[[], None]:
    """What updates these operands at each call, bit for bit as `delayed_update`; it is on the caller to keep them.

    The preparation must not be captured in a CUDA graph, since it copies a table to the device; it waits for nothing.

    Args:
        histories, scales, gathered: float32 of n operands on one device, each [L], contiguous, [] and [].
        maxima, first, margin, algorithm: as of `delayed_update`.
    """
    device, length = gathered[0].device, histories[0].shape[0]
    if device_reasons(device) or not isinstance(algorithm, str) or length > LONGEST_WINDOW:
        return _by_operators(histories, scales, gathered, maxima, first, margin, algorithm)
    from octavo.kernels.delayed_update.triton_kernel import in_place_launch

    return in_place_launch(addresses_of(histories, scales, gathered), length, maxima, first, margin, algorithm)


def addresses_of(*kinds: Sequence[Tensor]) -> Tensor:
    """int64 [n, number of kinds], on the device of the tensors."""
    table = torch.tensor([[tensor.data_ptr() for tensor in operand] for operand in zip(*kinds, strict=True)])
    # Without waiting for what the device does.
    return table.to(kinds[0][0].device, non_blocking=True)


def _by_operators(
    histories: Sequence[Tensor],
    scales: Sequence[Tensor],
    gathered: Sequence[Tensor],
    maxima: tuple[float, float],
    first: int,
    margin: int,
    algorithm: AmaxComputeAlgo,
) -> Callable[[], None]:
    histories, scales, gathered = ([tensor.data for tensor in kind] for kind in (histories, scales, gathered))

    @torch.no_grad()
    def update() -> None:
        given = torch.stack(histories), torch.stack(scales), torch.stack(gathered)
        history, scale = delayed_update_reference(*given, maxima, first, margin, algorithm)
        torch._foreach_copy_([*histories, *scales], [*history.unbind(), *scale.unbind()])
        torch._foreach_zero_(gathered)

    return update
