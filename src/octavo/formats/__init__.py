"""What eight bits mean: formats as frozen data, the cast, and its inverse."""

from octavo.formats.cast import Rounding, cast, cast_float32, decode, round_stochastically
from octavo.formats.finfo import FormatInfo, finfo
from octavo.formats.format import (
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0,
    FORMATS,
    Format,
    format_given,
    format_named,
    format_of,
)

__all__ = [
    "E4M3",
    "E4M3FNUZ",
    "E5M2",
    "E5M2FNUZ",
    "E8M0",
    "FORMATS",
    "Format",
    "FormatInfo",
    "Rounding",
    "cast",
    "cast_float32",
    "decode",
    "finfo",
    "format_given",
    "format_named",
    "format_of",
    "round_stochastically",
]
