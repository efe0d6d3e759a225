"""What surrounds layers as they run: the current recipe, the end of a step, checkpointing, counting."""

from octavo.runtime.autocast import autocast
from octavo.runtime.checkpointing import Call, checkpoint, layer_call
from octavo.runtime.counting import GemmCount, count_gemms
from octavo.runtime.cuda_graphs import make_graphed_callables
from octavo.runtime.initialisation import InitMode, init_mode, quantized_init
from octavo.runtime.layer_state import LayerState, registered_states, states_of
from octavo.runtime.optimizer_steps import STALE_STEPS, optimizer_steps
from octavo.runtime.plan import LinearPlan, Observer, plan_linear
from octavo.runtime.update import Agreement, agreed_maximum, set_agreement, update_scales
from octavo.runtime.weight_bound import WeightBound, takes_bound
from octavo.runtime.weight_caching import cached_weights, caches_weights

__all__ = [
    "STALE_STEPS",
    "Agreement",
    "Call",
    "GemmCount",
    "InitMode",
    "LayerState",
    "LinearPlan",
    "Observer",
    "WeightBound",
    "agreed_maximum",
    "autocast",
    "cached_weights",
    "caches_weights",
    "checkpoint",
    "count_gemms",
    "init_mode",
    "layer_call",
    "make_graphed_callables",
    "optimizer_steps",
    "plan_linear",
    "quantized_init",
    "registered_states",
    "set_agreement",
    "states_of",
    "takes_bound",
    "update_scales",
]
