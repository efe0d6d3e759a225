"""A number in eight bits: QuantizedTensor, and the quantizers that make one of an operand."""

from octavo.tensor.block_quantizer import BlockQuantizer, cast_together, casts_together
from octavo.tensor.fields_by_name import FieldsByName, needs
from octavo.tensor.matmul import scaled_mm
from octavo.tensor.operand_state import (
    OperandState,
    StepRule,
    close_captured_step,
    close_step,
    histories_of,
    is_captured,
    stays_in_place,
)
from octavo.tensor.paired_quantizer import PairedQuantizer
from octavo.tensor.quantize import cast_to_representable, quantize
from octavo.tensor.quantized_tensor import QuantizedTensor
from octavo.tensor.quantizer import (
    CurrentQuantizer,
    DelayedQuantizer,
    Operand,
    PredictedQuantizer,
    Quantizer,
    StatelessQuantizer,
    StaticQuantizer,
    StochasticQuantizer,
    UsedScale,
)
from octavo.tensor.spec import QuantizeSpec, check_epsilon, checked_scale
from octavo.tensor.users_line import warn_user
from octavo.tensor.weight_operand import operand_of

__all__ = [
    "BlockQuantizer",
    "CurrentQuantizer",
    "DelayedQuantizer",
    "FieldsByName",
    "Operand",
    "OperandState",
    "PairedQuantizer",
    "PredictedQuantizer",
    "QuantizeSpec",
    "QuantizedTensor",
    "Quantizer",
    "StatelessQuantizer",
    "StaticQuantizer",
    "StepRule",
    "StochasticQuantizer",
    "UsedScale",
    "cast_together",
    "cast_to_representable",
    "casts_together",
    "check_epsilon",
    "checked_scale",
    "close_captured_step",
    "close_step",
    "histories_of",
    "is_captured",
    "needs",
    "operand_of",
    "quantize",
    "scaled_mm",
    "stays_in_place",
    "warn_user",
]
