"""The report of a study: one HTML page and tables for the terminal, from the rows of its record alone.

``build(rows, path)`` writes the page, ``summary(rows)`` gives what rich prints. Neither needs PyTorch. plotly and rich
belong to the extra ``study``, jinja2 comes with PyTorch; they are imported when they are used.
"""

from octavo.report.page import build as build
from octavo.report.terminal import summary as summary

__all__ = ["build", "summary"]
