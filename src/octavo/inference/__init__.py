"""Serving: calibrated scales and frozen FP8 weights."""

from octavo.inference.calibrate import calibrate
from octavo.inference.freeze import freeze
from octavo.inference.frozen_linear import FrozenLinear
from octavo.inference.scheme import SCHEMES, Scheme

__all__ = ["SCHEMES", "FrozenLinear", "Scheme", "calibrate", "freeze"]
