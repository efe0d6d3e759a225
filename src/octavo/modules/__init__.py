"""Layers: parameters and state; what they compute stands in `octavo.functional`."""

from octavo.modules.linear import CachedWeight, FP8LinearMixin, Linear

__all__ = ["CachedWeight", "FP8LinearMixin", "Linear"]
