"""What a layer does whose linear parts are modules that refer to it, when it is copied.

A copy that is deep, or that was saved, brings parts without an owner, which become its own. A shallow one, `copy.copy`,
brings those of the original: it takes shallow copies of them, and the original keeps what it had. The two then share
parameters, states and scales, as shallow copies of any module do.
"""

from __future__ import annotations

import copy

from torch import nn

from octavo.modules.mlp_part import MLPPart


def own_parts(layer: nn.Module) -> None:
    """Make the parts of a layer that has just been copied or loaded its own."""
    # A shallow copy has the very dict of the original.
    layer.__dict__["_modules"] = modules = dict(layer._modules)
    for name, part in modules.items():
        if not isinstance(part, MLPPart):
            continue
        if part._owner is not None and part._owner() is not layer:
            modules[name] = part = copy.copy(part)
        part.belongs_to(layer)
