"""`te.checkpoint`: activation checkpointing with TE's signature, over `octavo.checkpoint`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from octavo.compat.planned import refuse
from octavo.runtime import checkpoint as octavo_checkpoint


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: Any | None = None,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """Run `function(*args, **kwargs)` and recompute it in the backward instead of keeping its activations.

    Args:
        function, args, kwargs: what is run.
        distribute_saved_activations, get_rng_state_tracker: for tensor parallelism: not built.
        tp_group: a group of one rank, or None.
        use_reentrant: which of torch's two implementations; the reentrant one needs an input with a gradient.

    Raises:
        NotImplementedError: names the argument that is not built.
    """
    if distribute_saved_activations:
        refuse("te.checkpoint(distribute_saved_activations=True)")
    if get_rng_state_tracker is not None:
        refuse("te.checkpoint(get_rng_state_tracker=...)")
    if tp_group is not None and tp_group.size() > 1:
        refuse("te.checkpoint(tp_group) of more than one rank")
    # torch's reentrant form takes no keyword arguments of the function.
    bound = functools.partial(function, **kwargs) if kwargs else function
    return octavo_checkpoint(bound, *args, use_reentrant=use_reentrant)
