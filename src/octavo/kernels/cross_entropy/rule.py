"""LossRule: what a cross-entropy is of; plain data, so that compiled code can hold it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class LossRule(NamedTuple):
    """Which rows count, and what is added to the negative log likelihood.

    Attributes:
        ignore_index: rows of this target have loss 0 and gradient 0.
        label_smoothing: this part of each target is spread evenly over the vocabulary, from 0 to 1.
        z_loss: times the square of log sum exp, 0 or positive; keeps logits from drifting.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0


# Nothing but the negative log likelihood.
PLAIN_RULE = LossRule()


def check_rule(rule: LossRule) -> None:
    """Raise ValueError unless each number is one that a loss can have."""
    if type(rule.ignore_index) is not int:
        raise ValueError(f"ignore_index is {rule.ignore_index!r}: expected an integer, such as -100")
    numbers: dict[str, tuple[Any, float]] = {
        "label_smoothing": (rule.label_smoothing, 1.0),
        "z_loss": (rule.z_loss, math.inf),
    }
    for name, (value, most) in numbers.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (is_number and 0 <= value <= most and math.isfinite(value)):
            raise ValueError(f"{name} is {value!r}: expected a number {'from 0 to 1' if most == 1 else 'of 0 or more'}")
