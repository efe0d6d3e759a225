"""What a cast is scaled by, in every form that callers have; for tests of kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels import ScaleRule
from octavo.kernels.amax import amax_reference
from octavo.scaling import COLUMN, ROW, TENSOR

SCALE_KINDS = [
    "shared", "scalars", "codes only", "transposed only", "nothing", "row and column", "row and scalar",
    "scalar and column",
]  # fmt: skip
AMAX_KINDS = [
    "one amax", "one partial amax", "8 partial amaxes", "5 partial amaxes", "5 amaxes, transposed only",
    "amax by row and column", "amax by row and 8 partial", "5 partial and amax by column", "two amaxes",
]  # fmt: skip
KINDS = [*SCALE_KINDS, *AMAX_KINDS]
RULES = [ScaleRule(), ScaleRule((0.25).hex()), ScaleRule(power_of_two=True), ScaleRule((0.25).hex(), True)]
Pair = tuple[Tensor | None, Tensor | None]


def given(kind: str, x: Tensor) -> Pair:
    """(rowwise, columnwise) of a kind: scales that are no powers of two, or amaxes of x."""
    return _scales(kind, x) if kind in SCALE_KINDS else _amaxes(kind, x)


def rule_of(kind: str, rule: ScaleRule = RULES[0]) -> ScaleRule | None:
    """The rule, if the kind is one of amaxes."""
    return rule if kind in AMAX_KINDS else None


def on_cpu(pair: Pair) -> Pair:
    """The same on the CPU; one tensor stays one."""
    moved = tuple(None if source is None else source.cpu() for source in pair)
    return (moved[0], moved[0]) if pair[0] is pair[1] else (moved[0], moved[1])


def _scales(kind: str, x: Tensor) -> Pair:
    one, other = torch.tensor(1 / 1.7, device=x.device), torch.tensor(1 / 0.3, device=x.device)
    row = 1 / (torch.rand(x.shape[0], 1, device=x.device) * 3 + 0.1)
    column = 1 / (torch.rand(1, x.shape[1], device=x.device) * 3 + 0.1)
    return {
        "shared": (one, one),
        "scalars": (one, other),
        "codes only": (one, None),
        "transposed only": (None, other),
        "nothing": (None, None),
        "row and column": (row, column),
        "row and scalar": (row, other),
        "scalar and column": (one, column),
    }[kind]


def _amaxes(kind: str, x: Tensor) -> Pair:
    whole = amax_reference(x, TENSOR)
    # The largest stands last, where who reads too few would miss it.
    eight, five = (torch.cat([whole.new_zeros(n - 1), whole.reshape(1)]) for n in (8, 5))
    row, column = amax_reference(x, ROW), amax_reference(x, COLUMN)
    single = whole.reshape(1)
    return {
        "one amax": (whole, whole),
        "one partial amax": (single, single),
        "8 partial amaxes": (eight, eight),
        "5 partial amaxes": (five, five),
        "5 amaxes, transposed only": (None, five),
        "amax by row and column": (row, column),
        "amax by row and 8 partial": (row, eight),
        "5 partial and amax by column": (five, column),
        "two amaxes": (whole, whole * 3),
    }[kind]
