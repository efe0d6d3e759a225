"""Octavo's version: the one place that states it. The build reads this file as text, so it imports nothing."""

__version__ = "0.1.0"
