"""Walk a model, swap its layers, report what was skipped and why; the way back; the model of what gains."""

from octavo.conversion.convert import convert, unconvert
from octavo.conversion.gain import expected_gain
from octavo.conversion.plain_state import state_dict
from octavo.conversion.report import ConversionReport, LayerReport, StructureReport
from octavo.conversion.set_recipe import set_recipe

__all__ = [
    "ConversionReport",
    "LayerReport",
    "StructureReport",
    "convert",
    "expected_gain",
    "set_recipe",
    "state_dict",
    "unconvert",
]
