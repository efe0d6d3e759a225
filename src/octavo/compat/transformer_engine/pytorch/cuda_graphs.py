"""`te.make_graphed_callables`: forward and backward as CUDA graphs with TE's signature, over Octavo's."""

from __future__ import annotations

from typing import Any

import torch

from octavo.compat.planned import refuse
from octavo.compat.transformer_engine.pytorch.quantization import autocast
from octavo.runtime import make_graphed_callables as octavo_make_graphed_callables

# Each setting's older name.
_OLDER = {
    "enabled": "fp8_enabled",
    "calibrating": "fp8_calibrating",
    "recipe": "fp8_recipe",
    "amax_reduction_group": "fp8_group",
    "cache_quantized_params": "fp8_weight_caching",
}
_NOT_BUILT = (
    "_order",
    "_num_layers_per_chunk",
    "_reuse_graph_input_output_buffers",
    "retain_graph_in_backward",
    "pre_warmup_hook",
    "post_warmup_hook",
)


def make_graphed_callables(
    modules: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Any = None,
    pool: Any = None,
    **settings: Any,
) -> Any:
    """A module, or a tuple of them, with forward and backward as CUDA graphs.

        layer = te.make_graphed_callables(layer, (x,), enabled=True, recipe=recipe)
        with te.autocast(enabled=True, recipe=recipe):
            y = layer(x)

    The call must be in a context that says the same, as there; in any other the layers run without their graph.

    Args:
        modules, sample_args: a module and the tuple of its sample arguments, or a tuple of each.
        num_warmup_iters, allow_unused_input, pool: as torch's.
        sample_kwargs: keyword arguments are not captured: none.
        settings: `enabled` (False), `recipe` (`get_default_recipe()`), `amax_reduction_group`, or their older names
            `fp8_enabled`, `fp8_recipe`, `fp8_group`.

    Raises:
        NotImplementedError: names what is not built: keyword arguments, calibrating, cached weights, pipelines.
        TypeError: a setting that TE does not have, or one given by both of its names.
    """
    if sample_kwargs and any(sample_kwargs if isinstance(sample_kwargs, tuple) else (sample_kwargs,)):
        refuse("te.make_graphed_callables(sample_kwargs=...)")
    given = _settings(settings)
    for name in ("calibrating", "cache_quantized_params"):
        if given[name]:
            refuse(f"te.make_graphed_callables({name}=True)")
    enabled = bool(given["enabled"])
    with autocast(enabled, False, given["recipe"], given["amax_reduction_group"]):
        make: Any = octavo_make_graphed_callables if enabled else torch.cuda.make_graphed_callables
        return make(modules, sample_args, num_warmup_iters, allow_unused_input, pool)


def _settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings by their newer names, None for what was not given."""
    given: dict[str, Any] = {}
    for name, older in _OLDER.items():
        both = [settings.pop(key, None) for key in (name, older)]
        if None not in both:
            raise TypeError(f"make_graphed_callables() got {name} and {older}, which are one: give one of them")
        given[name] = both[1] if both[0] is None else both[0]
    for name, value in settings.items():
        if name not in _NOT_BUILT:
            raise TypeError(f"make_graphed_callables() got an unexpected keyword argument {name!r}")
        if value:
            refuse(f"te.make_graphed_callables({name}=...)")
    return given
