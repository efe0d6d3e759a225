"""Which keys a query attends to, and ALiBi's bias.

    attends(i, j)  =  -left <= j - i - shift <= right  and  key j is no padding  and  no mask forbids it
    alibi(i, j)    =  -slope |j - i - shift|

i counts queries, j keys. `shift` aligns the two: 0 puts query 0 beside key 0 ("causal", "padding_causal"); every other
type puts the last query beside the last key, shift = number of keys - number of queries, of each sequence its own.
Causal types have right = 0. Names, alignment and the meaning of True in a mask (a position that is left out) are
Transformer Engine's; ALiBi's slopes are those of Press, Smith and Lewis, "Train Short, Test Long", 2022.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

MASK_TYPES = (
    "no_mask",
    "causal",
    "causal_bottom_right",
    "padding",
    "padding_causal",
    "padding_causal_bottom_right",
    "arbitrary",
)
UNBOUNDED = (-1, -1)


class MaskRules(NamedTuple):
    """What decides, apart from tensors.

    Attributes:
        mask_type: one of `MASK_TYPES`.
        window: how many keys to the left and to the right of its own a query sees; -1: all of them.
    """

    mask_type: str
    window: tuple[int, int]

    @property
    def top_left(self) -> bool:
        """Query 0 lies beside key 0."""
        return self.mask_type in ("causal", "padding_causal")

    @property
    def padded(self) -> bool:
        """Some positions hold nothing."""
        return self.mask_type.startswith("padding")

    def after_cache(self) -> MaskRules:
        """The same rules where the queries are the last tokens of what the keys hold."""
        later = {"causal": "causal_bottom_right", "padding_causal": "padding_causal_bottom_right"}
        return self._replace(mask_type=later.get(self.mask_type, self.mask_type))


def check_mask_type(mask_type: str, name: str = "attn_mask_type") -> None:
    """Raise ValueError unless it is known; `name` is what the layer calls it."""
    if mask_type not in MASK_TYPES:
        raise ValueError(f"{name} is {mask_type!r}: expected one of {', '.join(MASK_TYPES)}")


def mask_rules(mask_type: str, window_size: Any = None) -> MaskRules:
    """Rules of a mask type and a window (left, right), checked.

    Raises:
        ValueError: an unknown type; a window that is no pair of integers from -1 on, or that contradicts the type.
    """
    check_mask_type(mask_type)
    window = UNBOUNDED if window_size is None else window_size
    if not _is_window(window):
        raise ValueError(
            f"window_size is {window_size!r}: expected (left, right), numbers of keys a query sees to either side of"
            " its own, -1 for all of them"
        )
    left, right = window
    if mask_type == "arbitrary" and (left, right) != UNBOUNDED:
        raise ValueError(
            f"window_size is {window_size!r} with attn_mask_type='arbitrary': put the window into the mask"
        )
    if "causal" not in mask_type:
        return MaskRules(mask_type, (left, right))
    if right > 0:
        raise ValueError(
            f"window_size is {window_size!r} with attn_mask_type={mask_type!r}: a causal query sees no key to its"
            f" right; give ({left}, 0)"
        )
    return MaskRules(mask_type, (left, 0))


def _is_window(window: Any) -> bool:
    return (
        isinstance(window, (tuple, list))
        and len(window) == 2
        and all(isinstance(side, int) and not isinstance(side, bool) and side >= -1 for side in window)
    )


class Valid(NamedTuple):
    """Which positions hold tokens: queries [B, Sq], keys [B, Skv], bool; tokens come before padding.

    "causal" alignments at the top left take any pattern.
    """

    queries: Tensor
    keys: Tensor


def distance(rules: MaskRules, num_queries: int, num_keys: int, valid: Valid | None, device: torch.device) -> Tensor:
    """j - i - shift, [Sq, Skv], or [B, 1, Sq, Skv] where the shift is each sequence's own."""
    i = torch.arange(num_queries, device=device)[:, None]
    j = torch.arange(num_keys, device=device)
    if rules.top_left:
        return j - i
    if valid is None:
        return j - i - (num_keys - num_queries)
    shift = valid.keys.sum(-1) - valid.queries.sum(-1)
    return j - i - shift[:, None, None, None]


def attends(rules: MaskRules, apart: Tensor, valid: Valid | None) -> Tensor | None:
    """Who attends to whom by window and padding, bool, of a shape that broadcasts to [B, H, Sq, Skv]; None: all.

    Args:
        rules: of the mask.
        apart: what `distance` gives.
        valid: where there is padding.
    """
    left, right = rules.window
    allowed = None if valid is None else valid.keys[:, None, None, :]
    if left >= 0:
        allowed = _both(allowed, apart >= -left)
    if right >= 0:
        allowed = _both(allowed, apart <= right)
    # What stands at a query that is padding is nobody's; it attends to nothing.
    return allowed if valid is None else _both(allowed, valid.queries[:, None, :, None])


def _both(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a & b


def alibi_slopes(num_heads: int, device: torch.device | None = None) -> Tensor:
    """[H] float32: 2^(-8/n), 2^(-16/n), ... for n heads, n a power of two; further heads lie between those of 2n."""
    power = 1 << (num_heads.bit_length() - 1)
    # Made where they are wanted: a CUDA graph may not copy from the host.
    head = torch.arange(num_heads, device=device)
    exponents = torch.where(head < power, 8 * (head + 1), 4 * (2 * (head - power) + 1)).float() / power
    return torch.exp2(-exponents)


def alibi_bias(slopes: Tensor, apart: Tensor) -> Tensor:
    """-slope |j - i - shift|: [1 or B, H, Sq, Skv] float32.

    Args:
        slopes: [H], or [B, H].
        apart: what `distance` gives.
    """
    per_head = slopes.float().reshape(-1, slopes.shape[-1], 1, 1)
    return -per_head * apart.abs()
