"""Layers: parameters and state; what they compute stands in `octavo.functional`."""

from octavo.modules.linear import OUT_DTYPES, CachedWeight, FP8LinearMixin, Linear

__all__ = ["CachedWeight", "FP8LinearMixin", "OUT_DTYPES", "Linear"]
