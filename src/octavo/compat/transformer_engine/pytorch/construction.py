"""What the layers under Transformer Engine's names share: where they stand, how they are drawn, what they refuse.

Initialisation is the one that TE's users expect: weights normal(0, 0.023), biases zero, drawn inside the tracker's fork
where one is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.compat.planned import refuse
from octavo.modules import CachedWeight
from octavo.modules.layernorm_linear import check_cached_weight
from octavo.tensor import warn_user

InitMethod = Callable[[Tensor], Any]
_INIT_STD = 0.023
# What is_first_microbatch means to Octavo's layers.
_CACHE: dict[bool | None, CachedWeight | None] = {None: None, True: "refresh", False: "reuse"}


class Drawing(NamedTuple):
    """How parameters are drawn.

    Attributes:
        init_method: fills a weight in place; normal(0, 0.023) if None.
        get_rng_state_tracker: gives the tracker whose fork weights are drawn in.
        rng_tracker_name: of the fork.
    """

    init_method: InitMethod | None = None
    get_rng_state_tracker: Callable[[], Any] | None = None
    rng_tracker_name: str | None = None

    def fill(self, weights: Iterable[Tensor], biases: Iterable[Tensor | None]) -> None:
        """Draw weights and set biases to zero, in place."""
        tracker, name = self.get_rng_state_tracker, self.rng_tracker_name
        fork = nullcontext() if tracker is None else tracker().fork(*[name] if name else [])
        with fork, torch.no_grad():
            for weight in weights:
                if self.init_method is None:
                    nn.init.normal_(weight, mean=0.0, std=_INIT_STD)
                else:
                    self.init_method(weight)
            for bias in biases:
                if bias is not None:
                    bias.zero_()


def cached_weight_of(is_first_microbatch: Any, cached_weight: CachedWeight | None = None) -> CachedWeight | None:
    """The mode of the weight's cache: TE's flag, or Octavo's mode where a layer of Octavo's calls one of TE's name."""
    if is_first_microbatch not in (None, True, False):
        raise ValueError(f"is_first_microbatch is {is_first_microbatch!r}: expected None, True or False")
    if is_first_microbatch is None:
        check_cached_weight(cached_weight)
        return cached_weight
    if cached_weight is not None:
        raise ValueError("is_first_microbatch and cached_weight are one setting under two names: give one of them")
    return _CACHE[is_first_microbatch]


def part_sizes(split: Iterable[str] | Mapping[str, int], out_features: int) -> dict[str, int]:
    """{prefix of the parameters' names: features} of `parameters_split`."""
    if isinstance(split, Mapping):
        sizes = dict(split)
    else:
        names = list(split)
        if not names or out_features % len(names):
            raise ValueError(
                f"parameters_split has {len(names)} names: out_features = {out_features} must be a multiple of that"
            )
        sizes = dict.fromkeys(names, out_features // len(names))
    prefixes = {f"{name.rstrip('_')}_": size for name, size in sizes.items()}
    if sum(prefixes.values()) != out_features or min(prefixes.values()) <= 0:
        raise ValueError(f"parameters_split is {sizes}: positive sizes must add up to out_features = {out_features}")
    return prefixes


def refuse_ranks(layer: str, tp_group: Any | None, tp_size: int, parallel_mode: str | None = None) -> None:
    """Raise NotImplementedError for more than one rank, ValueError for an unknown parallel_mode."""
    if parallel_mode not in (None, "row", "column"):
        raise ValueError(f"parallel_mode is {parallel_mode!r}: expected None, 'row' or 'column'")
    size = tp_size if tp_group is None else tp_group.size()
    if size > 1:
        refuse(f"te.{layer} with a tensor-parallel group of {size} ranks (tp_size, tp_group)")


def refuse_planned(layer: str, **arguments: Any) -> None:
    """Raise NotImplementedError with the name of the first argument that asks for something."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            refuse(f"te.{layer}({name}={value!r})")


def drop_extra_state(state_dict: dict[str, Any], prefix: str) -> None:
    """Take TE's own FP8 state out of entries to load: a pickle in a tensor, which is left alone. Scales come from the
    weights and the next batch."""
    state_dict.pop(f"{prefix}_extra_state", None)


def placed(device: torch.device | str) -> torch.device:
    """The device asked for, or the CPU in place of CUDA where there is none, with one warning."""
    wanted = torch.device(device)
    if wanted.type != "cuda" or torch.cuda.is_available():
        return wanted
    if not Warned.no_gpu:
        Warned.no_gpu = True
        warn_user("no CUDA device: Transformer Engine's layers stand on the CPU, where FP8 is emulated")
    return torch.device("cpu")


class Warned:
    """What has been said already."""

    no_gpu = False
