"""Names of NVIDIA's Transformer Engine over Octavo: `.pytorch` and `.common.recipe`.

    import octavo.compat.transformer_engine.pytorch as te
    from octavo.compat.transformer_engine.common.recipe import DelayedScaling, Format

`common` has no folder of its own (a file of that name would say nothing about what is in it): it is a module made here.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from octavo.compat.installation import LIBRARIES
from octavo.compat.transformer_engine import pytorch, recipe


def _common() -> ModuleType:
    """The package `transformer_engine.common`, with `recipe` in it; both importable by their names."""
    name = f"{__name__}.common"
    module = ModuleType(name, "transformer_engine.common: the module `recipe`.")
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__dict__.update(recipe=recipe, __all__=["recipe"], __path__=[], __package__=name)
    sys.modules[name] = module
    sys.modules[f"{name}.recipe"] = recipe
    return module


common = _common()

# What code that asks for a version gets, and why this one, stands in `octavo.compat.installation`.
__version__ = LIBRARIES["transformer_engine"].version

__all__ = ["common", "pytorch", "recipe"]
