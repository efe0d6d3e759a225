"""Memory of a training step, item by item, in BF16 and with each scaling.

Counted: parameters, optimizer, gradients, and what the forward keeps for the backward (`octavo.bench.advice.tracing`).
Estimated: the largest gradient in flight, as large as the largest activation. The total adds all up; gradients set to
None after the optimizer's step overlap with activations less than that, so the total is on the safe side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from octavo.bench.advice.tracing import Kept, Precision
from octavo.conversion.card import GIB

Optimizer = Literal["adamw", "sgd"]

# Values an optimizer keeps for a parameter. (SGD without momentum.)
STATES: dict[Optimizer, int] = {"adamw": 2, "sgd": 0}
# The device's context, cuBLAS's workspaces, and what the allocator cannot use.
RESERVE_GIB = 1.0
# An operand's amax history and its scale, float32: three operands a layer.
HISTORY_LENGTH = 1024


@dataclass(frozen=True)
class Memory:
    """Bytes of a step.

    Attributes:
        recipe: "bf16" or a scaling.
        items: name and bytes.
        grows: how many of them grow with the batch.
        samples: the batch they were counted for.
    """

    recipe: str
    items: tuple[tuple[str, int], ...]
    grows: int
    samples: int

    @property
    def total(self) -> int:
        """All items."""
        return sum(size for _, size in self.items)

    @property
    def kept(self) -> int:
        """What the forward keeps for the backward."""
        return sum(size for name, size in self.items if name in _KEPT)

    def fits(self, memory_gib: float) -> bool:
        """Whether a card of so much memory holds it."""
        return self.total <= (memory_gib - RESERVE_GIB) * GIB

    def largest_batch(self, memory_gib: float) -> int:
        """The most samples that a card of so much memory holds; 0 if not one."""
        room = (memory_gib - RESERVE_GIB) * GIB - (self.total - self.grows)
        return max(0, int(room // (self.grows / self.samples))) if self.grows else 0


_KEPT = {"activations", "FP8 codes of inputs", "FP8 codes of weights", "bf16 copies of weights"}


def memory_of(
    model: nn.Module,
    recipe: str,
    kept: Kept,
    samples: int,
    precision: Precision,
    optimizer: Optimizer,
    fp8_layers: int = 0,
) -> Memory:
    """Itemise a step.

    Args:
        model: whose parameters have the dtype of training.
        recipe: "bf16" or a scaling's name.
        kept: by the forward.
        samples: of the batch.
        precision, optimizer: of the training.
        fp8_layers: how many run in FP8.
    """
    parameters = list(model.parameters())
    weights = sum(one.numel() * one.element_size() for one in parameters)
    trained = sum(one.numel() * one.element_size() for one in parameters if one.requires_grad)
    items = [
        ("weights, float32: the masters" if precision == "autocast" else "weights, bf16, without masters", weights),
        ("buffers", sum(one.numel() * one.element_size() for one in model.buffers())),
        (f"optimizer states ({optimizer})", STATES[optimizer] * trained),
        ("gradients", trained),
        ("bf16 copies of weights", kept.bytes["weight copies"]),
        ("FP8 codes of weights", kept.bytes["weight codes"]),
        ("FP8 codes of inputs", kept.bytes["input codes"]),
        ("activations", kept.bytes["activations"]),
        ("largest gradient in flight", kept.largest),
    ]
    if recipe == "delayed":
        items.append(("amax histories and scales", fp8_layers * 3 * 4 * (HISTORY_LENGTH + 1)))
    grows = kept.bytes["activations"] + kept.bytes["input codes"] + kept.largest
    return Memory(recipe, tuple(items), grows, samples)
