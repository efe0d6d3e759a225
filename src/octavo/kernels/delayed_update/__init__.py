"""delayed_update: one update of the amax histories and scales of many operands at once.

    history' [n, L], scale' [n] = update(history [n, L], scale [n], last [n])

The operands are of one format or of two: those of one come first. So forward operands and gradients are one launch.

Nothing is written in place and nothing is read on the host: what a forward has read stays as it was. Of operands whose
place is fixed, since a CUDA graph reads them, `delayed_update_in_place` does it where they lie.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.delayed_update.in_place import LONGEST_WINDOW, delayed_update_in_place
from octavo.kernels.delayed_update.reference import delayed_update_reference
from octavo.kernels.library import register
from octavo.kernels.triton_support import device_reasons, uses_triton
from octavo.scaling import AmaxComputeAlgo


def delayed_update(
    history: Tensor,
    scale: Tensor,
    last: Tensor,
    maxima: tuple[float, float],
    first: int,
    margin: int,
    algorithm: AmaxComputeAlgo,
) -> tuple[Tensor, Tensor]:
    """(history, scale) after one update; see `octavo.scaling.history` for the rule.

    Args:
        history, scale, last: float32 [n, L], [n], [n].
        maxima: M of the format of the first `first` operands, and of that of the others.
        first: 0 … n.
        margin: headroom of 2^margin.
        algorithm: "max", "most_recent", or a function of one window.

    Returns:
        new tensors; the scales may lie apart in memory.
    """
    if torch.compiler.is_compiling() and isinstance(algorithm, str):
        history, scale = _operator(history, scale, last, maxima, first, margin, algorithm)
        return history, scale
    if uses_triton(history) and not unsupported_reasons(history, algorithm):
        from octavo.kernels.delayed_update.triton_kernel import delayed_update_triton

        return delayed_update_triton(history, scale, last, maxima, first, margin, str(algorithm))
    return delayed_update_reference(history, scale, last, maxima, first, margin, algorithm)


def unsupported_reasons(history: Tensor, algorithm: AmaxComputeAlgo) -> list[str]:
    """Why the Triton twin does not run for this call; then the PyTorch reference does."""
    reasons = device_reasons(history.device)
    if not isinstance(algorithm, str):
        reasons.append("the amax is chosen by a function of the user's")
    if history.shape[0] == 0 or history.shape[1] > LONGEST_WINDOW:
        reasons.append(
            f"{history.shape[0]} windows of {history.shape[1]}: it takes 1 or more, up to {LONGEST_WINDOW} long"
        )
    return reasons


def _checked(
    history: Tensor, scale: Tensor, last: Tensor, maxima: tuple[float, float], first: int, margin: int, algorithm: str
) -> tuple[Tensor, Tensor]:
    # Compiled code reaches this in a backward only if a checkpoint was put around a compiled function that holds the
    # end of a step: its recompute would end the step a second time.
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "the end of a step of delayed scaling was reached inside a backward: a compiled function that contains"
            " octavo.autocast is being recomputed by a checkpoint around it. Put the checkpoint inside the compiled"
            " function, or the context outside of it"
        )
    return delayed_update_reference(history, scale, last, maxima, first, margin, algorithm)  # type: ignore[arg-type]


_operator = register(
    "delayed_update(Tensor history, Tensor scale, Tensor last, float[] maxima, SymInt first, SymInt margin,"
    " str algorithm) -> (Tensor, Tensor)",
    _checked,
    lambda history, scale, last, maxima, first, margin, algorithm: (
        torch.empty_like(history),
        torch.empty_like(scale),
    ),
)

__all__ = ["delayed_update", "delayed_update_in_place", "delayed_update_reference", "unsupported_reasons"]
