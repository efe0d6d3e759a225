"""How far one step of Adam or AdamW can move an element of a weight, whatever the gradients are.

With m and v the moments, of gradients g_0 ... g_t by Cauchy-Schwarz

    |m_t| = (1 - b1) |sum b1^k g_(t-k)| <= (1 - b1) sqrt(sum (b1^2 / b2)^k) sqrt(sum b2^k g_(t-k)^2)

and the last root is sqrt(v_t / (1 - b2)). So, bias corrections included (they only lower it),

    |update| <= lr * c,    c = (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)),   b1^2 < b2

c = 7.27 for betas (0.9, 0.999), reached by gradients that grow as (b2 / b1)^t. The (1 - b1) / sqrt(1 - b2) = 3.16 of
Kingma and Ba (arXiv:1412.6980, section 2.1) is what a single gradient after none moves, and no bound of all sequences.
AMSGrad, `maximize` and epsilon only lower it. Decoupled weight decay multiplies by 1 - lr * decay first; coupled decay
is part of the gradient.

Moments that are kept in the weight's dtype are rounded in every step: each of the sums above may be off by (1 + e) a
step, which acts as if b1 were larger and b2 smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Of one group: how much a step changes an element at most; None where there is no bound.
StepBound = Callable[[Mapping[str, Any]], float | Tensor | None]

# An update of a moment rounds two or three times.
_ROUNDINGS = 4
# Below it v may underflow to 0 in float32 where m does not, and m / (sqrt(v) + eps) is bounded by nothing.
_LEAST_EPSILON = 1e-15

_BETAS_ARE_TENSORS = (
    "betas are tensors, and the bound of a step would wait for the device: give the optimizer numbers (lr may be a"
    " tensor)"
)
REMEDY = (
    "give step_bound=, a function of a param group (a dict with its lr) that returns the largest amount by which one"
    " step can change an element, such as lambda group: group['lr'] for Lion; or leave the scales measured"
)


class NoBoundError(ValueError):
    """There is no bound of the steps of a param group."""


class Step(NamedTuple):
    """What one step does to a bound: multiplied by `factor` (1 or more), then `added` to it; numbers or tensors []."""

    factor: float | Tensor
    added: float | Tensor


def larger(one: Step, other: Step) -> Step:
    """A step that goes as far as each of two."""
    return Step(_larger(one.factor, other.factor), _larger(one.added, other.added))


def _larger(one: float | Tensor, other: float | Tensor) -> float | Tensor:
    if not isinstance(one, Tensor) and not isinstance(other, Tensor):
        return max(one, other)
    given, like = (one, other) if isinstance(one, Tensor) else (other, one)
    assert isinstance(given, Tensor), "one of them is"
    return torch.maximum(given, like) if isinstance(like, Tensor) else given.clamp(min=like)


def check_known(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError unless steps of this optimizer are those of Adam or AdamW, with numbers for betas."""
    kind = type(optimizer)
    if any(isinstance(beta, Tensor) for group in optimizer.param_groups for beta in group.get("betas", ())):
        raise ValueError(f"octavo.predict_weight_scales: {_BETAS_ARE_TENSORS}")
    if issubclass(kind, torch.optim.Adam):
        known = kind.__mro__[: kind.__mro__.index(torch.optim.Adam)]
        if not any("step" in vars(one) for one in known if one is not torch.optim.AdamW):
            return
    raise ValueError(
        f"octavo.predict_weight_scales: how far a step of {kind.__name__} moves a weight is not known: torch's Adam and"
        f" AdamW are known. {REMEDY[0].upper()}{REMEDY[1:]}"
    )


def adam_step(group: Mapping[str, Any], dtype: torch.dtype) -> Step:
    """What one step of Adam or AdamW does to the bound of weights of a dtype.

    Raises:
        NoBoundError: betas or epsilon for which there is no bound.
    """
    lr, decay = group["lr"], group["weight_decay"]
    b1, b2 = group["betas"]
    if isinstance(b1, Tensor) or isinstance(b2, Tensor):
        raise NoBoundError(_BETAS_ARE_TENSORS)
    # With a rate below 0 a step goes the other way, as far.
    added = abs(lr) * (adam_factor(b1, b2, group["eps"], dtype) * (1 + _rounding(dtype)))
    if not (decay and group.get("decoupled_weight_decay")):
        return Step(1.0, added)
    shrinks = 1 - lr * decay
    return Step(shrinks.abs().clamp(min=1.0) if isinstance(shrinks, Tensor) else max(1.0, abs(shrinks)), added)


def given_step(
    step_bound: StepBound,
    group: Mapping[str, Any],
    index: int,
    dtype: torch.dtype,
    device: torch.device,
    waits: bool = False,
) -> Step:
    """What a step does to the bound by the word of whoever knows the optimizer.

    Args:
        step_bound: that word.
        group: a param group.
        index: of the group.
        dtype: of the weights.
        device: of the weights.
        waits: a number on the device is looked at as well; else it may be NaN or inf (see `LateAnswer`).

    Raises:
        NoBoundError: it is None.
        ValueError: it is no number of 0 or more, or larger than any of the dtype.
    """
    given: Any = step_bound(group)
    if given is None:
        raise NoBoundError("step_bound returned None for it")
    value, largest = _checked(given, device, waits), torch.finfo(dtype).max
    if value is None or (not isinstance(value, Tensor) and value > largest):
        raise ValueError(
            f"octavo.predict_weight_scales: step_bound returned {given!r} for param group {index}: expected the largest"
            f" change of an element in one step, a finite number of 0 or more that {dtype} can hold (up to"
            f" {largest:.4g}), or a tensor of one such on the CPU or on {device}, where the weights are. Return that,"
            " such as group['lr'] for Lion; or, once the prediction runs, None where there is no bound: the weights of"
            " that group are measured after each step"
        )
    return Step(1.0, value * (1 + _rounding(dtype)))


def _checked(given: Any, device: torch.device, waits: bool) -> float | Tensor | None:
    """A number of 0 or more, or a tensor [] on the device; None for what is neither."""
    may_look = isinstance(given, Tensor) and (given.device.type == "cpu" or (waits and given.device == device))
    if may_look and given.numel() == 1:
        given = given.item()
    if isinstance(given, Tensor):
        known = given.dtype.is_floating_point or given.dtype in (torch.int32, torch.int64)
        # To look at its value would wait for the device. One below 0 is taken as a rate below 0 is.
        return given.detach().reshape(()).abs() if known and given.numel() == 1 and given.device == device else None
    return given if type(given) is not bool and isinstance(given, (int, float)) and 0 <= given < math.inf else None


def adam_factor(b1: float, b2: float, epsilon: float, dtype: torch.dtype) -> float:
    """c of the module, for moments in `dtype`.

    Raises:
        NoBoundError: there is none.
    """
    if dtype not in (torch.float32, torch.float64, torch.bfloat16):
        raise NoBoundError(
            f"weights and moments are {dtype}, in which the second moment underflows: keep the weights in float32"
        )
    if epsilon < _LEAST_EPSILON:
        raise NoBoundError(
            f"eps is {epsilon}: with less than {_LEAST_EPSILON} an update has no bound where squares of gradients"
            " underflow; the default is 1e-8"
        )
    off = _rounding(dtype)
    ratio = (b1 * (1 + off)) ** 2 / (b2 * (1 - off)) if b2 > 0 else math.inf
    if ratio >= 1:
        raise NoBoundError(
            f"betas are ({b1}, {b2}): updates are bounded only where the square of the first is below the second, with"
            f" room for the roundings of {dtype}"
        )
    return (1 - b1) * (1 + off) / math.sqrt((1 - b2) * (1 - off) * (1 - ratio))


def _rounding(dtype: torch.dtype) -> float:
    """How far a few roundings may be off, relative."""
    return _ROUNDINGS * torch.finfo(dtype).eps / 2
