"""How often any optimizer has stepped: fused optimizers change parameters without touching their version counter.

Whoever asks whether a weight has changed asks for this number too. torch calls the hook once a step.
"""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

# After this many optimizer steps without an update the scales of delayed scaling are no longer of this training.
STALE_STEPS = 2


class _Steps:
    count = 0


def _count(*arguments: Any) -> None:
    _Steps.count += 1


register_optimizer_step_post_hook(_count)


def optimizer_steps() -> int:
    """Steps of all optimizers of this process so far."""
    return _Steps.count
